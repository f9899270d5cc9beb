"""Opens the data of a run, for training and for commands that show what a run trains on. Imports no trainer."""

from dataclasses import replace

from nestdata import (
    AudioNoiseDataset,
    AugmentConfig,
    BatchPlan,
    Corpora,
    Corpus,
    NoiseSampler,
    SpeakerNoiseMixer,
)
from nestmodel.errors import ConfigError
from nestmodel.run_config import DataConfig


def open_training_data(config: DataConfig) -> AudioNoiseDataset:
    """Opens the data set that a run trains on.

    Raises:
        NestError: There is no corpus, one cannot be opened, or its cuts do not fit the plan.
    """
    if not config.corpora:
        raise ConfigError(
            "no corpus: give one (data.corpus), such as `nestmodel fit speech.corpus --config small`. `nestdata "
            "prepare` makes corpora from audio."
        )
    noise = Corpus.open(config.noise) if config.noise else None
    return _open(config, NoiseSampler(noise, config.noise_sampler), SpeakerNoiseMixer(config.mix))


def open_validation_data(config: DataConfig, training: AudioNoiseDataset) -> AudioNoiseDataset | None:
    """Opens the data set that a run validates on: mixed like the training data, without its weights and transforms.

    Args:
        config: Data settings of the run; without `val_corpus`, the result is None.
        training: The opened training data, whose noise and mixer are shared. Speech that is in both causes a warning.

    Raises:
        NestError: The corpus cannot be opened, or its cuts do not fit the plan.
    """
    if config.val_corpus is None:
        return None
    plan = replace(config.plan, weights=None, temperature=1.0, languages=None, language_temperature=1.0, stages=())
    config = replace(config, corpus=config.val_corpus, plan=plan, augment=AugmentConfig())
    dataset = _open(config, training.noise, training.mixer)
    dataset.warn_if_trained_on(training.corpus)
    return dataset


def _open(config: DataConfig, noise: NoiseSampler, mixer: SpeakerNoiseMixer | None) -> AudioNoiseDataset:
    corpora = Corpora.open(list(config.corpora))
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
