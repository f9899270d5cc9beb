"""Runs code on tensors of a GPU that does not exist, and records its operations.

Torch's fake tensors have shapes, types and a device, but no values, so the same code runs as on a GPU and nothing is
computed. What depends on the GPU itself, such as the kernel behind an operation and its time, is unknown.
"""

import itertools
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from packaging.version import Version
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

needs_fake_gpu = pytest.mark.skipif(
    Version(torch.__version__).release < (2, 11), reason="fake CUDA tensors need a driver in old releases of PyTorch"
)
"""PyTorch 2.7 asks the driver when such a tensor is made; 2.11 and 2.14 do not. Releases between were not tried."""

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
"""Operations that launch nothing, besides those whose result is a view by their schema."""

ALIGNMENT = 8
"""Values of 16 bits to which torch's memory-efficient attention wants heads and masks aligned."""


@dataclass(frozen=True)
class Operation:
    """An operation that launches a kernel."""

    name: str
    input_sizes: tuple[torch.Size, ...]
    output_sizes: tuple[torch.Size, ...]
    input_types: frozenset[torch.dtype]
    """Types of the floating-point inputs."""


class OperationLog(TorchDispatchMode):
    """Records the operations that launch a kernel, and the memory that their results hold.

    Attributes:
        operations: The operations in their order.
        kept_bytes: Bytes of results that were alive when the recording ended: after a forward pass, what is kept for
            the backward pass.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch
        self.operations: list[Operation] = []
        self.kept_bytes = 0
        self._live: dict[int, int] = {}

    @property
    def counts(self) -> dict[str, int]:
        """How often each operation ran, by name."""
        return Counter(operation.name for operation in self.operations)

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
            sizes = (tuple(each.shape for each in tensors) for tensors in (inputs, outputs))
            types_of_inputs = frozenset(each.dtype for each in inputs if each.dtype.is_floating_point)
            self.operations.append(Operation(name, *sizes, types_of_inputs))
        return result

    def _track(self, tensor: Tensor, *, is_result: bool) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)  # torch keeps the object as long as the memory
        if key not in self._live:
            self._live[key] = storage.nbytes() if is_result else 0
            weakref.finalize(storage, self._live.pop, key)


@contextmanager
def fake_gpu(autocast: torch.dtype | None = None) -> Iterator[None]:
    """Creates tensors on a GPU that does not exist, under autocast if a type is given."""
    with (
        FakeTensorMode(),
        torch.device("cuda"),
        patch.object(F, "scaled_dot_product_attention", _memory_efficient_attention),
        patch.object(torch.cuda, "is_bf16_supported", lambda: True),
        patch.object(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
        torch.autocast("cuda", autocast, enabled=autocast is not None),
    ):
        yield


_PASSES = itertools.count()


def backward(loss: Tensor) -> None:
    """Adds the gradients of a scalar to those of its parameters.

    Torch's engine asks the driver for streams, which a machine without a GPU cannot answer. This one calls the nodes of
    the graph in the same order: of those whose gradients are complete, the one that was created last.
    """
    received: dict[Any, dict[int, Tensor]] = {loss.grad_fn: {loss.output_nr: torch.ones_like(loss)}}
    uses = _count_uses(loss.grad_fn)
    ready = [loss.grad_fn]
    number_of_pass = next(_PASSES)
    with (
        torch.autocast("cuda", enabled=False),
        torch.no_grad(),
        # Checkpointed parts are recomputed once in a backward pass, whose number they ask torch's engine for.
        patch.object(torch._C, "_current_graph_task_id", lambda: number_of_pass),
    ):
        while ready:
            node: Any = max(ready, key=lambda each: each._sequence_nr())
            ready.remove(node)
            grads = received.pop(node)
            if node.name() == "torch::autograd::AccumulateGrad":
                for grad in grads.values():
                    node.variable.grad = grad if node.variable.grad is None else node.variable.grad.add_(grad)
                continue
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


def _count_uses(root: Any) -> Counter[Any]:
    """Returns how many gradients each node receives from the others."""
    uses: Counter[Any] = Counter()
    rest = [root]
    while rest:
        for following, _ in rest.pop().next_functions:
            if following is not None:
                if following not in uses:
                    rest.append(following)
                uses[following] += 1
    return uses


def _memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Calls the kernel that torch selects on a GPU for a mask with gradients, as torch prepares its arguments.

    Torch asks the GPU for the selection, so without one it would take the fallback of several operations, which a GPU
    takes for heads that are not aligned.
    """
    assert attn_mask is not None
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        query, key, value, attn_mask = (tensor.to(dtype) for tensor in (query, key, value, attn_mask))
    if query.shape[-1] % ALIGNMENT and query.element_size() == 2:
        return _FALLBACK(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)
    if any(stride % ALIGNMENT for stride in attn_mask.stride()[:-1]) or attn_mask.stride(-1) != 1:
        num_keys = attn_mask.shape[-1]
        attn_mask = F.pad(attn_mask, (0, ALIGNMENT - num_keys % ALIGNMENT))[..., :num_keys]
    attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    mixed: Tensor = kernel(query, key, value, attn_mask, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale)[0]
    return mixed


_FALLBACK = F.scaled_dot_product_attention
