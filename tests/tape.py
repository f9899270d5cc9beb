"""A stand-in on a CPU for the capture of CUDA graphs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select")
"""Operations by which a program learns a value of a tensor, which a capture does not allow."""

READS_IF_DETERMINISTIC = ("scatter_add_", "scatter_add", "index_add_", "index_add")
"""Operations that in deterministic mode read the largest index on a GPU."""


class Tape(TorchDispatchMode):
    """Records operations with the tensors that they read and write, and repeats them on the same tensors.

    As in a CUDA graph, all that is not in a tensor is fixed when it is recorded. Torch runs what it records, so what
    the operations change of other tensors and of the generator is undone when the recording ends.
    """

    def __init__(self) -> None:
        super().__init__()
        self._entries: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self._own: dict[int, Any] = {}
        self._before: dict[int, tuple[Any, Any]] = {}

    def __enter__(self) -> "Tape":
        self._generator = torch.get_rng_state()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.set_rng_state(self._generator)
        for storage, before in self._before.values():
            storage.copy_(before)
        for tensor in self._own.values():  # a graph that has not run yet has left nothing in its memory
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in READS or (name in READS_IF_DETERMINISTIC and torch.are_deterministic_algorithms_enabled()):
            raise RuntimeError(f"{name} reads a value while operations are recorded")
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._keep(value)
        # Aliases, because operations such as `transpose_` change the shape of a tensor that others have read.
        given = tree_map_only(Tensor, Tensor.detach, (args, kwargs))
        result = func(*args, **kwargs)
        if not func.is_view and torch.Tag.inplace_view not in func.tags:
            made = [each.detach() for each in tree_leaves(result) if isinstance(each, Tensor)]
            read = {id(each.untyped_storage()) for each in tree_leaves(given) if isinstance(each, Tensor)}
            self._own |= {id(each.untyped_storage()): each for each in made if id(each.untyped_storage()) not in read}
            self._entries.append((func, *given, made))
        return result

    def _keep(self, value: Any) -> None:
        for tensor in tree_leaves(value):
            storage = tensor.untyped_storage()
            if id(storage) not in self._own and id(storage) not in self._before:
                self._before[id(storage)] = storage, storage.clone()

    @torch.no_grad()
    @torch.autocast("cpu", enabled=False)  # it has converted already what was recorded
    def replay(self) -> None:
        for func, args, kwargs, made in self._entries:
            again = [each for each in tree_leaves(func(*args, **kwargs)) if isinstance(each, Tensor)]
            for tensor, value in zip(made, again, strict=True):
                tensor.copy_(value)


class TapeCapture:
    """Captures a `Tape` in place of a CUDA graph.

    Args:
        fail_at: Number of the capture that fails, from 0, after half of its work; None lets all succeed.
    """

    def __init__(self, fail_at: int | None = None, error: Exception | None = None) -> None:
        self.num_captures = self.num_replays = 0
        self._fail_at, self._error = fail_at, error

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        number, self.num_captures = self.num_captures, self.num_captures + 1
        with Tape() as tape:
            work()
            if number == self._fail_at:
                raise self._error or RuntimeError("planted")

        def replay() -> None:
            self.num_replays += 1
            tape.replay()

        return replay
