"""What the stall guard observes on a GPU: events in the work of the device, and the collectives of the process group.

Both are asked for by a thread while the main thread waits for the GPU, so that nothing here may wait for it.
"""

from collections.abc import Callable

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.autograd import Variable


class CudaEvent:
    """A point in the work of the current CUDA stream, as `nestguard` expects it.

    The GPU that is current at its creation becomes the current one of every thread that asks for it: otherwise that of
    a new thread is the first GPU, on which the driver could reserve memory for this process.
    """

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=False)
        self._device = torch.cuda.current_device()

    def record(self) -> None:
        """Marks the end of the work that was launched on the current stream."""
        self._event.record()

    def is_done(self) -> bool:
        """Returns whether the work before the mark is done; does not wait for it."""
        torch.cuda.set_device(self._device)
        return bool(self._event.query())


def new_event_of(trainer: pl.Trainer) -> Callable[[], CudaEvent] | None:
    """Returns what creates events on the device of this rank; None if that is not a GPU."""
    return CudaEvent if trainer.strategy.root_device.type == "cuda" else None


def mark_end_of_backward(loss: Tensor, mark: Callable[[], None]) -> None:
    """Calls `mark` when the gradients of this rank are launched, before the device waits for those of other ranks.

    DDP lets the device wait at the end of the backward pass, in a callback of the autograd engine. Callbacks run in
    the order in which they are queued, and this one is queued when the backward pass begins.

    Args:
        loss: The tensor on which `backward` will be called.
        mark: Called in a thread of the autograd engine, with the stream of the calling thread.
    """

    def queue(_: Tensor) -> None:
        # DDP and FSDP use this to run code at the end of a backward pass. torch has no public way.
        Variable._execution_engine.queue_callback(mark)

    if loss.requires_grad:
        loss.register_hook(queue)


def read_collectives() -> str:
    """Returns the trace of torch's flight recorder as JSON, with all collectives that are not completed.

    The text is empty without a process group, and for gloo before PyTorch 2.8. The recorder is on by default; the
    environment variable TORCH_NCCL_TRACE_BUFFER_SIZE=0 turns it off, and the trace then contains no collectives.
    """
    backend = torch.distributed.get_backend() if torch.distributed.is_initialized() else ""
    name = "_dump_nccl_trace_json" if "nccl" in backend else "_dump_fr_trace_json"
    dump = getattr(torch._C._distributed_c10d, name, None)
    if not backend or dump is None:
        return ""
    trace: bytes | str = dump(includeCollectives=True, onlyActive=True)
    return trace.decode() if isinstance(trace, bytes) else trace
