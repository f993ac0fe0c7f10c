"""Tests that need an NVIDIA GPU; elsewhere they are skipped."""

import pytest
import torch

DEVICE = torch.device("cuda")


@pytest.fixture(autouse=True, scope="session")
def need_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
