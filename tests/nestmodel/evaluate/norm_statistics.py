"""What tests see of the batch norm of an encoder: its running statistics."""

from torch import Tensor

from nestmodel import NestNetwork
from nestmodel.nn.batch_norm import StepBatchNorm


def norms_of(network: NestNetwork) -> list[StepBatchNorm]:
    return [module for module in network.encoder.modules() if isinstance(module, StepBatchNorm)]


def norm_statistics(network: NestNetwork) -> list[Tensor]:
    """Returns the running means and variances, one norm after the other."""
    return [
        values for norm in norms_of(network) for values in (norm.running_mean, norm.running_var) if values is not None
    ]
