"""Verbs on a disk that fails: the same command ends as if nothing had been, and nothing is lost that was kept.

Some faults of every kind are tried here; `make faults` tries many more.
"""

import random
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults.disk import KINDS, Fault, FaultyDisk, Killed
from tests.faults.results import find_hidden, read_results
from tests.faults.site import VERBS, Site
from tests.faults.trial import Trial, draw_trial, run_trial


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(tmp_path_factory.mktemp("site"))


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("verb", VERBS)
def test_a_disturbed_run_ends_as_if_nothing_had_been(
    site: Site, tmp_path: Path, verb: str, kind: str, number: int
) -> None:
    trial = draw_trial(random.Random(f"{verb}-{kind}-{number}"), site, verb=verb, kind=kind)
    assert run_trial(site, trial, tmp_path / "out") is None, trial


@pytest.mark.parametrize("verb", VERBS)
def test_a_disk_that_was_full_before_is_one_line(site: Site, tmp_path: Path, verb: str) -> None:
    assert run_trial(site, Trial(verb, (Fault("full", 1),)), tmp_path / "out") is None
    with FaultyDisk(Fault("full", 1)):
        error = site.run(verb, tmp_path / "other")
    assert error is not None and error.exit_code == 1 and "No space left on device" in str(error)


@pytest.mark.parametrize("verb", VERBS)
def test_files_that_libraries_write_may_not_fit(site: Site, tmp_path: Path, verb: str) -> None:
    """Files may not grow beyond some size: EFBIG, in the middle of a write."""
    with small_files(300):
        error = site.run(verb, tmp_path / "out")
    assert error is not None and error.exit_code == 1 and "\n" not in str(error)
    assert site.run(verb, tmp_path / "out") is None
    assert read_results(tmp_path / "out") == site.results[verb] and not find_hidden(tmp_path / "out")


@contextmanager
def small_files(size: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize(("verb", "file"), [("collect", "shard-00001.safetensors"), ("train-drafter", "config.json")])
def test_a_killed_run_leaves_its_lock_and_its_temporary_file_behind(
    site: Site, tmp_path: Path, verb: str, file: str
) -> None:
    with FaultyDisk() as whole:
        assert site.run(verb, tmp_path / "whole") is None
    operations = [(name, path.name) for name, path in whole.operations]
    out = tmp_path / "out"
    with FaultyDisk(Fault("kill", operations.index(("_rename", file)) + 1)) as disk, pytest.raises(Killed):
        site.run(verb, out)
    assert disk.has_struck and len(find_hidden(out)) == 2
    assert site.run(verb, out) is None
    assert not find_hidden(out)


def test_a_power_cut_takes_what_was_not_synced(tmp_path: Path) -> None:
    from blockpilot.core import files

    seen = set()
    for seed in range(20):
        path = tmp_path / str(seed) / "file"
        path.parent.mkdir()
        with FaultyDisk(Fault("power", 10**9, seed)) as disk:
            files.write_text(path, "kept, ")
            assert disk.unsafe == 0
            files._append(path, b"lost")
            files._rename(path, path.with_name("new"))
        disk.cut_power()
        (found,) = path.parent.iterdir()
        seen.add((found.name, found.read_bytes()))
    assert seen == {(name, text) for name in ("file", "new") for text in (b"kept, lo", b"kept, lo\0\0")}
