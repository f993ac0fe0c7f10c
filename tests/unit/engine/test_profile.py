"""Measuring step costs with tiny models, and remembering them."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from blockpilot import SamplingParams
from blockpilot.cli.main import main
from blockpilot.cli.profile import BATCH_SIZES
from blockpilot.core.config import EngineConfig
from blockpilot.core.errors import InputError
from blockpilot.decoding import host_step
from blockpilot.engine import llm as llm_module
from blockpilot.engine import profile as profile_module
from blockpilot.engine import step_timing
from blockpilot.engine.llm import LLM
from blockpilot.engine.profile import (
    ensure_costs,
    load_profile,
    measure,
    profile_key,
    profile_path,
    read_profile,
    remember,
    usual_batch_sizes,
)
from blockpilot.engine.step_timing import GPU_TOTALS, MAX_TOKENS, ProfilePlan
from blockpilot.models import loading
from blockpilot.models.loading import LoadedTarget
from blockpilot.pilots.cost_model import CostPoint, StepCosts
from tests.tiny import make_dflash, make_eagle3, make_llm, make_target
from tests.unit.pilots.hostile import BAD_PROFILES

PLAN = ProfilePlan(draft_sizes=(2, 4, 32), verify_totals=(1, 2, 4, 8), contexts=(20,), num_rounds=2)
PARAMS = SamplingParams(max_new_tokens=8, ignore_eos=True)


@pytest.fixture(autouse=True)
def _own_cache(model_cache: Path) -> None:
    """Nothing is remembered between tests."""


def make_drafted() -> LLM:
    return make_llm(drafter=make_dflash(is_second=True))


@pytest.mark.parametrize("drafter", ["dflash2", "eagle3", "ngram", None])
def test_every_drafter_is_measured_and_leaves_no_trace(drafter: str | None) -> None:
    models = {"dflash2": lambda: make_dflash(is_second=True), "eagle3": make_eagle3}
    llm = make_llm(drafter=models[drafter]() if drafter in models else drafter)
    plain = llm.generate("abc", PARAMS, pilot="ar", is_raw=True)
    costs = measure(llm, replace(PLAN, batch_sizes=(1, 2), contexts=(20, 60)))
    assert {(p.tokens, p.batch_size, p.context_length) for p in costs.verify} == {
        *((n, 1, context) for n in (1, 2, 4, 8) for context in (20, 60)),
        *((n, 2, context) for n in (1, 2, 4) for context in (20, 60)),
    }
    limit = 16 if drafter == "eagle3" else 32
    assert {p.tokens for p in costs.draft} == ({2, 4, limit} if drafter else set())
    assert all(p.ms > 0 for p in costs.verify) and costs.overhead_ms > 0
    assert llm.engine.runner.cache.num_free == 4 and set(llm.engine.runner.cache.lengths) == {0}
    if drafter:
        again = llm.generate("abc", PARAMS, pilot="fixed:4", is_raw=True)
        assert again.token_ids == plain.token_ids


@pytest.mark.parametrize(("num_slots", "full"), [(4, 4), (6, 4), (3, 2), (1, 1)])
def test_a_gpu_is_measured_with_a_full_batch_too(monkeypatch: pytest.MonkeyPatch, num_slots: int, full: int) -> None:
    llm = make_llm(drafter=make_dflash(is_second=True), num_slots=num_slots)
    assert ensure_costs(llm).max_batch_size == 1
    monkeypatch.setattr(llm, "device_type", "cuda")
    costs = ensure_costs(llm)  # what is remembered of a batch of one does not suffice
    assert costs.max_batch_size == full
    if full > 1:
        tokens = {total // full for total in GPU_TOTALS if total % full == 0 and total // full <= MAX_TOKENS}
        assert len(tokens) > 8 and {p.tokens for p in costs.verify if p.batch_size == full} == tokens
        assert max(p.tokens for p in costs.verify if p.batch_size == 1) == 64
        assert {p.batch_size for p in costs.draft} == {1, full}
    remember(costs)
    monkeypatch.setattr(profile_module, "measure", lambda *_: pytest.fail("measured again"))
    assert ensure_costs(llm) == costs


def test_a_careful_profile_of_one_request_is_kept_but_serves_no_batch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(profile_module, "MAX_ERROR", 1e9)  # tiny passes jitter
    llm = make_drafted()
    monkeypatch.setattr(llm, "device_type", "cuda")
    careful = remember(measure(llm, PLAN))
    assert {point.batch_size for point in ensure_costs(llm).verify} == {1, 4}
    assert "with --batch-sizes 1,4" in caplog.text
    assert load_profile(profile_key(llm)) == careful
    alone = make_llm(drafter=make_dflash(is_second=True), num_slots=1)
    monkeypatch.setattr(alone, "device_type", "cuda")
    assert ensure_costs(alone) == careful


@pytest.mark.parametrize(
    ("measured", "num_slots", "serves"),
    [
        ((1,), 1, True),
        ((1,), 64, False),
        ((1, 4, 16, 64), 1, True),
        ((1, 4, 16, 64), 8, True),
        ((1, 4, 16, 64), 64, True),
        ((1, 4, 16, 64), 127, True),
        ((1, 4, 16, 64), 128, False),
        ((1, 64), 64, False),  # between batches costs do not run straight
        ((64,), 1, False),
    ],
)
def test_remembered_costs_serve_engines_whose_batches_they_cover(
    monkeypatch: pytest.MonkeyPatch, measured: tuple[int, ...], num_slots: int, serves: bool
) -> None:
    llm = make_drafted()
    monkeypatch.setattr(llm, "device_type", "cuda")
    monkeypatch.setattr(llm, "config", replace(llm.config, num_slots=num_slots))
    points = tuple(CostPoint(1, 1.0, size) for size in measured)
    known = remember(StepCosts(verify=points, key=profile_key(llm)))

    def stop(*_: object) -> None:
        raise InterruptedError

    monkeypatch.setattr(profile_module, "measure", stop)
    if serves:
        assert ensure_costs(llm) == known
    else:
        with pytest.raises(InterruptedError):
            ensure_costs(llm)


def test_costs_are_measured_once_and_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_drafted()
    monkeypatch.setattr(profile_module, "MAX_ERROR", 1e9)  # tiny passes jitter
    first = ensure_costs(llm)
    assert first.key["is_quick"] and load_profile(profile_key(llm)) == first
    monkeypatch.setattr(profile_module, "measure", lambda *_: pytest.fail("measured again"))
    assert ensure_costs(make_drafted()) == first
    assert make_drafted().costs == first


def test_disturbed_measurements_are_used_but_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_module, "MAX_ERROR", -1.0)
    llm = make_drafted()
    assert ensure_costs(llm).verify and load_profile(profile_key(llm)) is None


@pytest.mark.parametrize("name", ["device", "dtype", "target", "drafter", "num_threads", "version"])
def test_another_machine_or_pair_is_measured_anew(name: str) -> None:
    llm = make_drafted()
    key = profile_key(llm)
    remember(StepCosts(verify=StepCosts.linear().verify, key=key))
    assert load_profile(key) is not None and load_profile(key | {name: "other"}) is None


def test_a_profile_named_by_the_user_must_fit(tmp_path: Path) -> None:
    llm = make_drafted()
    path = tmp_path / "costs.json"
    costs = StepCosts(verify=StepCosts.linear().verify, key=profile_key(llm) | {"version": "0.0.1"})
    path.write_text(json.dumps(costs.to_dict()))
    assert LLM(make_target(), drafter=make_dflash(is_second=True), config=llm.config, costs=path).costs == costs
    with pytest.raises(InputError, match=r"stale: it was measured with drafter 'dflash', and this is 'ngram'"):
        LLM(make_target(), drafter="ngram", config=llm.config, costs=path)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"key": {}, "overhead_ms": 1, "draft": [], "verify": []}'])
def test_files_that_are_no_profiles(content: str) -> None:
    llm = make_drafted()
    path = profile_path(profile_key(llm))
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert load_profile(profile_key(llm)) is None
    with pytest.raises(InputError, match=r"\.json"):
        read_profile(path)


@pytest.mark.parametrize("damage", BAD_PROFILES)
def test_a_bad_profile_is_one_line(tmp_path: Path, damage: str) -> None:
    path, change = tmp_path / "costs.json", BAD_PROFILES[damage]
    stored = StepCosts.linear().to_dict()
    path.write_text(json.dumps(stored | change if isinstance(change, dict) and change else change))
    with pytest.raises(InputError, match=r"costs\.json is no profile: .*; name a file written by") as caught:
        read_profile(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"\xff\xfe", b'{"key": NaN}', b"[" * 100_000, b'{"\\ud800": 1}', b""])
def test_text_that_is_no_json_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "costs.json").write_bytes(content)
    with pytest.raises(InputError, match=r"costs\.json is no profile: "):
        read_profile(tmp_path / "costs.json")
    for path, message in ((Path("/dev/zero"), "larger than 16 MB"), (tmp_path, "Is a directory")):
        with pytest.raises(InputError, match=message):
            read_profile(path)


def test_what_cannot_be_measured_names_both_sides() -> None:
    llm = make_drafted()
    with pytest.raises(InputError, match="batch of 5 needs as many slots; this engine has 4"):
        measure(llm, replace(PLAN, batch_sizes=(5,)))
    with pytest.raises(InputError, match=r"context of 150 .* up to 80"):
        measure(llm, replace(PLAN, contexts=(150,)))
    streams = [llm.stream("abc", PARAMS, pilot="ar", is_raw=True) for _ in range(4)]
    for stream in streams:
        next(stream)
    with pytest.raises(InputError, match="0 are free"):
        measure(llm, PLAN)


def test_auto_weighs_what_was_measured() -> None:
    llm = make_drafted()
    key = profile_key(llm)
    saturated = StepCosts.linear(draft=0.2, fixed=0.5, slope=0.5)
    remember(StepCosts(saturated.draft, saturated.verify, 0.0, key))
    completion = llm.generate("abc", PARAMS, pilot="auto", is_raw=True)
    assert {step.block_size for step in completion.steps} == {1}


@pytest.fixture
def _tiny_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(target: LoadedTarget, *, drafter: str, pilot: str, config: EngineConfig) -> LLM:
        return LLM(target, drafter=make_dflash(), pilot=pilot, config=config)

    monkeypatch.setattr(llm_module, "LLM", build)
    monkeypatch.setattr(loading, "load_target", lambda *_, **options: make_target())


@pytest.mark.usefixtures("_tiny_command")
def test_the_command_prints_a_table_then_remembers(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["profile", "--contexts", "20", "--quick"]
    assert main(words) == 0
    shown = capsys.readouterr()
    assert all(word in shown.out for word in ("tokens", "verify", "draft", "fit error", "overhead"))
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert Path(found["path"]).is_file() and found["key"]["is_quick"]
    assert set(found["fit_error"]) == {"leave_one_out", "worst", "spread"}
    created = found["verify"]
    assert main([*words, "--json", "--force"]) == 0
    assert json.loads(capsys.readouterr().out)["verify"] != created


@pytest.mark.usefixtures("_tiny_command")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--device", "cpu"], ("auto", 1, 400)),
        (["--device", "cuda"], ("bfloat16", 64, 400)),  # all that the target holds
        (["--device", "cuda", "--contexts", "32"], ("bfloat16", 64, 288)),
        (["--device", "cuda", "--batch-sizes", "3", "--dtype", "float16"], ("float16", 3, 400)),
    ],
)
def test_a_gpu_is_measured_as_its_engines_will_ask(
    monkeypatch: pytest.MonkeyPatch, words: list[str], expected: tuple[str, int, int]
) -> None:
    made: list[EngineConfig] = []

    def stop(target: LoadedTarget, *, config: EngineConfig, **_: object) -> LLM:
        made.append(config)
        raise InputError("enough")

    target = make_target()
    target.decoder.config = replace(target.decoder.config, context_length=400)
    monkeypatch.setattr(loading, "load_target", lambda *_, **options: target)
    monkeypatch.setattr(llm_module, "LLM", stop)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert main(["profile", *words]) == 2
    assert (made[0].dtype, made[0].num_slots, made[0].context_length) == expected


def test_the_commands_own_batch_sizes_serve_an_engine_of_64_slots() -> None:
    assert ",".join(map(str, usual_batch_sizes(64))) == BATCH_SIZES["cuda"]


@pytest.mark.usefixtures("_tiny_command")
@pytest.mark.parametrize("flag", ["--contexts", "--batch-sizes"])
@pytest.mark.parametrize("value", ["0", "a", "", "1,,2", "-1"])
def test_bad_lists_are_refused(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", f"{flag}={value}"]) == 2
    assert flag in capsys.readouterr().err


@pytest.mark.parametrize("padding", [(), (1, 2, 4, 8, 16, 32, 64)])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_timed_checks_have_the_size_they_are_recorded_under(
    monkeypatch: pytest.MonkeyPatch, padding: tuple[int, ...], batch_size: int
) -> None:
    llm = make_llm(drafter=make_dflash(is_second=True), num_slots=batch_size)
    runner = llm.engine.runner
    monkeypatch.setattr(runner, "buckets", padding)
    sizes: list[set[int]] = []
    verify = runner.verify
    monkeypatch.setattr(
        runner, "verify", lambda trees, *rest: sizes.append({len(tree) for _, tree in trees}) or verify(trees, *rest)
    )
    totals = tuple(batch_size * tokens for tokens in (1, 2, 8, 33, 64))
    costs = measure(llm, replace(PLAN, batch_sizes=(batch_size,), verify_totals=totals, num_rounds=12))
    assert costs.padding == padding
    assert {1, 2, 8, 33, 64} <= {size for step in sizes for size in step}
    assert all(len(step) == 1 and step <= {1, 2, 3, 8, 33, 64} for step in sizes)  # 3 of what overhead is measured with
    counts = Counter(size for step in sizes for size in step)
    assert counts[64] == counts[33] == counts[8] == 13  # one warms up


@pytest.mark.parametrize("batch_sizes", [(1,), (1, 2)])
def test_what_follows_a_check_is_overhead_and_no_check_is_cheaper_for_it(
    monkeypatch: pytest.MonkeyPatch, batch_sizes: tuple[int, ...]
) -> None:
    """Keeping and observing take 5 ms per request here, more than a check of a tiny model: it stays what it is."""
    llm = make_drafted()
    clock = {"now": 0.0}
    keep, verify = llm.engine.runner.keep, llm.engine.runner.verify

    def slow_verify(trees, *rest):  # type: ignore[no-untyped-def]
        clock["now"] += 1e-3 * sum(len(tree) for _, tree in trees)
        return verify(trees, *rest)

    def slow_keep(paths):  # type: ignore[no-untyped-def]
        clock["now"] += 5e-3 * len(paths)
        keep(paths)

    monkeypatch.setattr(llm.engine.runner, "verify", slow_verify)
    monkeypatch.setattr(llm.engine.runner, "keep", slow_keep)
    for module in (step_timing, host_step):
        monkeypatch.setattr(module.time, "perf_counter", lambda: clock["now"])
    costs = measure(llm, replace(PLAN, batch_sizes=batch_sizes))
    assert costs.overhead_ms == pytest.approx(5.0)
    expected = {
        (point.tokens, size): point.tokens * size + 5.0 * (size - 1) for point in costs.verify for size in (1, 2)
    }
    for point in costs.verify:
        assert point.ms == pytest.approx(expected[point.tokens, point.batch_size])


def test_on_a_cpu_a_careful_profile_serves_whatever_batches_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_drafted()
    careful = remember(measure(llm, replace(PLAN, batch_sizes=(4,))))
    monkeypatch.setattr(profile_module, "measure", lambda *_: pytest.fail("measured again"))
    assert ensure_costs(llm) == careful
