"""Peak memory while something runs: of the device on a GPU, of this process on a CPU."""

import resource
import sys
from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakMemory:
    """On Linux the process's high-water mark is set back at every start; elsewhere it is that of the whole run."""

    def __init__(self, device_type: str) -> None:
        self.is_cuda = device_type == "cuda"

    def start(self) -> None:
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats()
            return
        try:
            _CLEAR.write_text("5", encoding="ascii")
        except OSError:
            return  # no such file here, or not allowed: the mark only rises

    def read(self) -> int:
        """Bytes."""
        if self.is_cuda:
            return int(torch.cuda.max_memory_allocated())
        try:
            lines = _STATUS.read_text(encoding="utf-8").splitlines()
            return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
        except (OSError, StopIteration):
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            return peak if sys.platform == "darwin" else 1024 * peak
