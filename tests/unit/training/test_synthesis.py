"""The target writes its own training text: resumable, cut at loops, never two runs in one folder."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from blockpilot.core.errors import BlockPilotError, InputError
from blockpilot.core.manifests import MANIFEST, read_manifest
from blockpilot.text.repetition import find_loop
from blockpilot.training import synthesis
from blockpilot.training.synthesis import (
    MATERIALS_FILE,
    PROMPTS_FILE,
    SynthesisConfig,
    synthesize,
    tasks_that_failed,
)
from blockpilot.training.templates import Templates
from blockpilot.training.writing import Writer, chat_prefix
from tests.unit.training.pieces import chat_target, chat_tokenizer, ignore

CONFIG = SynthesisConfig(
    target="tiny",
    num_written=48,
    max_length=64,
    max_prompt_length=32,
    num_rows=8,
    shard_size=6,
    temperatures=(0.0, 1.0),
)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished")
    synthesize(CONFIG, chat_target(), out, ignore)
    return out


def answers(folder: Path) -> list[tuple[list[int], list[int]]]:
    texts = synthesis.read_responses(folder)
    rows = [texts.slice(index, index + 1) for index in range(len(texts))]
    return [(row.token_ids[: int(row.prompt_lengths[0])].tolist(), row.answer_ids(0, 1000)) for row in rows]


def test_chat_prefix() -> None:
    tokenizer = chat_tokenizer()
    assert chat_prefix(tokenizer) == tokenizer.encode("Q ")
    with pytest.raises(InputError, match=r"writes nothing before the user's words.*--num-prompts 0"):
        chat_prefix(chat_tokenizer("{{ messages[0]['content'] }}"))


def test_texts_are_chats_with_answers_free_of_loops(finished: Path) -> None:
    tokenizer = chat_tokenizer()
    opening, end = tokenizer.encode("Q "), tokenizer.encode("$A ")
    texts = answers(finished)
    assert len(texts) > 6
    for prompt, answer in texts:
        assert prompt[:2] == opening
        assert prompt[-3:] == end
        assert find_loop(answer) == len(answer) >= CONFIG.min_answer_length
        assert len(prompt) + len(answer) <= CONFIG.max_length
    manifest = read_manifest(finished)
    assert manifest["is_complete"] and manifest["num_texts"] == len(texts)
    assert manifest["num_answer_tokens"] == sum(len(answer) for _, answer in texts)


def test_texts_keep_the_order_of_their_prompts(finished: Path) -> None:
    kept = json.loads((finished / PROMPTS_FILE).read_text())
    plan = synthesis._Synthesis(CONFIG, chat_target(), finished, ignore, None)._plan(kept)
    order = [kept["written"][one.number] for one in plan]
    assert order != kept["written"]
    places = [order.index(prompt) for prompt, _ in answers(finished)]
    assert places == sorted(places), "held-out texts are the last ones: they must not be the longest"


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path, finished: Path) -> None:
    class StopError(Exception):
        pass

    def stop_in_second_shard(what: str, done: int, total: int) -> None:
        if "shard 1" in what:
            raise StopError

    with pytest.raises(StopError):
        synthesize(CONFIG, chat_target(), tmp_path, stop_in_second_shard)
    assert sorted(contents(tmp_path)) == [MANIFEST, PROMPTS_FILE, "shard-00000.safetensors"]
    stamp = (tmp_path / "shard-00000.safetensors").stat().st_mtime_ns
    synthesize(CONFIG, chat_target(), tmp_path, ignore)
    assert contents(tmp_path) == contents(finished)
    assert (tmp_path / "shard-00000.safetensors").stat().st_mtime_ns == stamp


def test_only_a_missing_shard_is_written_again(tmp_path: Path, finished: Path) -> None:
    for name, data in contents(finished).items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "shard-00001.safetensors").unlink()
    reports: list[str] = []
    synthesize(CONFIG, chat_target(), tmp_path, lambda what, done, total: reports.append(what))
    assert contents(tmp_path) == contents(finished)
    assert len(reports) == 1 and "shard 1" in reports[0]
    reports.clear()
    synthesize(CONFIG, chat_target(), tmp_path, lambda what, done, total: reports.append(what))
    assert contents(tmp_path) == contents(finished) and not reports


def test_another_configuration_is_refused(finished: Path) -> None:
    with pytest.raises(InputError, match=r"belongs to another run: config\.max_length is 64 there and 48 here; choose"):
        synthesize(replace(CONFIG, max_length=48), chat_target(), finished, ignore)


def test_rows_may_change_because_memory_may_not_allow_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(synthesis._Synthesis, "_answer", lambda *values: (_ for _ in ()).throw(MemoryError()))
        with pytest.raises(BlockPilotError, match="out of memory: lower --rows and give the same command again"):
            synthesize(CONFIG, chat_target(), tmp_path, ignore)
    synthesize(replace(CONFIG, num_rows=2), chat_target(), tmp_path, ignore)
    assert len(synthesis.read_responses(tmp_path)) > 0


def test_prompt_files_are_deduplicated_and_starts_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "p.txt").write_text("what is a\n what is a \nwhat is b\n" + "long " * 20 + "\n")
    config = replace(CONFIG, num_written=0, prompt_files=(str(tmp_path / "p.txt"),))
    synthesize(config, chat_target(), tmp_path / "files", ignore)
    tokenizer = chat_tokenizer()
    prompts = json.loads((tmp_path / "files" / PROMPTS_FILE).read_text())["files"]
    assert sorted(map(tokenizer.decode, prompts)) == ["Q what is aA ", "Q what is bA "]

    def write(*starts: str) -> list[str]:
        return Writer(chat_target(), CONFIG.num_rows, ignore).write_prompts(starts, CONFIG.num_written, most=32, seed=0)

    written = write("Write", "")
    assert any(text.startswith("Write") for text in written)
    assert not all(text.startswith("Write") for text in written)
    with pytest.raises(InputError, match=r"--start 'a+' alone has 40 tokens of 32"):
        write("a" * 40)


def test_further_answers_to_prompts_of_files_are_sampled(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("what is a\nwhat is b\n")
    config = replace(
        CONFIG, num_written=0, prompt_files=(str(tmp_path / "p.txt"),), num_answers=6, temperatures=(0.0, 1.0)
    )
    synthesize(config, chat_target(), tmp_path / "data", ignore)
    texts = synthesis.read_responses(tmp_path / "data")
    assert 2 < len(texts) <= 12 and set(texts.sources.tolist()) == {0}
    assert len({tuple(answer) for _, answer in answers(tmp_path / "data")}) > 4
    run = synthesis._Synthesis(config, chat_target(), tmp_path, ignore, None)
    plan = run._plan(json.loads((tmp_path / "data" / PROMPTS_FILE).read_text()))
    assert len(plan) == 12 and sum(one.temperature == 1 for one in plan) >= 10


def test_no_prompt_fits(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("long " * 20)
    config = replace(CONFIG, num_written=0, prompt_files=(str(tmp_path / "p.txt"),))
    with pytest.raises(InputError, match="none of 1 prompts fits into 32 tokens: raise --max-length"):
        synthesize(config, chat_target(), tmp_path / "out", ignore)


def test_no_chat_template_and_bad_prompt_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="tiny has no chat template"):
        synthesize(CONFIG, chat_target(None), tmp_path / "out", ignore)
    assert not (tmp_path / "out").exists()
    config = replace(CONFIG, prompt_files=(str(tmp_path / "gone.jsonl"),))
    with pytest.raises(InputError, match=r"gone.jsonl does not exist"):
        synthesize(config, chat_target(), tmp_path / "out", ignore)


def test_damaged_prompts_are_named(tmp_path: Path) -> None:
    (tmp_path / PROMPTS_FILE).write_text("[1")
    with pytest.raises(InputError, match=r"prompts.json: Expected object"):
        synthesize(CONFIG, chat_target(), tmp_path, ignore)


def test_what_a_refusal_advises_can_be_done(tmp_path: Path) -> None:
    """The refused run has left its manifest; it must not stand in the way of the run that was advised."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a b c d e f g h i j k l m n o p q r s t u v w x y z\n" * 3)
    given = {"target": "tiny", "num_written": 0, "prompt_files": (str(prompts),), "temperatures": (0.0,)}
    short = SynthesisConfig(**given, max_length=24, max_prompt_length=12)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="raise --max-length"):
        synthesize(short, chat_target(), tmp_path / "out", ignore)
    long = replace(short, max_length=160, max_prompt_length=80, min_answer_length=1)
    synthesize(long, chat_target(), tmp_path / "out", ignore)
    with pytest.raises(InputError, match="belongs to another run"):
        synthesize(replace(long, seed=1), chat_target(), tmp_path / "out", ignore)


