import pytest
import torch

from blockpilot.core.device import resolve_device
from blockpilot.core.errors import InputError


def test_devices_are_found_or_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(InputError, match="device cuda:2 was asked for, but PyTorch sees 2 of them here"):
        resolve_device("cuda:2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="PyTorch sees no GPU here: use the device cpu"):
        resolve_device("cuda")
    with pytest.raises(InputError, match="unknown device 'mps'"):
        resolve_device("mps")
