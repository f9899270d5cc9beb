"""What computes the training steps of a run: deterministic mode and forms.

Lightning's `trainer.deterministic: true` makes torch use deterministic kernels, or raise an error where there is none.
It does not select the algorithm of NCCL, and it makes torch fill every new tensor, which costs time:
`prepare_deterministic` does the rest. Environment variables have to be set before CUDA and the process group start;
ranks that are started from this process inherit them.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytorch_lightning as pl
import torch

from nestdata import PlanConfig, last_error_line
from nestmodel.config import EncoderConfig, FeatureConfig, Kernels, NestConfig
from nestmodel.errors import ConfigError, TrainingError, is_out_of_memory
from nestmodel.nn.encoder import why_not_compiled
from nestmodel.nn.gpu.forms import PLAIN, Forms, default_forms
from nestmodel.nn.network import num_padded_frames
from nestmodel.nn.subsampling import num_subsampled

_CUBLAS, _NCCL = "CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO"

REQUIRED = {_CUBLAS: ":4096:8", _NCCL: "Ring"}
"""Environment variables of the deterministic mode and the values that Lightning and this module set.

Sources: cuBLAS's documentation of reproducible results, and NCCL's of NCCL_ALGO. With several algorithms allowed, NCCL
may reduce within switches (NVLS), in an order of its own."""

FREE_SHARE = 0.2
"""Share of a GPU's memory that an estimated step has to leave free for the subsampling to keep its activations."""


def prepare_deterministic() -> None:
    """Sets the environment of the deterministic mode, and keeps torch from filling new tensors.

    Call it before a trainer with `deterministic=True` is built; `nestmodel fit` does. It changes nothing on a CPU.

    Raises:
        ConfigError: A variable has another value, which would be overwritten or might not give equal bits.
    """
    for name, required in REQUIRED.items():
        if os.environ.get(name, required).casefold() != required.casefold():
            raise ConfigError(
                f"trainer.deterministic needs {name}={required}, but the environment sets it to "
                f"{os.environ[name]!r}. Unset {name}, or turn trainer.deterministic off."
            )
    for name, required in REQUIRED.items():
        os.environ.setdefault(name, required)
    # All our results are written before they are read, so there is no uninitialised memory whose value could matter.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # set by a property


def determinism() -> bool:
    """Returns whether torch uses deterministic algorithms, and fails where there is none."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


@dataclass(frozen=True, kw_only=True)
class RunForm:
    """What computes the training steps of a run."""

    forms: Forms
    why_plain_blocks: str
    """Why the blocks are not compiled; empty if they are as in `forms`."""

    memory: str = ""
    """Whether the subsampling keeps its activations, and the estimate that decided it; empty if there was none."""

    @property
    def summary(self) -> str:
        """The form, for the summary of a run."""
        blocks = f", blocks plain, because {self.why_plain_blocks}" if self.why_plain_blocks else ""
        return f"{self.forms}{blocks}{self.memory and f'; {self.memory}'}"


def run_form(
    config: NestConfig,
    kernels: Kernels,
    trainer: pl.Trainer,
    plan: PlanConfig | None,
    shapes: Sequence[tuple[int, int]],
) -> RunForm:
    """Returns the form of a run.

    Ranks whose GPUs have different memory may differ in what the subsampling keeps, which changes no bits.

    Args:
        config: Of the model.
        kernels: `model.kernels`.
        trainer: Of the run.
        plan: Settings of the training batches; None if they are not known.
        shapes: Cuts in a microbatch of training, and samples to which they are padded; empty if they are not known.
    """
    device, num_shapes = trainer.strategy.root_device, None if plan is None else plan.num_shapes
    forms = PLAIN if kernels == "torch" else default_forms(device.type, num_shapes)
    memory, encoder = "", config.encoder
    may_keep = forms.kernels and len(shapes) > 0
    if may_keep and isinstance(encoder, EncoderConfig) and not encoder.checkpoint_activations:
        is_half, total = "16" in str(trainer.precision), _gpu_bytes(device)
        kept, others = max((step_bytes(encoder, config.features, shape, is_half=is_half) for shape in shapes), key=sum)
        is_kept = kept + others <= (1 - FREE_SHARE) * total
        forms = replace(forms, keeps_subsampling=is_kept)
        memory = (
            f"the subsampling {'keeps' if is_kept else 'recomputes'} {kept / 1e9:.1f} GB of activations (the rest of a "
            f"step: about {others / 1e9:.1f} of {total / 1e9:.1f} GB)"
        )
    return RunForm(
        forms=forms,
        why_plain_blocks=why_not_compiled(encoder) if forms.compiled else "",
        memory=memory,
    )


def _gpu_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory


def step_bytes(
    encoder: EncoderConfig, features: FeatureConfig, shape: tuple[int, int], *, is_half: bool
) -> tuple[int, int]:
    """Returns the bytes that the subsampling would keep for a microbatch, and an estimate of a step's other memory.

    The first number is counted. The second one is the estimate of the table in docs/gpu.md, within 5 %: 24 bytes for a
    weight with its moments and gradients, and in each block 50 activations for each of a frame's `d_model` values and
    1.125 for each attention score.

    Args:
        encoder: Sizes of the encoder, which keeps the activations of its blocks.
        features: Sizes of the features.
        shape: Number of cuts, and number of samples to which each is padded.
        is_half: Whether activations have 16 bits instead of 32.
    """
    num_cuts, num_frames = shape[0], num_padded_frames(shape[1], features)
    sizes = num_frames, features.num_mels
    frames, mels = (num_subsampled(size, 4, is_causal=encoder.causal_downsampling) for size in sizes)
    # A stage after the first keeps input and output of its pointwise convolution; a causal one, what it pads as well.
    copies = 3.2 if encoder.causal_downsampling else 2
    in_stages = sum(4**-stage for stage in range(encoder.subsampling_factor.bit_length() - 2))
    kept = copies * in_stages * num_cuts * frames * mels * encoder.subsampling_channels
    dim, keys = encoder.d_model, num_frames / encoder.subsampling_factor
    weights = (4 * encoder.ff_expansion + 8) * dim**2
    of_block = num_cuts * keys * (50 * dim + 1.125 * encoder.num_heads * keys)
    value_bytes = 2 if is_half else 4
    others = 1e9 + encoder.num_layers * (24 * weights + value_bytes * of_block)
    return round(value_bytes * kept), round(others)


@contextmanager
def naming_kernels(forms: Forms) -> Iterator[None]:
    """Turns an error of compiled code and kernels, for which a compiler may be missing, into one with the remedy."""
    try:
        yield
    except Exception as error:
        if forms == PLAIN or is_out_of_memory(error):
            raise
        raise TrainingError(
            f"the form of the training step ({forms}) fails: {type(error).__name__}, {last_error_line(error)[:300]} "
            "Operations of PyTorch take its place with model.kernels: torch."
        ) from error
