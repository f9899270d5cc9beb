"""Dropout on a GPU. The backward pass computes the decisions again instead of reading a mask."""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from nestmodel.nn.dropout import LEVELS, Dropout, Key, drop, keep_scale
from nestmodel.nn.gpu import devices


class AcceleratedDropout(Dropout):
    """`Dropout` that calls `drop_on_gpu` if its input is on a GPU."""

    def forward(self, x: Float[Tensor, "*shape"], key: Key | None = None) -> Float[Tensor, "*shape"]:
        """Drops values in training mode; see `Dropout.forward` and `drop_on_gpu`."""
        return drop_on_gpu(self, x, key) if devices.is_on_gpu(x) else super().forward(x, key)


def drop_on_gpu(module: Dropout, x: Float[Tensor, "*shape"], key: Key | None) -> Float[Tensor, "*shape"]:
    """Drops values as `module` does, with one kernel; without a key, the generator of the GPU draws."""
    is_off = not module.training or module.num_dropped == 0
    if is_off or (key is not None and torch.compiler.is_compiling()):
        return Dropout.forward(module, x, key)
    if key is None:
        return F.dropout(x, module.prob)
    out: Tensor = _drop_op(x, key, module.num_dropped)
    return out


@torch.library.custom_op("nestmodel::drop", mutates_args=())
def _drop_op(x: Tensor, key: Tensor, num_dropped: int) -> Tensor:
    if not _has_kernel(x.device):
        return drop(x, key, num_dropped)
    from nestmodel.nn.gpu.dropout_kernel import launch_drop

    return launch_drop(x, key, num_dropped, keep_scale(num_dropped))


@cache
def _has_kernel(device: torch.device) -> bool:
    """Returns whether the kernel compiles on a device and computes the definition there; warns if it does not."""
    return devices.has_kernel(lambda: _check_kernel(device), "Dropout runs as fifteen kernels instead of one")


def _check_kernel(device: torch.device) -> bool:
    from nestmodel.nn.gpu.dropout_kernel import launch_drop

    x = torch.ones(5001, device="cpu")
    key = torch.tensor([123456789, -987654321], dtype=torch.int32, device="cpu")
    found = launch_drop(x.to(device), key.to(device), LEVELS // 10, 1.0)
    return torch.equal(found.cpu() > 0, drop(x, key, LEVELS // 10) > 0)


def _keep_key(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:  # noqa: ARG001 - torch's names
    _, key, ctx.num_dropped = inputs
    ctx.save_for_backward(key)


def _drop_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return _drop_op(grad, *ctx.saved_tensors, ctx.num_dropped), None, None


_drop_op.register_kernel("cpu", drop)
_drop_op.register_fake(lambda x, *_: torch.empty_like(x, memory_format=torch.contiguous_format))
_drop_op.register_autograd(_drop_gradient, setup_context=_keep_key)
