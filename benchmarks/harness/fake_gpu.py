"""Runs code on tensors of a GPU that does not exist, and records its operations.

Torch's fake tensors have shapes, types and a device, but no values, so the same code runs as on a GPU and nothing is
computed. What depends on the GPU itself, such as the kernel behind an operation and its time, is unknown.

PyTorch 2.7 asks the driver when such a tensor is made; 2.11 and 2.14 do not. Releases between were not tried.
"""

import bisect
import itertools
import math
import weakref
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._C._autograd import _get_sequence_nr
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, shape_wrapper

WITHOUT_KERNEL = {
    "_unsafe_view",
    "detach",
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "transpose_",
}
"""Operations that launch nothing, besides operations whose schema says that the result is a view."""

READ_TWICE = {"native_layer_norm_backward": (0, 1)}
"""Arguments that an operation reads by two kernels: for the gradients of scale and shift, and for the values."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """An operation that launches a kernel."""

    name: str
    input_sizes: tuple[torch.Size, ...] = ()
    output_sizes: tuple[torch.Size, ...] = ()
    input_types: frozenset[torch.dtype] = frozenset()
    """Types of the floating-point inputs."""

    part: str = "other"
    """Part of the network to which it belongs; see `OperationLog.track`."""

    is_backward: bool = False
    num_bytes: int = 0
    """Bytes that it reads and writes, each operand once."""

    flops: int = 0
    """Floating-point operations of matrix products, convolutions and attention; 0 for others."""

    warp_instructions: float = 0.0
    """Machine instructions that all warps issue; 0 if they are unknown."""


class OperationLog(TorchDispatchMode):
    """Records the operations that launch a kernel, and the memory that their results hold.

    Attributes:
        operations: The operations in their order.
        kept_bytes: Bytes of results that were alive when the recording ended; after a forward pass, these are kept for
            the backward pass.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch
        self.operations: list[Operation] = []
        self.kept_bytes = 0
        self._live: dict[int, int] = {}
        self._parts = ["other"]
        self._starts = [0]
        self._part_from = ["other"]
        self._owners: dict[int, str] = {}

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Returns True, so that torch runs compiled code instead of the function that was compiled."""
        return True

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Operations of the `with` block, and of its backward pass, belong to a part."""
        self._parts.append(name)
        self._mark()
        try:
            yield
        finally:
            self._parts.pop()
            self._mark()

    def track(self, module: nn.Module, part: str, method: str = "forward") -> None:
        """Operations of a module's method, and additions to the gradients of its parameters, belong to a part."""
        original = getattr(module, method)

        def tracked(*args: Any, **kwargs: Any) -> Any:
            with self.part(part):
                return original(*args, **kwargs)

        setattr(module, method, tracked)
        self._owners |= {id(parameter): part for parameter in module.parameters()}

    def current(self) -> dict[str, Any]:
        """Returns the part of an operation that runs now, and whether it is of the backward pass."""
        node = _Backward.node
        if node is None:
            return {"part": self._parts[-1], "is_backward": False}
        if _is_leaf(node):
            return {"part": self._owners.get(id(node.variable), "other"), "is_backward": True}
        part = self._part_from[bisect.bisect_right(self._starts, node._sequence_nr()) - 1]
        return {"part": part, "is_backward": True}

    def _mark(self) -> None:
        self._starts.append(_get_sequence_nr())
        self._part_from.append(self._parts[-1])

    def __exit__(self, *error: Any) -> None:
        """Ends the recording."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch
        self.kept_bytes = sum(self._live.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation and records it."""
        kwargs = kwargs or {}
        inputs = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        for tensor in inputs:
            self._track(tensor, is_result=False)
        result = func(*args, **kwargs)
        outputs = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        for tensor in outputs:
            self._track(tensor, is_result=True)
        namespace, name = func.name().split(".")[0].split("::")
        if not func.is_view and name not in WITHOUT_KERNEL and namespace != "prim":
            formula = _WRAPPED.get(func.overloadpacket) or flop_registry.get(func.overloadpacket)
            self.operations.append(
                Operation(
                    name=name,
                    input_sizes=tuple(each.shape for each in inputs),
                    output_sizes=tuple(each.shape for each in outputs),
                    input_types=frozenset(each.dtype for each in inputs if each.dtype.is_floating_point),
                    num_bytes=_traffic(func, name, args, kwargs, inputs, outputs),
                    flops=int(formula(*args, **kwargs, out_val=result)) if formula else 0,
                    **self.current(),
                )
            )
        return result

    def _track(self, tensor: Tensor, *, is_result: bool) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)  # torch keeps the object as long as the memory
        if key not in self._live:
            self._live[key] = storage.nbytes() if is_result else 0
            weakref.finalize(storage, self._live.pop, key)


