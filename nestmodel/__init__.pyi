"""The NEST network, its training with Lightning, and the tools around a trained encoder.

Lists the public names and their modules. They are imported at first use, which makes importing the package fast.
"""

from .attention_context import parse_context as parse_context
from .class_config import (
    ClassConfig as ClassConfig,
)
from .config import (
    EncoderConfig as EncoderConfig,
)
from .config import (
    ExportFormat as ExportFormat,
)
from .config import (
    FeatureConfig as FeatureConfig,
)
from .config import (
    FeatureType as FeatureType,
)
from .config import (
    MaskConfig as MaskConfig,
)
from .config import (
    NestConfig as NestConfig,
)
from .config import (
    OptimizerConfig as OptimizerConfig,
)
from .config import (
    QuantizerConfig as QuantizerConfig,
)
from .config import (
    WeightParts as WeightParts,
)
from .config_files import preset_names as preset_names
from .config_files import preset_path as preset_path
from .errors import (
    ConfigError as ConfigError,
)
from .errors import (
    ExtractError as ExtractError,
)
from .errors import (
    ProbeError as ProbeError,
)
from .errors import (
    TrainingError as TrainingError,
)
from .errors import (
    WeightsError as WeightsError,
)
from .evaluate.encode import (
    AudioFeatures as AudioFeatures,
)
from .evaluate.encode import (
    Utterance as Utterance,
)
from .evaluate.encode import (
    encode as encode,
)
from .evaluate.encode import (
    iterate_features as iterate_features,
)
from .evaluate.error_rates import (
    ErrorCounts as ErrorCounts,
)
from .evaluate.error_rates import (
    ErrorRate as ErrorRate,
)
from .evaluate.error_rates import (
    Estimate as Estimate,
)
from .evaluate.error_rates import (
    count_errors as count_errors,
)
from .evaluate.error_rates import (
    error_difference as error_difference,
)
from .evaluate.error_rates import (
    error_rate as error_rate,
)
from .evaluate.evaluation_config import (
    CtcProbeConfig as CtcProbeConfig,
)
from .evaluate.evaluation_config import (
    ExtractConfig as ExtractConfig,
)
from .evaluate.evaluation_config import (
    ProbeConfig as ProbeConfig,
)
from .evaluate.extract import (
    ExtractReport as ExtractReport,
)
from .evaluate.extract import (
    extract_features as extract_features,
)
from .evaluate.extract import (
    extract_share as extract_share,
)
from .evaluate.inputs import RejectedUtterance as RejectedUtterance
from .evaluate.probe import (
    run_ctc_probe as run_ctc_probe,
)
from .evaluate.probe import run_probe as run_probe
from .evaluate.probe_report import (
    CtcProbeReport as CtcProbeReport,
)
from .evaluate.probe_report import (
    ProbeReport as ProbeReport,
)
from .evaluate.probe_report import ProbeScore as ProbeScore
from .evaluate.text import (
    Alphabet as Alphabet,
)
from .evaluate.text import (
    normalise_text as normalise_text,
)
from .formats.conversion import (
    average_models as average_models,
)
from .formats.conversion import (
    export_model as export_model,
)
from .formats.conversion import (
    import_model as import_model,
)
from .formats.conversion import (
    save_network as save_network,
)
from .formats.model_file import read_config as read_config
from .formats.nemo_config import config_from_nemo as config_from_nemo
from .formats.weights import (
    WeightReport as WeightReport,
)
from .formats.weights import (
    load_network as load_network,
)
from .formats.weights import (
    load_weights as load_weights,
)
from .nn.encoder import (
    ConformerEncoder as ConformerEncoder,
)
from .nn.encoder_base import (
    Encoder as Encoder,
)
from .nn.encoder_base import (
    EncoderOutput as EncoderOutput,
)
from .nn.encoder_base import (
    FeatureEncoder as FeatureEncoder,
)
from .nn.encoder_base import (
    HiddenStates as HiddenStates,
)
from .nn.loss import (
    LossStats as LossStats,
)
from .nn.loss import (
    loss_stats as loss_stats,
)
from .nn.network import (
    NestNetwork as NestNetwork,
)
from .nn.network import (
    NestOutput as NestOutput,
)
from .nn.network_input import (
    Masks as Masks,
)
from .nn.network_input import (
    NetworkInput as NetworkInput,
)
from .nn.streaming import StreamingEncoder as StreamingEncoder
from .preflight.budget import (
    BudgetReport as BudgetReport,
)
from .preflight.budget import (
    BudgetTrial as BudgetTrial,
)
from .preflight.budget import (
    find_budget as find_budget,
)
from .preflight.checks import (
    run_preflight as run_preflight,
)
from .preflight.preflight_config import (
    BudgetConfig as BudgetConfig,
)
from .preflight.preflight_config import (
    PreflightConfig as PreflightConfig,
)
from .preflight.preflight_report import (
    CheckReport as CheckReport,
)
from .preflight.preflight_report import (
    CheckResult as CheckResult,
)
from .preflight.preflight_report import (
    PreflightReport as PreflightReport,
)
from .run import fit as fit
from .run import validate as validate
from .run_config import (
    CheckpointConfig as CheckpointConfig,
)
from .run_config import (
    DataConfig as DataConfig,
)
from .run_config import (
    GuardConfig as GuardConfig,
)
from .run_config import (
    ModelConfig as ModelConfig,
)
from .run_config import (
    RunConfig as RunConfig,
)
from .run_config import (
    TrainerConfig as TrainerConfig,
)
from .training.callbacks.curves import Curves as Curves
from .training.callbacks.preemption import (
    Preempted as Preempted,
)
from .training.callbacks.preemption import (
    PreemptionHandler as PreemptionHandler,
)
from .training.callbacks.progress import Progress as Progress
from .training.callbacks.stall_guard import StallGuard as StallGuard
from .training.callbacks.throughput import Throughput as Throughput
from .training.data import NestDataModule as NestDataModule
from .training.launcher import prepare_deterministic as prepare_deterministic
from .training.module import NestModel as NestModel
from .training.saving.checkpoint_files import newest_checkpoint as newest_checkpoint
from .training.saving.checkpoints import Checkpoints as Checkpoints
from .training.step_stats import SkippedStepWarning as SkippedStepWarning