TASKS = {
    "lists": {"thing": ["a", "b", "c", "d"]},
    "materials": [{"name": "passage", "prompts": ["on {thing}"], "tokens": 48}],
    "tasks": [
        {"name": "sum up", "prompts": ["sum {passage}"], "pieces": [1, 4], "tokens": 24},
        {"name": "talk", "prompts": ["{thing}?"], "then": ["and {thing}?", "go on"], "turns": 2, "tokens": 24},
    ],
}


def make_templates(folder: Path, **changes: object) -> Templates:
    path = folder / "tasks.json"
    path.write_text(json.dumps(TASKS | changes))
    return Templates.read(path)


MIXED = replace(CONFIG, num_tasks=40, max_length=96, max_prompt_length=64, shard_size=20)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("mixed")
    synthesize(MIXED, chat_target(), out / "data", ignore, make_templates(out))
    return out / "data"


def test_tasks_are_made_of_texts_the_target_wrote(mixed: Path) -> None:
    manifest = read_manifest(mixed)
    assert manifest is not None and manifest["sources"] == ["files", "written", "sum up", "talk"]
    passages = json.loads((mixed / MATERIALS_FILE).read_text())["passage"]
    texts, tokenizer = synthesis.read_responses(mixed), chat_tokenizer()
    rows = [texts.slice(index, index + 1) for index in range(len(texts))]
    prompts = [tokenizer.decode(row.token_ids[: int(row.prompt_lengths[0])].tolist()) for row in rows]
    assert all(len(row.token_ids) <= MIXED.max_length for row in rows)
    summed = [text for text, source in zip(prompts, texts.sources, strict=True) if source == 2]
    assert summed and all(any(passage in text for passage in passages) for text in summed)
    talks = [text for text, source in zip(prompts, texts.sources, strict=True) if source == 3]
    assert talks and all(text[:2] == "Q " and text[2] in "abcd" for text in talks)
    for row, name in zip(manifest["mix"], manifest["sources"], strict=True):
        own = texts.sources == manifest["sources"].index(name)
        assert (row["source"], row["texts"]) == (name, int(own.sum()))
        assert row["answer_tokens"] == int((texts.lengths - texts.prompt_lengths)[own].sum())
    assert sum(row["prompts"] for row in manifest["mix"][2:]) == MIXED.num_tasks
    assert not tasks_that_failed(manifest["mix"])


