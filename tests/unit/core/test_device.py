import pytest
import torch

from blockpilot.core.device import resolve_device
from blockpilot.core.errors import InputError


def test_devices_are_found_or_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device("cuda:1") == torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="PyTorch sees no GPU here: use the device cpu"):
        resolve_device("cuda")
    with pytest.raises(InputError, match="unknown device 'mps'"):
        resolve_device("mps")
