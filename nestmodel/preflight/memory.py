"""Peak memory of a GPU, or of this process, and memory sizes as text."""

import gc
import sys
from contextlib import suppress
from pathlib import Path

import torch

from nestmodel.memory import available_bytes, read_kib
from nestmodel.training.run_state import max_rss_bytes


def gigabytes(number: int | float) -> str:
    """Returns a number of bytes as text in GB, or in MB if it is below 1 GB."""
    return f"{number / 1e9:.1f} GB" if number >= 1e9 else f"{number / 1e6:.1f} MB"


def resident_bytes(pid: int | str = "self") -> int:
    """Returns the resident memory of a process in bytes; 0 if it has ended, or on systems without /proc."""
    return 1024 * read_kib(f"/proc/{pid}/status", "VmRSS")


class PeakMemory:
    """Measures the peak memory that torch reserves on a GPU, or the peak resident memory of this process.

    The measurement starts now or, if the system does not allow that, at the start of the process. Reserved memory
    includes what fragmentation makes unusable; the sum of all tensors would be too small a measure.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        elif sys.platform == "linux":
            with suppress(OSError):  # hardened containers forbid it
                Path("/proc/self/clear_refs").write_text("5")

    def peak_bytes(self) -> int:
        """Returns the peak since the start of the measurement."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_reserved(self._device)
        return 1024 * read_kib("/proc/self/status", "VmHWM") or max_rss_bytes()


def usable_bytes(device: torch.device, num_ranks: int = 1) -> int:
    """Returns the memory that a step may use in this process, including what the process uses already; 0 if unknown.

    On a GPU, it is what torch may reserve; the CUDA context and the memory of other processes are not part of it. On a
    CPU, the ranks of this machine share what is available.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device)
    return resident_bytes() + available_bytes() // num_ranks
