"""The form of a training step: plain operations of PyTorch, or what a GPU gets instead. Both agree up to rounding."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Forms:
    """What replaces plain operations of PyTorch."""

    kernels: bool
    """On a GPU, kernels in Triton compute parts of the subsampling and of blocks, where they work."""

    keeps_subsampling: bool = False
    """Where its kernel works, the subsampling keeps its activations instead of recomputing them: more memory, equal
    bits."""

    compiled: bool
    """torch compiles the features, and the blocks unless `why_not_compiled` of the encoder says why not."""

    num_shapes: int | None = None
    """Number of batch shapes to compile for; None compiles for varying shapes."""

    def __str__(self) -> str:
        """Returns the name, as in the summary of a run."""
        if not self.compiled:
            return "kernels" if self.kernels else "torch"
        return "compiled" if self.num_shapes is None else f"compiled for {self.num_shapes} shapes"


PLAIN = Forms(kernels=False, compiled=False)
"""Operations of PyTorch, launched one by one."""


def default_forms(device_type: str, num_shapes: int | None) -> Forms:
    """Returns the form that `auto` stands for.

    Args:
        device_type: Such as `cuda`.
        num_shapes: `data.plan.num_shapes`.
    """
    if device_type != "cuda":
        return PLAIN
    return Forms(kernels=True, compiled=True, num_shapes=num_shapes)
