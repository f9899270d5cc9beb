"""Counts how often the CPU waits for the GPU in training steps, without a GPU.

Lightning trains a small model with the callbacks and the logger of a run on a fake GPU: tensors on the CPU are real,
and those on the GPU are torch's fake tensors, which have a shape but no values. Every operation for which the CPU would
wait for the GPU is counted, with the function that called it.
"""

import math
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.strategies import SingleDeviceStrategy
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.harness.fake_gpu import backward
from nestdata import AudioNoiseBatch
from nestmodel import NestConfig, NestModel, Progress, Throughput
from nestmodel.preflight.trial import noise_batch
from nestmodel.training.callbacks.progress import PlainLines
from nestmodel.training.copy_ahead import Loader, copied_ahead
from tests.training import tiny_config, trainer

GPU = torch.device("cuda:0")


@dataclass(frozen=True)
class Wait:
    """An operation for which the CPU waits until the GPU has finished everything before it."""

    operation: str
    caller: str
    """File and function: the innermost of this project, or else of Lightning."""


class FakeGpu(TorchDispatchMode):
    """Runs operations on real tensors of the CPU and on fake tensors of a GPU, and counts the waits of the CPU.

    A number that is read from the GPU is 0. Enter it by `fake_gpu`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch
        self.waits: list[Wait] = []
        self._pinned: list[torch.UntypedStorage] = []

    def is_pinned(self, tensor: Tensor) -> bool:
        """Returns whether a tensor is in memory that `pin_memory` has returned."""
        return any(tensor.untyped_storage().data_ptr() == storage.data_ptr() for storage in self._pinned)

    def wait(self, operation: str) -> None:
        """Counts a wait."""
        self.waits.append(Wait(operation, _caller()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = str(func), kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        fake = [tensor for tensor in tensors if isinstance(tensor, FakeTensor)]
        real = [tensor for tensor in tensors if not isinstance(tensor, FakeTensor)]
        target = kwargs.get("device")
        to_gpu = target is not None and torch.device(target).type == "cuda"
        if not fake and not to_gpu:
            return self._on_cpu(name, func, args, kwargs)
        if name.startswith(("aten._to_copy", "aten.copy_")) and (real or (target is not None and not to_gpu)):
            is_download = isinstance(tensors[-1], FakeTensor)
            is_async = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
            if is_download:
                return self._download(name, tensors, kwargs)
            self._upload(tensors[-1], is_async=bool(is_async))
        elif any(tensor.dim() for tensor in real):
            self.wait(f"{name} of tensors on both devices")
        return self._on_gpu(name, func, args, kwargs)

    def _on_cpu(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        if name.startswith("aten.is_pinned"):
            return self.is_pinned(args[0])
        with unset_fake_temporarily():
            if not name.startswith("aten._pin_memory"):
                return func(*args, **kwargs)
            copy = args[0].clone()
            self._pinned.append(copy.untyped_storage())
            return copy

    def _on_gpu(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        if name.startswith("aten._local_scalar_dense"):
            self.wait("read of a number")
            return 0.0 if args[0].dtype.is_floating_point else 0
        try:
            return func(*args, **kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException):
            if not name.startswith("aten.nonzero"):
                raise
            self.wait("nonzero")
            return torch.empty((args[0].numel() // 4, args[0].dim()), dtype=torch.int64, device=GPU)

    def _download(self, name: str, tensors: list[Tensor], kwargs: Any) -> Tensor:
        self.wait("copy to the CPU")
        if name.startswith("aten.copy_"):
            return tensors[0]
        with unset_fake_temporarily():
            return torch.zeros(tensors[0].shape, dtype=kwargs.get("dtype") or tensors[0].dtype)

    def _upload(self, tensor: Tensor, *, is_async: bool) -> None:
        if not is_async:
            self.wait("blocking copy to the GPU")
        elif not self.is_pinned(tensor):
            self.wait("copy to the GPU from pageable memory")


class _FakeGenerator(torch.Generator):
    """Stands for a generator of the GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # read-only in C++, a variable in the stub
        return GPU


def _generator(device: torch.device | str = "cpu") -> torch.Generator:
    return _FakeGenerator() if torch.device(device).type == "cuda" else _real_generator(device)


_real_generator = torch.Generator


