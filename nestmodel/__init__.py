"""The NEST model, its Lightning wiring and its data module."""

from nestmodel.config import (
    EncoderConfig,
    FeatureConfig,
    MaskConfig,
    NestConfig,
    OptimizerConfig,
    QuantizerConfig,
    preset_path,
)
from nestmodel.data import NestDataModule
from nestmodel.errors import ConfigError, NestModelError
from nestmodel.model import NestModel
from nestmodel.monitor import Curves, PlainProgress, Throughput

__all__ = [
    "ConfigError",
    "Curves",
    "EncoderConfig",
    "FeatureConfig",
    "MaskConfig",
    "NestConfig",
    "NestDataModule",
    "NestModel",
    "NestModelError",
    "OptimizerConfig",
    "PlainProgress",
    "QuantizerConfig",
    "Throughput",
    "preset_path",
]