__all__ = [
    "Alphabet",
    "AudioFeatures",
    "BudgetConfig",
    "BudgetReport",
    "BudgetTrial",
    "CheckReport",
    "CheckResult",
    "CheckpointConfig",
    "Checkpoints",
    "ClassConfig",
    "ConfigError",
    "ConformerEncoder",
    "CtcProbeConfig",
    "CtcProbeReport",
    "Curves",
    "DataConfig",
    "Encoder",
    "EncoderConfig",
    "EncoderOutput",
    "ErrorCounts",
    "ErrorRate",
    "Estimate",
    "ExportFormat",
    "ExtractConfig",
    "ExtractError",
    "ExtractReport",
    "FeatureConfig",
    "FeatureEncoder",
    "FeatureType",
    "GuardConfig",
    "HiddenStates",
    "LossStats",
    "MaskConfig",
    "Masks",
    "ModelConfig",
    "NestConfig",
    "NestDataModule",
    "NestModel",
    "NestNetwork",
    "NestOutput",
    "NetworkInput",
    "OptimizerConfig",
    "Preempted",
    "PreemptionHandler",
    "PreflightConfig",
    "PreflightReport",
    "ProbeConfig",
    "ProbeError",
    "ProbeReport",
    "ProbeScore",
    "Progress",
    "QuantizerConfig",
    "RejectedUtterance",
    "RunConfig",
    "SkippedStepWarning",
    "StallGuard",
    "StreamingEncoder",
    "Throughput",
    "TrainerConfig",
    "TrainingError",
    "Utterance",
    "WeightParts",
    "WeightReport",
    "WeightsError",
    "average_models",
    "config_from_nemo",
    "count_errors",
    "encode",
    "error_difference",
    "error_rate",
    "export_model",
    "extract_features",
    "extract_share",
    "find_budget",
    "fit",
    "import_model",
    "iterate_features",
    "load_network",
    "load_weights",
    "loss_stats",
    "newest_checkpoint",
    "normalise_text",
    "parse_context",
    "prepare_deterministic",
    "preset_names",
    "preset_path",
    "read_config",
    "run_ctc_probe",
    "run_preflight",
    "run_probe",
    "save_network",
    "validate",
]
