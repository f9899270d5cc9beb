"""Which form of each part of a training step runs: operations of PyTorch one by one, or kernels that join them.

All forms of a part compute the same values, up to rounding.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, get_args, get_type_hints

from nestmodel.errors import ConfigError

AUTO: Literal["auto"] = "auto"
TORCH: Literal["torch"] = "torch"
"""The plain form of every part."""


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The form of each part of a training step.

    `torch` is always the plain form: operations of PyTorch, launched one by one. `auto` leaves the choice to the run:
    on a GPU, `fit` races the forms; see docs/gpu.md.
    """

    features: Literal["auto", "torch", "compiled"] = "auto"
    """`compiled`: torch compiles the features."""

    subsampling: Literal["auto", "torch", "triton"] = "auto"
    """`triton`: on a GPU, one kernel for each direction computes the first two stages of the subsampling. Where the
    kernel does not work, a warning is shown and the plain form runs."""

    blocks: Literal["auto", "torch", "compiled", "combined"] = "auto"
    """`compiled`: torch compiles the blocks of the encoder. This works best with few batch shapes: see
    `PlanConfig.num_shapes`. `combined`: besides, kernels that do not depend on each other are launched as one."""

    step: Literal["auto", "torch", "graph"] = "auto"
    """`graph`: the forward and the backward pass of a microbatch are replayed as two CUDA graphs for each batch shape.
    Needs `PlanConfig.num_shapes`."""

    def resolve(self, chosen: "Kernels") -> "Kernels":
        """Returns these kernels with the values of `chosen` in place of `auto`."""
        return replace(self, **{name: getattr(chosen, name) for name in self.open_parts()})

    def open_parts(self) -> list[str]:
        """Returns the parts whose form is `auto`."""
        return [name for name, form in asdict(self).items() if form == AUTO]


PARTS = tuple(field.name for field in fields(Kernels))
"""Names of all parts."""


def kernels_of(forms: object) -> Kernels:
    """Returns kernels that are given as a mapping from every part to its form.

    Raises:
        ConfigError: It is not such a mapping, or a form is unknown.
    """
    hints = get_type_hints(Kernels)
    if not isinstance(forms, Mapping) or forms.keys() != hints.keys():
        raise ConfigError(f"the forms of kernels are {forms!r}: expected one for each of {', '.join(PARTS)}.")
    known: dict[str, Any] = dict(forms)
    for part, hint in hints.items():
        if not isinstance(known[part], str) or known[part] not in get_args(hint):
            raise ConfigError(f"the form of {part} is {known[part]!r}: expected one of {', '.join(get_args(hint))}.")
    return Kernels(**known)


def default_kernels(device_type: str) -> Kernels:
    """Returns the forms that a type of device, such as `cuda`, gets without a measurement."""
    subsampling: Literal["torch", "triton"] = "triton" if device_type == "cuda" else "torch"
    return Kernels(features="torch", subsampling=subsampling, blocks="torch", step="torch")
