"""The loop: exact to resume, and nothing is lost whatever stops it."""

import errno
import json
import os
import resource
import signal
from pathlib import Path

import pytest
import torch

from blockpilot.core.errors import BlockPilotError, InputError
from blockpilot.training.checkpoints import CHECKPOINT, LOG, TrainingStoppedError, read_log
from blockpilot.training.distributed import Group
from blockpilot.training.drafter_run import DrafterRun
from blockpilot.training.responses import Response, ResponseSet
from blockpilot.training.trainer import Trainer
from tests.unit.training.pieces import ignore, make_objective, make_trainer

LENGTHS = [6, 7, 8, 12, 14, 16, 20, 30, 32, 40, 48, 60] * 3


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.objective.model.state_dict().items()}


def assert_same_run(ours: Trainer, theirs: Trainer) -> None:
    assert all(torch.equal(a, b) for a, b in zip(weights(ours).values(), weights(theirs).values(), strict=True))
    logs = [list(read_log(trainer.out)) for trainer in (ours, theirs)]
    for row in logs[0] + logs[1]:
        row.pop("steps_per_second", None)
    assert logs[0] == logs[1]


class StopAt:
    """A report that does something when a step is logged."""

    def __init__(self, step: int, action) -> None:
        self.step, self.action = step, action

    def __call__(self, row) -> None:
        if row["step"] == self.step:
            self.action()


def interrupt() -> None:
    raise KeyboardInterrupt


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    trainer = make_trainer(tmp_path_factory.mktemp("straight"))
    trainer.run(ignore)
    return trainer


@pytest.mark.parametrize(("action", "exit_code"), [(interrupt, 130), (terminate, 143)])
def test_a_stopped_run_goes_on_as_if_nothing_had_been(tmp_path: Path, straight: Trainer, action, exit_code) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(TrainingStoppedError, match=r"step 10 is saved in .*: give the same command again") as stop:
        make_trainer(tmp_path).run(StopAt(10, action))
    assert stop.value.exit_code == exit_code
    assert signal.getsignal(signal.SIGTERM) is handler
    resumed = make_trainer(tmp_path)
    assert resumed.step == 10
    resumed.run(ignore)
    assert_same_run(resumed, straight)


def test_a_killed_run_loses_only_steps(tmp_path: Path, straight: Trainer) -> None:
    def die() -> None:
        raise SystemExit  # nothing of ours runs any more, as after SIGKILL

    with pytest.raises(SystemExit):
        make_trainer(tmp_path, checkpoint_every=6).run(StopAt(16, die))
    with (tmp_path / LOG).open("a") as log:
        log.write('{"step": 17, "lo')
    resumed = make_trainer(tmp_path)
    assert resumed.step == 12
    assert [row["step"] for row in read_log(tmp_path)] == [2, 4, 6, 8, 10, 12]
    resumed.run(ignore)
    assert_same_run(resumed, straight)


def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    def twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(TrainingStoppedError, match="interrupted; step 4 is saved"):
        make_trainer(tmp_path).run(StopAt(4, twice))


def test_an_update_cut_short_is_not_saved(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, checkpoint_every=4)
    real_step = trainer.optimizers[0].step

    def step() -> None:
        if trainer.step == 6:
            raise KeyboardInterrupt
        real_step()

    trainer.optimizers[0].step = step
    with pytest.raises(TrainingStoppedError, match="step 4 is saved"):
        trainer.run(ignore)
    assert make_trainer(tmp_path).step == 4


def test_a_stop_before_the_first_step_says_so(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.objective.loss = lambda *batch: interrupt()
    with pytest.raises(TrainingStoppedError, match="nothing was saved yet"):
        trainer.run(ignore)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA"), RuntimeError("DefaultCPUAllocator: can't allocate"), MemoryError()]
)
def test_out_of_memory_saves_and_the_knob_may_be_turned(tmp_path: Path, error: Exception) -> None:
    trainer = make_trainer(tmp_path)
    real_loss = trainer.objective.loss

    def loss(*batch):
        if trainer.step == 3:
            raise error
        return real_loss(*batch)

    trainer.objective.loss = loss
    with pytest.raises(BlockPilotError, match=r"lower --batch-size or --blocks .* step 3 is saved"):
        trainer.run(ignore)
    resumed = make_trainer(tmp_path, batch_size=2)
    assert resumed.step == 3
    resumed.run(ignore)


def test_other_errors_pass(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    with pytest.raises(ZeroDivisionError):
        trainer.run(StopAt(2, lambda: 1 // 0))


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"learning_rate": 0.5}, "run.learning_rate is 0.0015 there and 0.5 here"),
        ({"seed": 7}, "run.seed is 0 there and 7 here"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path, options, line: str) -> None:
    make_trainer(tmp_path, steps=2).run(ignore)
    before = (tmp_path / CHECKPOINT).read_bytes()
    with pytest.raises(InputError, match=f"belongs to another run: {line}; choose another --out"):
        make_trainer(tmp_path, steps=2, **options)
    assert (tmp_path / CHECKPOINT).read_bytes() == before


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / CHECKPOINT).write_bytes(b"half a file")
    with pytest.raises(InputError, match=r"checkpoint.pt is no readable checkpoint: delete it to start anew"):
        make_trainer(tmp_path)


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, steps=4, checkpoint_every=2)
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def fill_disk() -> None:  # files may not grow beyond what the log needs: EFBIG, the same path as ENOSPC
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))

    try:
        with pytest.raises(BlockPilotError, match=r"cannot write .*checkpoint.pt: .*give the same command again"):
            trainer.run(StopAt(4, fill_disk))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert sorted(path.name for path in tmp_path.iterdir()) == [CHECKPOINT, LOG]
    assert make_trainer(tmp_path, steps=4, checkpoint_every=2).step == 2


