"""Dropout as one kernel of a GPU. The backward pass computes the decisions again instead of reading a mask."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from nestmodel.nn.dropout import Dropout, Key, keep_scale


def drop_on_gpu(module: Dropout, x: Float[Tensor, "*shape"], key: Key | None) -> Float[Tensor, "*shape"]:
    """Drops values as `module` does, with one kernel; compiled code fuses it with the operations around it."""
    if key is None or not module.training or module.num_dropped == 0 or torch.compiler.is_compiling():
        dropped: Tensor = module(x, key)
        return dropped
    out: Tensor = _drop(x, key, module.num_dropped)
    return out


@torch.library.custom_op("nestmodel::drop", mutates_args=())
def _drop(x: Tensor, key: Tensor, num_dropped: int) -> Tensor:
    from nestmodel.nn.gpu.dropout_kernel import launch_drop

    return launch_drop(x, key, num_dropped, keep_scale(num_dropped))


def _keep_key(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:  # noqa: ARG001 - torch's names
    _, key, ctx.num_dropped = inputs
    ctx.save_for_backward(key)


def _drop_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return _drop(grad, *ctx.saved_tensors, ctx.num_dropped), None, None


_drop.register_fake(lambda x, *_: torch.empty_like(x, memory_format=torch.contiguous_format))
_drop.register_autograd(_drop_gradient, setup_context=_keep_key)
