"""Two processes over gloo take the very steps of one process with the whole batch."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from blockpilot.training.checkpoints import read_log
from blockpilot.training.distributed import join_group, own_device
from tests.unit.training.pieces import ignore, make_objective, make_trainer

STEPS = 3


def train(out: Path) -> None:
    """One process of the run: torch.distributed finds its peers through the environment, as under torchrun."""
    torch.set_num_threads(1)
    out.mkdir(exist_ok=True)
    with join_group(torch.device("cpu")) as group:
        objective = make_objective(is_second=True)
        make_trainer(out / "run", objective, group=group, steps=STEPS, log_every=1).run(ignore)
        torch.save(objective.model.state_dict(), out / f"weights-{group.rank}-of-{group.size}.pt")


def thread_names() -> set[str]:
    return {(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()}


def start_process(out: Path, rank: int, port: int) -> subprocess.Popen[bytes]:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environment = os.environ | {name: str(value) for name, value in names.items()}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return subprocess.Popen([sys.executable, __file__, str(out)], env=environment, stderr=subprocess.PIPE)


@pytest.mark.slow
def test_two_processes_train_like_one(tmp_path: Path) -> None:
    train(tmp_path / "single")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [start_process(tmp_path / "pair", rank, port) for rank in range(2)]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors.decode()[-2000:]
    single = torch.load(tmp_path / "single" / "weights-0-of-1.pt")
    first, second = (torch.load(tmp_path / "pair" / f"weights-{rank}-of-2.pt") for rank in range(2))
    for name, value in single.items():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], value, rtol=0, atol=1e-5)
    losses = [[row.get("loss", 0.0) for row in read_log(tmp_path / name / "run")] for name in ("single", "pair")]
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-5, atol=1e-5)


def test_every_process_takes_its_own_gpu(monkeypatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert own_device("cuda") == torch.device("cuda", 3)
    assert own_device("cuda:1") == torch.device("cuda", 1)
    assert own_device("cpu") == torch.device("cpu")


if __name__ == "__main__":
    train(Path(sys.argv[1]))
    assert not any("gloo" in name for name in thread_names()), "the group is gone, or it may end us by SIGABRT"