def test_no_space_in_the_middle_of_a_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(state, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    trainer = make_trainer(tmp_path, steps=4, checkpoint_every=2)
    with pytest.raises(BlockPilotError, match="No space left on device; the file was left as it was"):
        trainer.run(StopAt(4, lambda: monkeypatch.setattr(torch, "save", save)))
    monkeypatch.undo()
    assert make_trainer(tmp_path, steps=4).step == 2


def test_an_evaluation_that_was_cut_short_is_made_up_for(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, steps=4, evaluate_every=2)
    trainer.objective.evaluate = interrupt
    with pytest.raises(TrainingStoppedError):
        trainer.run(ignore)
    make_trainer(tmp_path, steps=4, evaluate_every=2).run(ignore)
    kinds = [(row["step"], "evaluation" in row) for row in read_log(tmp_path)]
    assert kinds == [(2, False), (2, True), (4, False), (4, True)]
    size = (tmp_path / LOG).stat().st_size
    make_trainer(tmp_path, steps=4, evaluate_every=2).run(ignore)
    assert (tmp_path / LOG).stat().st_size == size, "a finished run has nothing to do"


def test_every_process_has_texts(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--batch-size 4 must be a multiple of the 3 processes"):
        make_trainer(tmp_path / "three", group=Group(0, 3))


def test_texts_of_all_lengths_train_together(tmp_path: Path) -> None:
    texts = ResponseSet.from_responses(Response([7 + place % 30] * length, 4) for place, length in enumerate(LENGTHS))
    options = {"width": 16, "max_width": 48, "blocks": 4, "batch_size": 6, "steps": 12}
    straight = make_trainer(tmp_path / "straight", make_objective(), texts, **options)
    straight.run(ignore)
    with pytest.raises(TrainingStoppedError):
        make_trainer(tmp_path / "resumed", make_objective(), texts, **options).run(StopAt(6, interrupt))
    resumed = make_trainer(tmp_path / "resumed", make_objective(), texts, **options)
    resumed.run(ignore)
    assert_same_run(resumed, straight)


def test_the_log_is_strict_json(tmp_path: Path) -> None:
    make_trainer(tmp_path, make_objective(min_block_size=2), steps=2).run(ignore)
    rows = [json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / LOG).read_text().splitlines()]
    assert {"step", "loss", "emitted", "first", "gradient_norm", "learning_rate"} <= set(rows[0])


def diverge(trainer: Trainer) -> None:
    """Weights that are no numbers, as after a step that was far too long."""
    with torch.no_grad():
        trainer.parameters[0].fill_(float("nan"))


def test_training_that_diverges_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, checkpoint_every=4)
    advice = "a lower --learning-rate into another --out"
    with pytest.raises(BlockPilotError, match=rf"diverged by step 8: .* step 4 is saved in .*{advice}"):
        trainer.run(StopAt(6, lambda: diverge(trainer)))
    assert make_trainer(tmp_path, checkpoint_every=4).step == 4
    assert [row["step"] for row in read_log(tmp_path)] == [2, 4]
    straight = make_trainer(tmp_path / "straight", checkpoint_every=4)
    straight.run(ignore)
    resumed = make_trainer(tmp_path, checkpoint_every=4)
    resumed.run(ignore)
    assert_same_run(resumed, straight)


def test_weights_that_diverged_are_not_saved_by_an_interruption(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, checkpoint_every=4)

    def spoil() -> None:
        diverge(trainer)
        raise KeyboardInterrupt

    with pytest.raises(BlockPilotError, match="diverged by step 6"):
        trainer.run(StopAt(6, spoil))
    assert make_trainer(tmp_path, checkpoint_every=4).step == 4


def test_a_loss_that_is_no_number_from_the_start_saves_nothing(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    diverge(trainer)
    with pytest.raises(BlockPilotError, match=r"diverged by step 2: .* nothing was saved"):
        trainer.run(ignore)
    assert not (tmp_path / CHECKPOINT).exists()


@pytest.mark.parametrize(
    "options",
    [
        {"layers": 1_000_000},
        {"selector_rank": 10**9},
        {"steps": 10**12},
        {"batch_size": 10**9},
        {"seed": 2**63},
        {"learning_rate": float("inf")},
        {"taps": 10**9},
        {"intermediate_size": 2**40},
    ],
)
def test_sizes_that_nobody_means_are_refused(options: dict[str, object]) -> None:
    name = next(iter(options)).replace("_", "-")
    with pytest.raises(InputError, match=f"--{name} must"):
        DrafterRun(**options)  # type: ignore[arg-type]
