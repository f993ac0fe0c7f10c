"""Training text on disk and as batches."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from blockpilot.core.errors import InputError
from blockpilot.training.responses import Response, ResponseSet, read_responses, shard_path, write_shard

TEXTS = [Response([5, 6, 7, 8], 2, 1), Response([9], 1, 2), Response([1, 2, 3, 4, 5, 6], 3)]


def test_round_trip_through_shards(tmp_path: Path) -> None:
    for index, part in enumerate((TEXTS[:2], TEXTS[2:], [])):
        write_shard(shard_path(tmp_path, index), part)
    texts = read_responses(tmp_path)
    ids, lengths, prompt_lengths = texts.batch(torch.arange(3), 8)
    columns = zip(ids, lengths, prompt_lengths, texts.sources, strict=True)
    rows = [Response(row[:n].tolist(), int(p), int(source)) for row, n, p, source in columns]
    assert rows == TEXTS
    assert (len(texts), texts.num_answer_tokens) == (3, 5)
    assert [texts.slice(1, 3).source_name(index) for index in range(2)] == ["2", "0"]
    (tmp_path / "manifest.json").write_text('{"schema_version": 1, "config": {}, "sources": ["prompts", "b", "c"]}')
    assert [read_responses(tmp_path).slice(1, 3).source_name(index) for index in range(2)] == ["c", "prompts"]


def test_shards_of_two_runs_in_one_folder_are_read_together(tmp_path: Path) -> None:
    for name, texts in (("a", TEXTS[:2]), ("b", TEXTS[2:])):
        write_shard(tmp_path / f"shard-{name}-00000.safetensors", texts)
    assert len(read_responses(tmp_path)) == 3


@pytest.mark.parametrize(("largest", "dtype"), [(65535, torch.uint16), (65536, torch.int32)])
def test_ids_take_as_few_bytes_as_they_need(tmp_path: Path, largest: int, dtype: torch.dtype) -> None:
    write_shard(shard_path(tmp_path, 0), [Response([1, largest], 1)])
    assert load_file(shard_path(tmp_path, 0))["token_ids"].dtype == dtype
    assert read_responses(tmp_path).token_ids.tolist() == [1, largest]


def test_batches_are_padded_and_cut() -> None:
    ids, lengths, prompt_lengths = ResponseSet.from_responses(TEXTS).batch(torch.tensor([2, 0, 1]), 5)
    assert ids.tolist() == [[1, 2, 3, 4, 5], [5, 6, 7, 8, 0], [9, 0, 0, 0, 0]]
    assert (lengths.tolist(), prompt_lengths.tolist()) == ([5, 4, 1], [3, 2, 1])


def test_slices_answers_and_counts() -> None:
    texts = ResponseSet.from_responses(TEXTS)
    assert texts.slice(1, 3).batch(torch.arange(2), 6)[0].tolist() == [[9, 0, 0, 0, 0, 0], [1, 2, 3, 4, 5, 6]]
    assert texts.answer_ids(2, 5) == [4, 5]
    assert texts.count_answer_tokens(10).tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 1, 0]


def test_missing_data_is_named_and_nothing_is_created(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere holds no training text: run `blockpilot synthesize"):
        read_responses(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("damage", [b"", b"not a tensor file", None])
def test_a_damaged_shard_is_named(tmp_path: Path, damage: bytes | None) -> None:
    path = shard_path(tmp_path, 0)
    write_shard(path, TEXTS)
    path.write_bytes(path.read_bytes()[:-4] if damage is None else damage)
    with pytest.raises(InputError, match=r"shard-00000\.safetensors is damaged: .*; delete it and run"):
        read_responses(tmp_path)


BAD = {
    "lengths do not add up": {"lengths": [4, 1, 7]},
    "its lengths do not add up": {"lengths": [-1, 6, 6]},
    "lengths do not add": {"lengths": [2**62, 2**62, 11]},
    "do not add up": {"prompt_lengths": [2, 1, 7]},
    "do not": {"prompt_lengths": [-2, 1, 3]},
    "not as many as its prompt lengths": {"prompt_lengths": [2, 1]},
    "not as many as its sources": {"sources": [2, 1]},
    "holds token ids that no tokenizer gives": {"token_ids": [-1] * 11},
    "'token_ids' is no list of whole numbers": {"token_ids": [0.5] * 11},
    "'lengths' is no list of whole numbers": {"lengths": [[4, 1, 6]]},
    "'lengths' is missing": {"lengths": None},
    "'magic' is left over": {"magic": [1]},
}


@pytest.mark.parametrize("message", BAD)
def test_numbers_that_no_training_text_has_are_named(tmp_path: Path, message: str) -> None:
    path = shard_path(tmp_path, 0)
    write_shard(path, TEXTS)
    tensors = load_file(path)
    for name, values in BAD[message].items():
        tensors.pop(name, None)
        if values is not None:
            tensors[name] = torch.tensor(values)
    save_file(tensors, path)
    with pytest.raises(InputError, match=rf"shard-00000\.safetensors is damaged: .*{message}"):
        read_responses(tmp_path)


def test_tokens_beyond_the_vocabulary_are_named() -> None:
    texts = ResponseSet.from_responses(TEXTS)
    texts.require_vocabulary(10)
    with pytest.raises(InputError, match="holds token 9, and this target knows 9 tokens: another model wrote it"):
        texts.require_vocabulary(9)


def test_a_folder_of_another_verb_is_named(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"anchors": "every", "draft_sizes": []}')
    write_shard(shard_path(tmp_path, 0), TEXTS)
    with pytest.raises(InputError, match="holds traces of `blockpilot collect`, no training text: give a folder of"):
        read_responses(tmp_path)
    (tmp_path / "manifest.json").unlink()
    shard_path(tmp_path, 0).unlink()
    shard_path(tmp_path, 0).symlink_to("/dev/zero")
    with pytest.raises(InputError, match="is no file: delete it"):
        read_responses(tmp_path)