def bytes_of(tensors: Any) -> int:
    """Returns the bytes of tensors, nested or not; dimensions that repeat the same memory count once."""
    return sum(
        math.prod(size for size, stride in zip(each.shape, each.stride(), strict=True) if stride) * each.itemsize
        for each in tree_leaves(tensors)
        if isinstance(each, Tensor)
    )


def _traffic(func: Any, name: str, args: Any, kwargs: Any, inputs: list[Tensor], outputs: list[Tensor]) -> int:
    """Returns the bytes that an operation reads and writes, each operand once, without copies inside of the call."""
    if name == "convolution_backward":
        grad, x, weight = (bytes_of(each) for each in args[:3])
        of_input, of_weight, of_bias = args[-1]
        gradients: int = of_input * (grad + weight) + of_weight * (grad + x) + of_bias * grad
        return gradients + bytes_of(outputs)
    written = bytes_of(outputs)
    read = 0 if name.endswith("_like") else sum(map(bytes_of, inputs))
    read += sum(bytes_of(args[i]) for i in READ_TWICE.get(name, ()))
    for argument, value in zip(func._schema.arguments, args, strict=False):
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written and not outputs:  # an operation on lists returns nothing
            written += bytes_of(value)
        if is_written and name.rstrip("_") in ("copy", "_foreach_copy", "fill", "normal", "zero", "_foreach_zero"):
            read -= bytes_of(value)
    if kwargs.get("out") is not None:
        read -= bytes_of(kwargs["out"])
    return read + written


def _backward_of_convolution(grad_out: Any, _x: Any, weight: Any, *rest: Any, **_: Any) -> int:
    """Returns the operations of the gradients of a convolution, each as many as the forward pass has.

    Torch's own formula counts grouped convolutions as if they had one group.
    """
    output_mask: list[bool] = rest[-1]
    forward: int = 2 * math.prod(grad_out) * math.prod(weight[1:])
    return forward * sum(output_mask[:2])


FORMULAS = {torch.ops.aten.convolution_backward: _backward_of_convolution}
"""Formulas of torch's flop counter that are replaced; they take shapes instead of tensors."""

_WRAPPED = {operation: shape_wrapper(formula) for operation, formula in FORMULAS.items()}


@contextmanager
def fake_gpu(autocast: torch.dtype | None = None) -> Iterator[None]:
    """Lets tensors be made on a GPU that does not exist, under autocast if a type is given.

    To make them there by default, enter `torch.device("cuda")` as well; torch's compiler does not trace through it.
    """
    with (
        FakeTensorMode(),
        patch.object(torch.cuda, "is_bf16_supported", lambda: True),
        patch.object(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
        torch.autocast("cuda", autocast, enabled=autocast is not None),
    ):
        yield


_PASSES = itertools.count()


class _Backward:
    """The node whose gradients are being computed."""

    node: Any = None


def backward(loss: Tensor) -> None:
    """Computes the gradients of a scalar and adds them to its parameters' gradients, as torch's engine does."""
    received = {loss.grad_fn: {loss.output_nr: torch.ones_like(loss)}}
    with torch.autocast("cuda", enabled=False), torch.no_grad():
        for node, grads in _gradients_at_ends(received):
            for grad in grads.values():
                node.variable.grad = grad if node.variable.grad is None else node.variable.grad.add_(grad)


def gradients(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], grad_outputs: Sequence[Tensor], **_: Any
) -> tuple[Tensor | None, ...]:
    """Returns gradients as `torch.autograd.grad` does with `allow_unused`."""
    received: dict[Any, dict[int, Tensor]] = {}
    for output, grad in zip(outputs, grad_outputs, strict=True):
        received.setdefault(output.grad_fn, {})[output.output_nr] = grad
    found = dict(_gradients_at_ends(received, {each.grad_fn for each in inputs if each.grad_fn is not None}))
    leaves = {id(node.variable): grads[0] for node, grads in found.items() if _is_leaf(node) and grads}
    return tuple(
        leaves.get(id(each)) if each.grad_fn is None else found.get(each.grad_fn, {}).get(each.output_nr)
        for each in inputs
    )


