"""From manifests to deterministic, duration-balanced batches of clean and noisy speech."""

from nestdata.batch import AudioNoiseBatch, MicrobatchKey
from nestdata.corpus import Corpus
from nestdata.dataset import AudioNoiseDataset, ShortAudio, microbatches
from nestdata.errors import AudioError, ConfigError, CorpusError, ManifestError, NestDataError, PlanError
from nestdata.keyed import derive_key
from nestdata.mix import Mix, MixConfig, SpeakerNoiseMixer
from nestdata.noise import NoiseConfig, NoiseSampler, NoiseSpan
from nestdata.plan import BatchPlan, PlanConfig
from nestdata.prepare import PrepareConfig, PrepareReport, prepare
from nestdata.preview import PreviewRow, batch_digest, preview_rows, write_preview

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
    "PreviewRow",
    "ShortAudio",
    "SpeakerNoiseMixer",
    "batch_digest",
    "derive_key",
    "microbatches",
    "prepare",
    "preview_rows",
    "write_preview",
]
