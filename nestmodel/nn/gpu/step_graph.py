"""Forward and backward pass of a microbatch as CUDA graphs, captured once per shape and replayed by two launches.

This module owns the fixed tensors between which the graphs work: copies of the inputs, the sums over scored tokens,
and the sums of gradients. What differs from microbatch to microbatch is copied into them: a graph reads no value from
the CPU. The number of scored rows is padded to a capacity. A microbatch that does not fit runs without a graph.

With several ranks, no microbatch calls the hooks of DDP, so that all may be graphs. The caller sums the gradients once.
"""

import gc
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from nestmodel.nn.gpu.fused_attention import round_up
from nestmodel.nn.loss import LossStats, loss_stats
from nestmodel.nn.masking import scored_token_mask
from nestmodel.nn.network import NestNetwork
from nestmodel.nn.network_input import Masks, NetworkInput

NUM_DRAWS = 16
"""Number of microbatches whose masks are drawn to choose the capacity of a shape."""

ALIGNMENT = 32
"""The sums of each parameter begin at a multiple of this number of values, so that kernels can read several at once."""

MARGIN = 5.0
"""Standard deviations of the number of scored rows between its mean and the capacity."""

Replay = Callable[[], None]
"""Repeats on the device what was captured."""

Capture = Callable[[Callable[[], None]], Replay]
"""Records the device operations of a function without running them, and returns a function that runs them. Errors are
raised; memory that they leave is freed with the graphs."""

ShapeKey = tuple[int, ...]
"""Number of cuts, and of the samples or frames to which each is padded."""


class CudaCapture:
    """Captures CUDA graphs, all of which take their memory from one pool."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, work: Callable[[], None]) -> Replay:
        """Captures a graph, on torch's stream for captures."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        gc.collect()  # nodes of earlier passes, which could wait for a stream that is not captured
        graph = torch.cuda.CUDAGraph()
        try:
            # `thread_local`: other threads of a run, which pin batches and query events, must not end a capture. The
            # outer context restores the stream, which torch does not do if the end of a capture fails.
            with (
                torch.cuda.stream(torch.cuda.current_stream()),
                torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
            ):
                work()
        except Exception:
            self._recover()
            raise
        return graph.replay

    def _recover(self) -> None:
        """Ends what torch leaves open if the end of a capture fails: allocation to the pool, and captured random draws.

        Source: `CUDAGraph::capture_end`, which then raises before it does either, in PyTorch 2.11.
        """
        pool, self._pool = self._pool, None
        device = torch.cuda.current_device()
        try:
            torch._C._cuda_endAllocateToPool(device, pool)
        except RuntimeError:
            return  # The capture has ended. To release the pool twice would end the process.
        torch._C._cuda_releasePool(device, pool)
        # The end of a valid capture lets the generator draw again.
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"),
        ):
            torch.zeros(1, device="cuda")


