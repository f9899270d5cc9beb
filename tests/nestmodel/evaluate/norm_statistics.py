"""What tests see of the batch norm of an encoder: its running statistics, also of the untrained one within a probe."""

from typing import Any

import pytest
from torch import Tensor

from nestmodel import NestNetwork
from nestmodel.evaluate.calibration import calibrate_batch_norm
from nestmodel.nn.batch_norm import StepBatchNorm


def norms_of(network: NestNetwork) -> list[StepBatchNorm]:
    return [module for module in network.encoder.modules() if isinstance(module, StepBatchNorm)]


def norm_statistics(network: NestNetwork) -> list[Tensor]:
    """Returns the running means and variances, one norm after the other."""
    return [
        values for norm in norms_of(network) for values in (norm.running_mean, norm.running_var) if values is not None
    ]


def record_calibrated(monkeypatch: pytest.MonkeyPatch) -> list[NestNetwork]:
    """Returns a list to which each probe adds the untrained network that it has calibrated."""
    calibrated = []

    def record(network: NestNetwork, *arguments: Any, **options: Any) -> None:
        calibrate_batch_norm(network, *arguments, **options)
        calibrated.append(network)

    monkeypatch.setattr("nestmodel.evaluate.probe.calibrate_batch_norm", record)
    return calibrated
