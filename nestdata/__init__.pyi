"""Deterministic, duration-balanced batches of clean and noisy speech from manifests.

Lists the public names and the modules that they are imported from at first use.
"""

from .audio.channels import Channel as Channel
from .batch.augment import AugmentConfig as AugmentConfig
from .batch.bad_audio import BadAudioConfig as BadAudioConfig
from .batch.bad_audio import BadCut as BadCut
from .batch.batch import AudioNoiseBatch as AudioNoiseBatch
from .batch.batch import Microbatch as Microbatch
from .batch.dataset import AudioNoiseDataset as AudioNoiseDataset
from .batch.loader import BatchLoader as BatchLoader
from .batch.loader import microbatches as microbatches
from .batch.loader import start_fork_server as start_fork_server
from .batch.mix import Mix as Mix
from .batch.mix import MixConfig as MixConfig
from .batch.mix import SpeakerNoiseMixer as SpeakerNoiseMixer
from .batch.noise import NoiseConfig as NoiseConfig
from .batch.noise import NoiseSampler as NoiseSampler
from .batch.noise import NoiseSpan as NoiseSpan
from .batch.preview import PreviewRow as PreviewRow
from .batch.preview import batch_digest as batch_digest
from .batch.preview import preview_rows as preview_rows
from .batch.preview import write_preview as write_preview
from .batch.remote import RemoteConfig as RemoteConfig
from .batch.remote import RemoteStats as RemoteStats
from .corpus.addresses import Address as Address
from .corpus.addresses import Shard as Shard
from .corpus.corpora import Corpora as Corpora
from .corpus.corpora import CorpusInput as CorpusInput
from .corpus.corpus import Corpus as Corpus
from .errors import AudioError as AudioError
from .errors import ConfigError as ConfigError
from .errors import CorpusError as CorpusError
from .errors import ManifestError as ManifestError
from .errors import NestError as NestError
from .errors import OutputError as OutputError
from .errors import PlanError as PlanError
from .errors import StorageError as StorageError
from .errors import last_error_line as last_error_line
from .input_format import InputFormat as InputFormat
from .options import PackCodec as PackCodec
from .options import PackConfig as PackConfig
from .options import ShortAudio as ShortAudio
from .options import StartMethod as StartMethod
from .output import output_directory as output_directory
from .output import output_file as output_file
from .pack.pack_corpora import PackReport as PackReport
from .pack.pack_corpora import pack_corpora as pack_corpora
from .pack.verify import VerifyProblem as VerifyProblem
from .pack.verify import VerifyReport as VerifyReport
from .pack.verify import verify_corpus as verify_corpus
from .plan.batch_plan import BatchPlan as BatchPlan
from .plan.microbatch import MicrobatchKey as MicrobatchKey
from .plan.microbatch import PlannedMicrobatch as PlannedMicrobatch
from .plan.plan_config import MixtureStage as MixtureStage
from .plan.plan_config import PlanConfig as PlanConfig
from .plan.summary import BucketSummary as BucketSummary
from .plan.summary import CorpusSummary as CorpusSummary
from .plan.summary import PlanSummary as PlanSummary
from .plan.summary import StageSummary as StageSummary
from .plan.summary import draw_plan as draw_plan
from .plan.summary import summarise_plan as summarise_plan
from .prepare.finish import PrepareReport as PrepareReport
from .prepare.inputs.format import AudioInput as AudioInput
from .prepare.inputs.format import AudioInputs as AudioInputs
from .prepare.inputs.format import audio_inputs as audio_inputs
from .prepare.inputs.patterns import default_output as default_output
from .prepare.load_audio import load_audio as load_audio
from .prepare.prepare_config import PrepareConfig as PrepareConfig
from .prepare.prepare_config import ProbeMode as ProbeMode
from .prepare.prepare_config import SegmentConfig as SegmentConfig
from .prepare.run import PrepareProgress as PrepareProgress
from .prepare.run import prepare_corpus as prepare_corpus
from .prepare.speech import share_of_speech as share_of_speech
from .redaction import redacted as redacted
from .stateless_rng import derive_key as derive_key
from .storage import ObjectInfo as ObjectInfo
from .storage import Storage as Storage
from .storage import StorageConfig as StorageConfig
from .storage import is_url as is_url

__all__ = [
    "Address",
    "AudioError",
    "AudioInput",
    "AudioInputs",
    "AudioNoiseBatch",
    "AudioNoiseDataset",
    "AugmentConfig",
    "BadAudioConfig",
    "BadCut",
    "BatchLoader",
    "BatchPlan",
    "BucketSummary",
    "Channel",
    "ConfigError",
    "Corpora",
    "Corpus",
    "CorpusError",
    "CorpusInput",
    "CorpusSummary",
    "InputFormat",
    "ManifestError",
    "Microbatch",
    "MicrobatchKey",
    "Mix",
    "MixConfig",
    "MixtureStage",
    "NestError",
    "NoiseConfig",
    "NoiseSampler",
    "NoiseSpan",
    "ObjectInfo",
    "OutputError",
    "PackCodec",
    "PackConfig",
    "PackReport",
    "PlanConfig",
    "PlanError",
    "PlanSummary",
    "PlannedMicrobatch",
    "PrepareConfig",
    "PrepareProgress",
    "PrepareReport",
    "PreviewRow",
    "ProbeMode",
    "RemoteConfig",
    "RemoteStats",
    "SegmentConfig",
    "Shard",
    "ShortAudio",
    "SpeakerNoiseMixer",
    "StageSummary",
    "StartMethod",
    "Storage",
    "StorageConfig",
    "StorageError",
    "VerifyProblem",
    "VerifyReport",
    "audio_inputs",
    "batch_digest",
    "default_output",
    "derive_key",
    "draw_plan",
    "is_url",
    "last_error_line",
    "load_audio",
    "microbatches",
    "output_directory",
    "output_file",
    "pack_corpora",
    "prepare_corpus",
    "preview_rows",
    "redacted",
    "share_of_speech",
    "start_fork_server",
    "summarise_plan",
    "verify_corpus",
    "write_preview",
]