class StepGraphs:
    """Runs microbatches of a few shapes as graphs.

    The first microbatch of a shape runs the same operations without a capture, as the warm-up that compilers and
    libraries need; the second one is captured. Gradients are added to fixed tensors. From the first graph of an
    optimizer step to its end, these are the `.grad` of the parameters. The backward graph runs in `backward` only, so
    gradients of an earlier step are not overwritten before.

    Args:
        network: In training mode. Its batch norm collects statistics of steps.
        num_shapes: Largest number of shapes that are captured.
        capture: Captures a graph.
        num_microbatches: Number of microbatches of a rank in an optimizer step.
        num_ranks: Number of ranks.
    """

    def __init__(
        self, network: NestNetwork, num_shapes: int, capture: Capture, *, num_microbatches: int, num_ranks: int
    ) -> None:
        self._network = network
        self._num_shapes = num_shapes
        self._capture = capture
        self._factors = num_microbatches, num_ranks
        self._capacities: dict[ShapeKey, int] = {}
        self._passes: dict[ShapeKey, _Pass] = {}
        self._current: _Pass | None = None
        self._is_off = False
        # Ordinary memory, not that of the pool, and one set for all shapes: one piece, which is summed over ranks.
        parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
        sizes = [ALIGNMENT * math.ceil(parameter.numel() / ALIGNMENT) for parameter in parameters]
        self._flat = parameters[0].new_zeros(sum(sizes))
        self._sums = {
            parameter: piece[: parameter.numel()].view(parameter.shape)
            for parameter, piece in zip(parameters, self._flat.split(sizes), strict=True)
        }
        self._buffers: dict[str, Tensor] = {}

    def pad(self, masks: Masks) -> Masks:
        """Pads the scored rows of a microbatch to the capacity of its shape, unless it has more than that."""
        capacity = self._capacity(masks)
        return masks if len(masks.scored_rows) > capacity else pad_rows(masks, capacity)

    def _capacity(self, masks: Masks) -> int:
        key = tuple(masks.is_masked.shape)
        if key not in self._capacities:
            self._capacities[key] = row_capacity(self._network, *masks.is_masked.shape)
        return self._capacities[key]

    def forward(self, batch: NetworkInput) -> LossStats | None:
        """Runs the forward pass of a microbatch, whose gradients `backward` adds up.

        Returns:
            The sums over its scored tokens, which later calls do not change; None if it has to run without a graph.
        """
        self._current = None
        if self._is_off or len(batch.scored_rows) != self._capacity(batch):
            return None
        key = tuple(batch.audio.shape)
        found = self._passes.get(key)
        if found is None:
            if len(self._passes) == self._num_shapes:
                return None
            found = _Pass(self._network, self._fixed(batch), self._sums, self._factors)
        elif not found.is_captured and not self._try_capture(found):
            return None
        stats = found.forward(batch)
        self._current = self._passes[key] = found  # not before the pass has run without an error
        return stats

    @property
    def is_pending(self) -> bool:
        """Whether the gradients of the last microbatch are those that `backward` adds."""
        return self._current is not None

    def backward(self) -> None:
        """Adds the gradients of the microbatch of `forward` to those of the parameters."""
        assert self._current is not None
        current, self._current = self._current, None
        has_grad = self._take_over()
        has_grad.update(current.backward())
        for parameter, total in self._sums.items():
            parameter.grad = total if parameter in has_grad else None

    def _take_over(self) -> set[nn.Parameter]:
        """Copies gradients that other microbatches stored elsewhere; sums of parameters without one start at 0.

        Returns:
            The parameters that have a gradient.
        """
        has_grad = {p for p in self._sums if p.grad is not None}
        theirs = [(total, p.grad) for p, total in self._sums.items() if p.grad is not total]
        if copied := [(total, grad) for total, grad in theirs if grad is not None]:
            torch._foreach_copy_([total for total, _ in copied], [grad for _, grad in copied])
        if unset := [total for total, grad in theirs if grad is None]:
            torch._foreach_zero_(unset)
        return has_grad

    def share_of_gradients(self) -> Tensor:
        """Returns the gradients of all parameters over the number of ranks, to be summed over ranks in place."""
        has_grad = self._take_over()
        for parameter in has_grad:
            parameter.grad = self._sums[parameter]
        return self._flat.div_(self._factors[1])

    def _fixed(self, batch: NetworkInput) -> NetworkInput:
        """Returns an input of the same shape in memory that all shapes share, as far as it is large enough."""
        tensors = batch.tensors()
        for name, tensor in tensors.items():
            if name not in self._buffers or self._buffers[name].numel() < tensor.numel():
                self._buffers[name] = tensor.new_empty(tensor.numel())
        fixed: dict[str, Any] = {
            name: self._buffers[name][: tensor.numel()].view(tensor.shape) for name, tensor in tensors.items()
        }
        return replace(batch, **fixed)

    def _try_capture(self, one: "_Pass") -> bool:
        try:
            one.capture(self._capture)
        except Exception as error:  # a capture can fail in many ways, and the run can do without it
            self._is_off = True
            for owned in (self._passes, self._buffers):
                owned.clear()  # frees memory
            torch.clear_autocast_cache()  # of what was captured and never run
            # The end of an invalid capture raises an error of its own, while that of the cause is handled.
            reason = " ".join(str(error.__context__ or error).split()).rstrip(".")
            warnings.warn(f"Microbatches run without CUDA graphs, because a capture failed: {reason}.", stacklevel=2)
            return False
        return True


