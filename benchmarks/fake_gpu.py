"""Runs a network on tensors of a GPU that does not exist, and records its operations and the memory that they hold.

Torch's fake tensors have shapes, types and a device, but no values, so the same code runs as on a GPU and nothing is
computed. What depends on the GPU itself, such as the kernel behind an operation and its time, is unknown.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

WITHOUT_KERNEL = {"_unsafe_view", "detach", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
"""Operations that launch nothing, besides those whose result is a view by their schema."""

ALIGNMENT = 8
"""Values of 16 bits to which torch's memory-efficient attention wants heads and masks aligned."""


@dataclass(frozen=True)
class Operation:
    """An operation that launches a kernel."""

    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]

    @property
    def input_types(self) -> set[torch.dtype]:
        """Types of the floating-point inputs."""
        return {tensor.dtype for tensor in self.inputs if tensor.is_floating_point()}


class OperationLog(TorchDispatchMode):
    """Records the operations that launch a kernel, and the peak of the memory that their results hold.

    Attributes:
        operations: The operations in their order; empty unless `keep` is set, because tensors are kept alive by it.
        counts: How often each operation ran, by name.
        kept_bytes: Bytes of results that were alive when the recording ended: after a forward pass, what is kept for
            the backward pass.
        peak_bytes: Maximum of the bytes of results that were alive at a time.
    """

    def __init__(self, *, keep: bool = False) -> None:
        super().__init__()
        self._keep = keep
        self.operations: list[Operation] = []
        self.counts: dict[str, int] = {}
        self.kept_bytes = 0
        self.peak_bytes = 0
        self._live: dict[int, int] = {}
        self._live_bytes = 0

    @property
    def num_operations(self) -> int:
        """Number of operations that launch a kernel."""
        return sum(self.counts.values())

    def __exit__(self, *error: Any) -> None:
        """Ends the recording."""
        super().__exit__(*error)
        self.kept_bytes = self._live_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation and records it."""
        inputs = tuple(each for each in _flat(args) if isinstance(each, Tensor))
        for tensor in inputs:
            self._track(tensor, is_result=False)
        result = func(*args, **(kwargs or {}))
        outputs = tuple(each for each in _flat(result) if isinstance(each, Tensor))
        for tensor in outputs:
            self._track(tensor, is_result=True)
        namespace, name = func.name().split(".")[0].split("::")
        if not func.is_view and name not in WITHOUT_KERNEL and namespace != "prim":
            self.counts[name] = self.counts.get(name, 0) + 1
            if self._keep:
                self.operations.append(Operation(name, inputs, outputs))
        return result

    def _track(self, tensor: Tensor, *, is_result: bool) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)  # torch keeps the object as long as the memory
        if key not in self._live:
            self._live[key] = storage.nbytes() if is_result else 0
            self._live_bytes += self._live[key]
            self.peak_bytes = max(self.peak_bytes, self._live_bytes)
            weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self._live_bytes -= self._live.pop(key)


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


def _flat(values: Any) -> Iterator[Any]:
    for value in values if isinstance(values, (list, tuple)) else [values]:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value
