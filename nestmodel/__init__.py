"""The NEST model, its Lightning wiring and its data module."""

from nestmodel.checkpoints import Checkpoints, newest_checkpoint
from nestmodel.classifier import ProbeScore
from nestmodel.config import (
    EncoderConfig,
    FeatureConfig,
    MaskConfig,
    NestConfig,
    OptimizerConfig,
    QuantizerConfig,
    preset_path,
)
from nestmodel.curves import Curves
from nestmodel.data import NestDataModule
from nestmodel.errors import ConfigError, ExtractError, NestModelError, ProbeError, TrainingError, WeightsError
from nestmodel.exchange import ExportFormat, export_model, import_model
from nestmodel.extract import ExtractConfig, ExtractReport, FeatureType, FileFormat, extract_features
from nestmodel.guard import StallGuard
from nestmodel.health import Health, UnhealthyTrainingWarning
from nestmodel.leaving import Leaving, Left
from nestmodel.model import NestModel
from nestmodel.monitor import PlainProgress, Throughput
from nestmodel.preflight import PreflightConfig, run_preflight
from nestmodel.preflight_report import CheckReport, CheckResult, PreflightReport
from nestmodel.probe import run_probe
from nestmodel.probe_report import ProbeConfig, ProbeReport
from nestmodel.skipped import SkippedStepWarning
from nestmodel.utterances import LeftOut, Utterance, iterate_features, parse_layers
from nestmodel.weights import WeightParts, WeightReport, load_weights, read_config

__all__ = [
    "CheckReport",
    "CheckResult",
    "Checkpoints",
    "ConfigError",
    "Curves",
    "EncoderConfig",
    "ExportFormat",
    "ExtractConfig",
    "ExtractError",
    "ExtractReport",
    "FeatureConfig",
    "FeatureType",
    "FileFormat",
    "Health",
    "Leaving",
    "Left",
    "LeftOut",
    "MaskConfig",
    "NestConfig",
    "NestDataModule",
    "NestModel",
    "NestModelError",
    "OptimizerConfig",
    "PlainProgress",
    "PreflightConfig",
    "PreflightReport",
    "ProbeConfig",
    "ProbeError",
    "ProbeReport",
    "ProbeScore",
    "QuantizerConfig",
    "SkippedStepWarning",
    "StallGuard",
    "Throughput",
    "TrainingError",
    "UnhealthyTrainingWarning",
    "Utterance",
    "WeightParts",
    "WeightReport",
    "WeightsError",
    "export_model",
    "extract_features",
    "import_model",
    "iterate_features",
    "load_weights",
    "newest_checkpoint",
    "parse_layers",
    "preset_path",
    "read_config",
    "run_preflight",
    "run_probe",
]
