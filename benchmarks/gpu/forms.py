"""The forms of a training step that are compared; all of them compute the same values, up to rounding."""

from dataclasses import dataclass

import torch

from nestmodel import NestModel
from nestmodel.nn.gpu.forms import Forms


@dataclass(frozen=True, kw_only=True)
class Form:
    """What a form uses."""

    kernels: bool = True
    """Parts of the subsampling and of blocks are kernels in Triton, instead of operations of torch."""

    compiled: bool = False
    """Features and blocks are compiled by torch."""

    has_fixed_shapes: bool = False
    """Compiled for the one shape that is measured, instead of for varying shapes."""

    @property
    def has_varying_shapes(self) -> bool:
        """Whether the code is compiled for varying shapes, which a batch of another length has to come before."""
        return self.compiled and not self.has_fixed_shapes


REFERENCE = "torch"
"""The form with operations of torch only."""

PLAIN = "plain"

FORMS = {
    REFERENCE: Form(kernels=False),
    PLAIN: Form(),
    "compiled": Form(compiled=True),
    "compiled-fixed": Form(compiled=True, has_fixed_shapes=True),
}
"""All forms by name."""

ORDER = ("compiled", PLAIN, "compiled-fixed", REFERENCE)
"""Forms in the order in which they are measured, those first that decide most."""


def set_form(model: NestModel, form: Form) -> None:
    """Gives a model a form; steps are prepared afterwards.

    Args:
        model: In training mode, with a trainer.
        form: The form.
    """
    torch.compiler.reset()
    forms = Forms(
        kernels=form.kernels,
        keeps_subsampling=form.kernels,
        compiled=form.compiled,
        num_shapes=1 if form.has_fixed_shapes else None,
    )
    model.use_forms(forms)