@contextmanager
def fake_gpu() -> Iterator[FakeGpu]:
    """Makes tensors of the device `cuda:0` fake until the `with` block ends."""
    mode = FakeGpu()

    def read_list(tensor: Tensor) -> Any:
        mode.wait("read of numbers")
        with unset_fake_temporarily():
            return torch.zeros(tuple(tensor.shape), dtype=tensor.dtype).tolist()

    with ExitStack() as stack:
        for owner, name, value in (
            (torch, "Generator", _generator),
            # Events have happened, and streams have done all of their work.
            (torch.cuda, "Event", mock.MagicMock()),
            (torch.cuda, "Stream", mock.MagicMock()),
            (torch.cuda, "stream", nullcontext),
            (torch.cuda, "current_stream", mock.MagicMock()),
            (torch.cuda, "get_device_name", lambda *_: "a GPU that does not exist"),
            (torch.cuda, "manual_seed", lambda *_: None),
            (torch.cuda, "synchronize", lambda *_: mode.wait("synchronize")),
            (FakeTensor, "tolist", read_list),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield stack.enter_context(mode)


def _caller() -> str:
    frames = [frame for frame in reversed(traceback.extract_stack()) if frame.filename != __file__]
    for part in ("nestmodel", "nestdata", "pytorch_lightning"):
        for frame in frames:
            if part in Path(frame.filename).parts:
                return f"{Path(frame.filename).name}:{frame.name}"
    return f"{Path(frames[0].filename).name}:{frames[0].name}"


class FakeGpuStrategy(SingleDeviceStrategy):
    """Trains on the fake GPU."""

    def __init__(self) -> None:
        super().__init__(device=GPU)

    def setup_environment(self) -> None:
        """Does not ask the accelerator, which is a CPU's."""

    def backward(self, closure_loss: Tensor, optimizer: Any, *_: Any, **__: Any) -> Tensor:  # noqa: ARG002
        """Computes gradients without torch's engine, which needs a driver."""
        backward(closure_loss)
        return closure_loss

    def teardown(self) -> None:
        """Leaves the model on the fake GPU."""


class CountedLoader:
    """A loader that notes the number of waits before each request."""

    def __init__(self, loader: Loader, gpu: FakeGpu) -> None:
        self.loader = loader
        self.gpu = gpu
        self.num_waits: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        for _ in range(len(self)):
            self.num_waits.append(len(self.gpu.waits))
            yield next(batches)

    def __len__(self) -> int:
        return len(self.loader)


class FixedData(pl.LightningDataModule):
    """Trains on the same batch again and again, copied as by `NestDataModule`."""

    def __init__(self, batch: AudioNoiseBatch, number: int, gpu: FakeGpu) -> None:
        super().__init__()
        self.batches = [batch] * number
        self.gpu = gpu

    def train_dataloader(self) -> Any:
        """Returns the batches, which are counted."""
        assert self.trainer is not None
        self.counted_loader = CountedLoader(copied_ahead(self.batches, self.trainer), self.gpu)
        return self.counted_loader

    def val_dataloader(self) -> Any:
        """Returns no batches."""
        return []


def count_waits(
    *, num_steps: int = 1, seconds_between_lines: float = math.inf, config: NestConfig | None = None, **settings: Any
) -> list[list[Wait]]:
    """Trains on a fake GPU and returns the waits of every microbatch, with all that follows it until the next.

    Args:
        num_steps: Number of optimizer steps, of two microbatches.
        seconds_between_lines: Time after which a line of progress is printed; never by default.
        config: Of the model; by default a tiny one.
        settings: Of the trainer.
    """
    model = NestModel(config or tiny_config(num_layers=1), backend="torch")
    with tempfile.TemporaryDirectory() as directory, fake_gpu() as gpu, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = FixedData(noise_batch((16, 15 * 16000)).pin_memory(), 2 * num_steps, gpu)
        runner = trainer(
            Path(directory),
            [Throughput(), Progress(PlainLines(seconds_between_lines))],
            strategy=FakeGpuStrategy(),
            max_epochs=1,
            accumulate_grad_batches=2,
            log_every_n_steps=2,
            logger=CSVLogger(directory),
            **settings,
        )
        runner.fit(model, datamodule=data)
    starts = data.counted_loader.num_waits
    return [gpu.waits[start:end] for start, end in zip(starts, [*starts[1:], len(gpu.waits)], strict=True)]
