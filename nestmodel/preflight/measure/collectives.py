"""Times all-reduces over all ranks."""

import statistics
import time

import torch
import torch.distributed as dist
from torch import Tensor

from nestmodel.errors import TrainingError
from nestmodel.training.module import NestModel

_POLL_S = 5e-5
_NUM_SMALL_SUMS, _NUM_LARGE_SUMS = 20, 5


def allocate_buffers(model: NestModel, device: torch.device) -> list[Tensor]:
    """Returns the buffers of `check_collectives`: one of a single value, and one of the size of all gradients."""
    num_gradients = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return [torch.zeros(size, device=device) for size in (1, num_gradients)]


def time_sums(buffers: list[Tensor], timeout_s: float) -> tuple[float, float]:
    """Returns the median seconds of summing each buffer over all ranks, which must call it together.

    Raises:
        TrainingError: A sum was not complete within `timeout_s`.
    """
    small, large = (
        [_time_all_reduce(buffer, timeout_s) for _ in range(number + 1)]
        for buffer, number in zip(buffers, (_NUM_SMALL_SUMS, _NUM_LARGE_SUMS), strict=True)
    )
    return statistics.median(small[1:]), statistics.median(large[1:])  # the first ones set up connections


def _time_all_reduce(buffer: Tensor, timeout_s: float) -> float:
    if buffer.is_cuda:
        torch.cuda.synchronize(buffer.device)
    before = time.perf_counter()
    work = dist.all_reduce(buffer, async_op=True)
    assert work is not None
    while not work.is_completed():
        if time.perf_counter() - before > timeout_s:
            raise TrainingError(
                f"a sum over ranks was not complete after {timeout_s:g} s. Check the network between the nodes; "
                "NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME selects the network interface."
            )
        time.sleep(_POLL_S)
    work.wait()
    return time.perf_counter() - before
