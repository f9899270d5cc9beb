"""From manifests to deterministic, duration-balanced batches of clean and noisy speech."""

from nestdata.augment import AugmentConfig
from nestdata.bad_audio import BadAudioConfig, BadCut
from nestdata.batch import AudioNoiseBatch, MicrobatchKey
from nestdata.corpora import Corpora
from nestdata.corpus import Corpus
from nestdata.dataset import AudioNoiseDataset, ShortAudio, microbatches
from nestdata.errors import AudioError, ConfigError, CorpusError, ManifestError, NestDataError, PlanError
from nestdata.inputs import InputFormat
from nestdata.keyed import derive_key
from nestdata.mix import Mix, MixConfig, SpeakerNoiseMixer
from nestdata.noise import NoiseConfig, NoiseSampler, NoiseSpan
from nestdata.plan import BatchPlan, PlanConfig
from nestdata.plan_summary import BucketSummary, CorpusSummary, PlanSummary, draw_plan, summarise_plan
from nestdata.prepare import PrepareConfig, PrepareReport, prepare
from nestdata.preview import PreviewRow, batch_digest, preview_rows, write_preview
from nestdata.probe import ProbeMode
from nestdata.target import move_into_place, partial_directory

__all__ = [
    "AudioError",
    "AudioNoiseBatch",
    "AudioNoiseDataset",
    "AugmentConfig",
    "BadAudioConfig",
    "BadCut",
    "BatchPlan",
    "BucketSummary",
    "ConfigError",
    "Corpora",
    "Corpus",
    "CorpusError",
    "CorpusSummary",
    "InputFormat",
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
    "PlanSummary",
    "PrepareConfig",
    "PrepareReport",
    "PreviewRow",
    "ProbeMode",
    "ShortAudio",
    "SpeakerNoiseMixer",
    "batch_digest",
    "derive_key",
    "draw_plan",
    "microbatches",
    "move_into_place",
    "partial_directory",
    "prepare",
    "preview_rows",
    "summarise_plan",
    "write_preview",
]