def test_a_conversation_goes_on_behind_its_own_answer(mixed: Path) -> None:
    texts, tokenizer = synthesis.read_responses(mixed), chat_tokenizer()
    talks = [texts.slice(index, index + 1) for index in range(len(texts)) if int(texts.sources[index]) == 3]
    prompts = [tokenizer.decode(row.token_ids[: int(row.prompt_lengths[0])].tolist()) for row in talks]
    answered = [tokenizer.decode(row.answer_ids(0, 1000)) for row in talks]
    turns = [prompt.count("Q ") for prompt in prompts]  # the tests' template writes it before every message
    assert {1, 3} <= set(turns) <= {1, 3, 5}
    for place, count in enumerate(turns):
        if count > 1:
            assert turns[place - 1] == count - 2, "turn by turn"
            assert prompts[place].startswith(prompts[place - 1].removesuffix("A ") + "Q " + answered[place - 1])


def test_an_interrupted_mix_goes_on_where_it_stopped(tmp_path: Path, mixed: Path) -> None:
    class StopError(Exception):
        pass

    def stop_at_answers(what: str, done: int, total: int) -> None:
        if "shard 1" in what:
            raise StopError

    with pytest.raises(StopError):
        synthesize(MIXED, chat_target(), tmp_path / "data", stop_at_answers, make_templates(tmp_path))
    synthesize(MIXED, chat_target(), tmp_path / "data", ignore, make_templates(tmp_path))
    assert contents(tmp_path / "data") == contents(mixed)


def test_other_templates_are_refused(tmp_path: Path, mixed: Path) -> None:
    other = make_templates(tmp_path, lists={"thing": ["e"]})
    with pytest.raises(InputError, match=r"belongs to another run: templates\.sha256 is '\w+' there and '\w+' here"):
        synthesize(MIXED, chat_target(), mixed, ignore, other)


def test_materials_that_share_words_with_a_test_set_are_left_out(tmp_path: Path, mixed: Path) -> None:
    passages = json.loads((mixed / MATERIALS_FILE).read_text())["passage"]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in passages))
    config = replace(MIXED, excluded_files=(str(tmp_path / "test.jsonl"),))
    with pytest.raises(InputError, match="all texts of material 'passage' share words with an excluded prompt"):
        synthesize(config, chat_target(), tmp_path / "data", ignore, make_templates(tmp_path))


def test_tasks_alone(tmp_path: Path) -> None:
    config = replace(MIXED, num_written=0, num_tasks=12)
    synthesize(config, chat_target(), tmp_path / "data", ignore, make_templates(tmp_path))
    manifest = read_manifest(tmp_path / "data")
    assert manifest is not None and manifest["mix"][1]["texts"] == 0 and manifest["num_texts"] > 0


def test_a_task_that_the_target_cannot_follow_is_named() -> None:
    rows = [{"source": "a", "prompts": 100, "texts": 9}, {"source": "b", "prompts": 100, "texts": 10}]
    assert tasks_that_failed([*rows, {"source": "c", "prompts": 15, "texts": 0}]) == ["a"]


def test_no_answer_is_long_enough(tmp_path: Path) -> None:
    config = replace(CONFIG, min_answer_length=60)
    with pytest.raises(InputError, match=r"none of \d+ answers has 60 tokens before it repeats"):
        synthesize(config, chat_target(), tmp_path, ignore)
