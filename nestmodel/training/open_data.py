"""Opens the data of a run, for training and for commands that show what a run trains on. Imports no trainer."""

from dataclasses import dataclass, replace
from pathlib import Path

from nestdata import (
    AudioNoiseDataset,
    AugmentConfig,
    BadAudioConfig,
    BatchPlan,
    Corpora,
    Corpus,
    MixConfig,
    NoiseConfig,
    NoiseSampler,
    PlanConfig,
    RemoteConfig,
    ShortAudio,
    SpeakerNoiseMixer,
)
from nestdata.field_docs import with_field_docs


@with_field_docs
@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Settings of the training data; `open_validation_data` derives those of validation.

    See `NestDataModule` for the fields.
    """

    corpus: list[Path] | Path
    noise: Path | None = None
    plan: PlanConfig = PlanConfig()
    mix: MixConfig = MixConfig()
    noise_sampler: NoiseConfig = NoiseConfig()
    short_audio: ShortAudio = "repeat"
    augment: AugmentConfig = AugmentConfig()
    bad_audio: BadAudioConfig = BadAudioConfig()
    remote: RemoteConfig = RemoteConfig()


def open_training_data(config: DataConfig) -> AudioNoiseDataset:
    """Opens the data set that a run trains on.

    Raises:
        NestError: A corpus cannot be opened, or its cuts do not fit the plan.
    """
    noise = Corpus.open(config.noise) if config.noise else None
    return _open(config, NoiseSampler(noise, config.noise_sampler), SpeakerNoiseMixer(config.mix))


def open_validation_data(config: DataConfig, val_corpus: Path, training: AudioNoiseDataset) -> AudioNoiseDataset:
    """Opens the data set that a run validates on: mixed like that of training, without its weights and transforms.

    Args:
        config: Settings of the training data.
        val_corpus: Speech to validate on.
        training: The opened training data, whose noise and mixer are shared. Speech of both causes a warning.

    Raises:
        NestError: The corpus cannot be opened, or its cuts do not fit the plan.
    """
    plan = replace(
        config.plan,
        weights=None,
        temperature=1.0,
        languages=None,
        language_temperature=1.0,
        stages=(),
    )
    config = replace(config, corpus=val_corpus, plan=plan, augment=AugmentConfig())
    dataset = _open(config, training.noise, training.mixer)
    dataset.warn_if_trained_on(training.corpus)
    return dataset


def _open(config: DataConfig, noise: NoiseSampler, mixer: SpeakerNoiseMixer | None) -> AudioNoiseDataset:
    paths = config.corpus if isinstance(config.corpus, list) else [config.corpus]
    corpora = Corpora.open(paths)
    return AudioNoiseDataset(
        corpora,
        BatchPlan.of(corpora, config.plan),
        noise,
        mixer,
        short_audio=config.short_audio,
        augment=config.augment,
        bad_audio=config.bad_audio,
        remote=config.remote,
    )
