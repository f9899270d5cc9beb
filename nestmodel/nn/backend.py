"""The backend of a training step: operations of PyTorch, or kernels in Triton and compiled code on a GPU.

Backends agree up to rounding. `choose_backend` returns the backend of a run, and `NestNetwork.use_backend` sets it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from nestdata import last_error_line
from nestmodel.class_config import ClassConfig
from nestmodel.config import BackendName, EncoderConfig, FeatureConfig, NestConfig
from nestmodel.errors import TrainingError, is_out_of_memory
from nestmodel.nn.subsampling import num_subsampled

FREE_SHARE = 0.2
"""Share of a GPU's memory that an estimated step has to leave free for the subsampling to keep its activations."""


@dataclass(frozen=True, kw_only=True)
class Backend:
    """What computes a training step."""

    kernels: bool
    """On a GPU, kernels in Triton compute parts of the subsampling and of blocks, where they work."""

    keeps_subsampling: bool = False
    """Where its kernel works, the subsampling keeps its activations instead of recomputing them: more memory, equal
    bits."""

    compiled: bool
    """torch compiles the features, and the blocks unless `why_not_compiled` says why not."""

    num_shapes: int | None = None
    """Number of batch shapes to compile for; None compiles for varying shapes."""

    notes: str = ""
    """Why blocks are not compiled, and what decided whether the subsampling keeps its activations, for the summary."""

    @property
    def compiles_varying_shapes(self) -> bool:
        """Whether code is compiled for shapes that differ from batch to batch."""
        return self.compiled and self.num_shapes is None

    def __str__(self) -> str:
        """Returns the name."""
        if not self.compiled:
            return "kernels" if self.kernels else "torch"
        return "compiled" if self.num_shapes is None else f"compiled for {self.num_shapes} shapes"


TORCH = Backend(kernels=False, compiled=False)
"""Operations of PyTorch, one by one."""

KERNELS = Backend(kernels=True, compiled=False)
"""The backend of a network that trains in no run."""


def choose_backend(
    name: BackendName,
    config: NestConfig,
    device: torch.device,
    precision: str | int | None,
    num_shapes: int | None,
    shapes: Sequence[tuple[int, int]],
) -> Backend:
    """Returns the backend of a run.

    Ranks whose GPUs have different memory may differ in what the subsampling keeps, which changes no bits.

    Args:
        name: `model.backend`.
        config: Of the model.
        device: Of this rank.
        precision: Of the trainer.
        num_shapes: `data.plan.num_shapes`.
        shapes: Cuts in a microbatch of training, and samples to which they are padded; empty if they are not known.
    """
    if name == "torch" or device.type != "cuda":
        return TORCH
    encoder, keeps, notes = config.encoder, False, ""
    if why := why_not_compiled(encoder):
        notes = f", blocks plain, because {why}"
    if isinstance(encoder, EncoderConfig) and not encoder.checkpoint_activations and shapes:
        is_half, total = "16" in str(precision), _gpu_bytes(device)
        kept, others = max((step_bytes(encoder, config.features, shape, is_half=is_half) for shape in shapes), key=sum)
        keeps = kept + others <= (1 - FREE_SHARE) * total
        notes += (
            f"; the subsampling {'keeps' if keeps else 'recomputes'} {kept / 1e9:.1f} GB of activations (the rest of a "
            f"step: about {others / 1e9:.1f} of {total / 1e9:.1f} GB)"
        )
    return Backend(kernels=True, keeps_subsampling=keeps, compiled=True, num_shapes=num_shapes, notes=notes)


def why_not_compiled(config: EncoderConfig | ClassConfig) -> str:
    """Returns why the blocks of an encoder are not compiled; empty if they can be.

    A recomputation of activations would compile in the backward pass, where an error would leave ranks waiting that
    have begun to exchange gradients.
    """
    if isinstance(config, ClassConfig):
        return f"they are of {config.class_path}"
    return "checkpoint_activations is on" if config.checkpoint_activations else ""


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
    num_cuts, num_frames = shape[0], features.num_padded_frames(shape[1])
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
def naming_backend(backend: Backend) -> Iterator[None]:
    """Turns an error of compiled code and kernels, for which a compiler may be missing, into one with the remedy."""
    try:
        yield
    except Exception as error:
        if backend == TORCH or is_out_of_memory(error):
            raise
        raise TrainingError(
            f"the backend of the training step ({backend}) fails: {type(error).__name__}, "
            f"{last_error_line(error)[:300]} Operations of PyTorch take its place with model.backend: torch."
        ) from error