def _gradients_at_ends(
    received: dict[Any, dict[int, Tensor]], ends: Container[Any] = ()
) -> Iterator[tuple[Any, dict[int, Tensor]]]:
    """Yields each leaf, and each other node at which the pass ends, with the gradients that it receives.

    Torch's engine asks the driver for streams, which fails on a machine without a GPU. This one calls the nodes of the
    graph in the same order: among the nodes with complete gradients, the one that was created last.

    Args:
        received: Gradients of the outputs of the first nodes, by the numbers of the outputs.
        ends: Nodes at which the pass ends, besides leaves.
    """
    uses = _count_uses(list(received))
    ready = [node for node in received if node not in uses]
    number_of_pass = next(_PASSES)
    # Checkpointed parts are recomputed once in a backward pass; they ask torch's engine for its number.
    with patch.object(torch._C, "_current_graph_task_id", lambda: number_of_pass):
        while ready:
            node: Any = max(ready, key=lambda each: each._sequence_nr())
            ready.remove(node)
            grads, before = received.pop(node), _Backward.node
            _Backward.node = node
            try:
                if _is_leaf(node) or node in ends:
                    yield node, grads
                else:
                    _pass_on(node, grads, received, uses, ready)
            finally:
                _Backward.node = before


def _pass_on(
    node: Any, grads: dict[int, Tensor], received: dict[Any, dict[int, Tensor]], uses: Counter[Any], ready: list[Any]
) -> None:
    """Calls a node, and adds the gradients of its inputs to the gradients that earlier nodes have received."""
    for (following, number), grad in zip(node.next_functions, _call(node, grads), strict=True):
        if following is None:
            continue
        waiting = received.setdefault(following, {})
        if grad is not None:
            grad = _as_expected(grad, following._input_metadata[number])
            waiting[number] = waiting[number] + grad if number in waiting else grad
        uses[following] -= 1
        if not uses[following]:
            ready.append(following)


def _call(node: Any, received: dict[int, Tensor]) -> tuple[Tensor | None, ...]:
    """Returns the gradients of a node's inputs."""
    if not received:
        return (None,) * len(node.next_functions)
    given = [received.get(i) for i in range(len(node._input_metadata))]
    if not isinstance(node, torch.autograd.function.BackwardCFunction):
        grads = node(*given)
        return grads if isinstance(grads, tuple) else (grads,)
    grads = node.apply(*given)
    # A gradient for each argument, tensor or not; tensors are followed by nodes if they need gradients.
    all_grads = zip(grads if isinstance(grads, tuple) else (grads,), node.needs_input_grad, strict=True)
    needed = (grad for grad, is_needed in all_grads if is_needed)
    return tuple(next(needed) if following is not None else None for following, _ in node.next_functions)


def _as_expected(grad: Tensor, expected: Any) -> Tensor:
    """Sums a gradient over dimensions that were repeated, and converts its type, as torch's engine does."""
    if grad.shape != expected.shape:
        grad = grad.sum_to_size(expected.shape)
    return grad.to(expected.dtype)


def _is_leaf(node: Any) -> bool:
    return bool(node.name() == "torch::autograd::AccumulateGrad")


def _count_uses(roots: list[Any]) -> Counter[Any]:
    """Returns how many gradients each node receives from the others."""
    uses: Counter[Any] = Counter()
    rest = [*roots]
    while rest:
        for following, _ in rest.pop().next_functions:
            if following is not None:
                if following not in uses and following not in roots:
                    rest.append(following)
                uses[following] += 1
    return uses