class _Pass:
    """Forward and backward pass of the microbatches of one shape, between fixed tensors."""

    def __init__(
        self,
        network: NestNetwork,
        inputs: NetworkInput,
        sums: dict[nn.Parameter, Tensor],
        factors: tuple[int, int],
    ) -> None:
        self._network = network
        self._sums = sums
        self._num_microbatches, self._num_ranks = factors
        self._inputs = inputs
        quantizer = network.config.quantizer
        num_values = 3 + 2 * quantizer.num_codebooks * quantizer.num_classes
        self._values = inputs.audio.new_empty(num_values)
        self._loss: Tensor | None = None
        self._reached: list[nn.Parameter] = []
        self._replays: tuple[Replay, Replay] = (self._run_forward, self._run_backward)
        self.is_captured = False

    def capture(self, capture: Capture) -> None:
        """Captures both passes; nothing is run."""
        self._replays = capture(self._run_forward), capture(self._run_backward)
        self.is_captured = True

    def forward(self, batch: NetworkInput) -> LossStats:
        """Copies the inputs and runs the forward pass; later ones do not change what it returns."""
        fixed = self._inputs.tensors()
        for name, tensor in batch.tensors().items():
            fixed[name].copy_(tensor)
        self._replays[0]()
        return LossStats.unflatten(self._values.clone(), self._network.config.quantizer.num_codebooks)

    def backward(self) -> list[nn.Parameter]:
        """Adds the gradients to the sums, and returns the parameters that got one."""
        self._replays[1]()
        return self._reached

    def _run_forward(self) -> None:
        # Autocast keeps the weights that it converted. A graph must convert them itself, each time it is replayed.
        torch.clear_autocast_cache()
        inputs = self._inputs
        stats = loss_stats(self._network.forward_masked(inputs), inputs.scored_rows >= 0)
        self._values.copy_(stats.flatten())
        # As NestModel multiplies and Lightning divides, in the same order.
        self._loss = stats.nll_sum * self._num_microbatches * self._num_ranks / self._num_microbatches

    def _run_backward(self) -> None:
        assert self._loss is not None
        loss, self._loss = self._loss, None
        # Not `backward`, which calls the hooks of DDP and adds to `.grad`.
        with torch.autocast(loss.device.type, enabled=False):
            grads = torch.autograd.grad(loss, list(self._sums), allow_unused=True)
        found = [(p, grad) for p, grad in zip(self._sums, grads, strict=True) if grad is not None]
        totals = [self._sums[p] for p, _ in found]
        torch._foreach_add_(totals, [_like(grad, total) for (_, grad), total in zip(found, totals, strict=True)])
        self._reached = [p for p, _ in found]


def _like(grad: Tensor, total: Tensor) -> Tensor:
    """Returns a gradient in the memory layout of its sum, without which torch adds each by a kernel of its own."""
    return grad if grad.stride() == total.stride() else torch.empty_like(total).copy_(grad)


def pad_rows(masks: Masks, capacity: int) -> Masks:
    """Returns masks with `capacity` scored rows, at least as many as there are.

    Filler rows are unscored rows, as negative indices from the end: they index like positive ones and mark the row as
    not counted. No row occurs twice, because torch adds up the gradients of equal rows one after the other.
    """
    is_scored = masks.is_scored.flatten()
    unscored = (~is_scored).nonzero().squeeze(1)[: capacity - len(masks.scored_rows)]
    return replace(masks, scored_rows=torch.cat([masks.scored_rows, unscored - len(is_scored)]))


def row_capacity(network: NestNetwork, num_cuts: int, num_frames: int) -> int:
    """Returns to how many scored rows the microbatches of a shape are padded, a function of the settings and the shape.

    The masks of some microbatches without padding are drawn. Masks of padded ones have fewer scored rows.

    Args:
        network: Draws the masks.
        num_cuts: Number of cuts.
        num_frames: Number of frames that can be masked, for each cut.
    """
    generator = torch.Generator().manual_seed(0)
    lens = torch.full((num_cuts,), num_frames)
    numbers = torch.empty(NUM_DRAWS)
    for i in range(NUM_DRAWS):
        is_masked = network.mask_processor.draw(lens, num_frames, generator)
        numbers[i] = scored_token_mask(is_masked, network.num_stacked, network.config.masking.threshold).sum()
    wanted = int(numbers.mean() + MARGIN * numbers.std()) + 1
    num_rows = num_cuts * num_frames // network.num_stacked
    return min(num_rows, round_up(wanted))
