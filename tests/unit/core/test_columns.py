"""Columns of numbers: what a header promises is judged before memory is taken for it."""

import json
import lzma
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from blockpilot.core.columns import Columns, Promise, read_columns
from blockpilot.core.errors import InputError

COLUMNS = {
    "a": np.arange(6, dtype=np.int32).reshape(2, 3),
    "b": np.ones(3, np.float16),
    "empty": np.zeros((0, 4), np.float32),
    "ids": np.array([1, 65535], np.uint16),
}


def accept(promises: dict[str, Promise], metadata: dict[str, str]) -> None:
    """Any columns will do."""


def read(path: Path, most: int = 1 << 20) -> tuple[Columns, dict[str, str]]:
    return read_columns(path, accept, most=most, advice="delete it")


@pytest.mark.parametrize("suffix", ["", ".xz"])
def test_columns_are_read_as_they_were_written(tmp_path: Path, suffix: str) -> None:
    path, data = tmp_path / f"file{suffix}", save(COLUMNS, {"said": "so"})
    path.write_bytes(lzma.compress(data) if suffix else data)
    found, metadata = read(path)
    assert metadata == {"said": "so"} and found.keys() == COLUMNS.keys()
    for name, column in COLUMNS.items():
        assert found[name].dtype == column.dtype
        np.testing.assert_array_equal(found[name], column)


def test_a_column_that_is_not_wanted_is_refused_before_it_is_read(tmp_path: Path) -> None:
    def refuse(promises: dict[str, Promise], metadata: dict[str, str]) -> None:
        assert promises["a"] == Promise(np.dtype("int32"), (2, 3)) and promises["b"].is_float
        raise ValueError("nobody wants it")

    (tmp_path / "file").write_bytes(save(COLUMNS))
    with pytest.raises(InputError, match="file is damaged: nobody wants it; delete it"):
        read_columns(tmp_path / "file", refuse, most=1 << 20, advice="delete it")


def pack(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(**changes: object) -> dict[str, object]:
    return {"x": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]} | changes}


HOSTILE = {
    "no header": b"",
    "header": bytes(64),
    "has no header": b"\xff" * 64,
    "its header: not valid JSON": pack(b"{" + b"[" * 100_000),
    "its header: Expected object, got array": pack([]),
    "its metadata": pack({"__metadata__": {"a": [1]}}),
    "unknown kind 'F99'": pack(entry(dtype="F99"), bytes(4)),
    "unknown kind 'BF16'": pack(entry(dtype="BF16"), bytes(4)),
    "Expected int >= 0, at shape": pack(entry(shape=[-4]), bytes(4)),
    "length <= 8, at shape": pack(entry(shape=[2**50] * 1000), bytes(4)),
    "another length than it should": pack(entry(shape=[5]), bytes(4)),
    "Expected array of length 2": pack(entry(data_offsets=[4]), bytes(4)),
    "more than 1 MB": pack(entry(shape=[2**33], data_offsets=[0, 2**33]), bytes(4)),
    "its length is not what its header says": pack(entry(shape=[2**19], data_offsets=[0, 2**19]), bytes(4)),
    "not what its header says": pack(entry(), bytes(5)),
}


@pytest.mark.parametrize("message", HOSTILE)
def test_a_hostile_header_is_one_line_and_takes_no_memory(tmp_path: Path, message: str) -> None:
    (tmp_path / "file").write_bytes(HOSTILE[message])
    tracemalloc.start()
    with pytest.raises(InputError, match=f"file is damaged: .*{message}.*; delete it") as caught:
        read(tmp_path / "file")
    assert "\n" not in str(caught.value) and tracemalloc.get_traced_memory()[1] < 30 << 20
    tracemalloc.stop()


def test_files_without_an_end_are_refused_early() -> None:
    with pytest.raises(InputError, match="/dev/zero is damaged: it has no header"):
        read(Path("/dev/zero"))
