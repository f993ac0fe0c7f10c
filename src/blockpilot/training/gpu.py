"""What the GPU side of training may use."""

import importlib.util


def has_triton() -> bool:
    """Triton comes with PyTorch's CUDA builds on Linux; without it slower paths serve."""
    return importlib.util.find_spec("triton") is not None
