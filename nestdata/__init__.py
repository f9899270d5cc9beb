"""From manifests to deterministic, duration-balanced batches of clean and noisy speech."""

from nestdata.batch import AudioNoiseBatch, MicrobatchKey
from nestdata.corpus import Corpus
from nestdata.dataset import AudioNoiseDataset
from nestdata.errors import AudioError, ConfigError, CorpusError, ManifestError, NestDataError, PlanError
from nestdata.mix import Mix, MixConfig, SpeakerNoiseMixer
from nestdata.noise import NoiseConfig, NoiseSampler, NoiseSpan
from nestdata.plan import BatchPlan, PlanConfig
from nestdata.prepare import PrepareConfig, PrepareReport, prepare

__all__ = [
    "AudioError",
    "AudioNoiseBatch",
    "AudioNoiseDataset",
    "BatchPlan",
    "ConfigError",
    "Corpus",
    "CorpusError",
    "ManifestError",
    "MicrobatchKey",
    "Mix",
    "MixConfig",
    "NestDataError",
    "NoiseConfig",
    "NoiseSampler",
    "NoiseSpan",
    "PlanConfig",
    "PlanError",
    "PrepareConfig",
    "PrepareReport",
    "SpeakerNoiseMixer",
    "prepare",
]
