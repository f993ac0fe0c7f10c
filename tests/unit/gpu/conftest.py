"""Fixtures of the tests that run a GPU's passes on a CPU."""

from tests.unit.gpu.late_device import device, runs

__all__ = ["device", "runs"]
