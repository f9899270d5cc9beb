"""The kernels behind a call, their times, and the operations of the device."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

_RUNTIME_CALLS = ("cudaLaunch", "cuLaunch", "cudaMemcpy", "cudaMemset")
_NUM_LISTED = 60


class Kernel(NamedTuple):
    """All launches of one kernel in a call; on a CPU, all calls of one operation."""

    name: str
    number: int
    milliseconds: float


class Profile(NamedTuple):
    """What a call launches and how long the device computes."""

    kernels: list[Kernel]
    """The longest first."""

    num_launches: int
    """Kernels and copies that the host launches; 0 on a CPU."""

    @property
    def busy_ms(self) -> float:
        """Milliseconds for which the device computes."""
        return sum(kernel.milliseconds for kernel in self.kernels)

    def lines(self) -> list[str]:
        """Returns the longest kernels as lines of text."""
        return [
            f"{k.milliseconds:9.3f} ms {k.number:6d} x {1000 * k.milliseconds / k.number:9.1f} us  " + k.name[:140]
            for k in self.kernels[:_NUM_LISTED]
        ]


def profile_call(run: Callable[[], object], wait: Callable[[], None], *, is_cuda: bool, trace: Path | None) -> Profile:
    """Calls a function once under torch's profiler.

    Args:
        run: The function.
        wait: Waits for the device.
        is_cuda: Whether the device is a GPU.
        trace: File that gets the trace, for `ui.perfetto.dev`; None writes none.
    """
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if is_cuda else [])
    with profile(activities=activities, acc_events=True) as profiler:
        run()
        wait()
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    averages: Iterable[Any] = profiler.key_averages()
    kernels, num_launches = [], 0
    for each in averages:
        is_kernel = each.device_type == DeviceType.CUDA if is_cuda else each.key.startswith("aten::")
        # Annotations have the duration of the kernels within them.
        if is_kernel and not each.is_user_annotation:
            microseconds = each.self_device_time_total if is_cuda else each.self_cpu_time_total
            kernels.append(Kernel(each.key, each.count, microseconds / 1000))
        elif each.key.startswith(_RUNTIME_CALLS):
            num_launches += each.count
    return Profile(sorted(kernels, key=lambda kernel: -kernel.milliseconds), num_launches)
