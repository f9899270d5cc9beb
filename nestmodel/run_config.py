"""All settings of a run: frozen dataclasses that presets and YAML files fill, and that options of a command override.

`RunConfig` is what `nestmodel.fit` takes, what the command line parses, what `config.yaml` in the folder of a run
holds, and what a checkpoint stores. Nothing here imports torch, so that help and mistakes need not wait for it.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from nestdata import (
    AugmentConfig,
    BadAudioConfig,
    MixConfig,
    NoiseConfig,
    PlanConfig,
    RemoteConfig,
    ShortAudio,
    StartMethod,
)
from nestdata.config_checks import require, require_at_least, require_parts
from nestdata.field_docs import with_field_docs
from nestguard import StallLimits
from nestmodel.class_config import ClassConfig
from nestmodel.config import BackendName, NestConfig, TrackerName, WeightParts
from nestmodel.config_files import (
    PARTIAL_PRESETS,
    build,
    check_keys,
    config_path,
    preset_names,
    preset_path,
    read_files,
    to_plain,
)
from nestmodel.errors import ConfigError

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_duration(setting: str, text: str) -> float:
    """Returns a duration in seconds.

    Args:
        setting: Name of the setting, for the message.
        text: A number with a unit (s, m, h or d), hours:minutes:seconds, or days:hours:minutes:seconds.

    Raises:
        ConfigError: The text is not a duration, or the duration is not above 0 s.
    """
    seconds = 0.0
    if found := re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd])", text):
        seconds = float(found[1]) * _SECONDS[found[2]]
    elif re.fullmatch(r"(\d+:)?\d+:\d\d:\d\d", text):
        units = (86400, 3600, 60, 1)
        parts = text.split(":")
        seconds += sum(unit * int(part) for unit, part in zip(units[-len(parts) :], parts, strict=True))
    if not seconds:
        raise ConfigError(f"{setting} is {text!r}: give it with its unit, such as 30m, 12h or 1d, or as 11:30:00.")
    return seconds


LAST = "last"
"""Value of `ckpt_path`: the newest checkpoint in the output folder; if there is none yet, a new run starts."""

_NOT_STORED = ("ckpt_path", "resume")


@with_field_docs
@dataclass(frozen=True)
class DataConfig:
    """Corpora, and how batches are made from them."""

    corpus: tuple[Path, ...] | list[Path] | Path = ()
    """Speech corpora from `nestdata prepare`. With several, `plan.weights`, `plan.temperature` and `plan.stages`
    determine how often the cuts of each are repeated."""

    noise: Path | None = None
    """Noise corpus; without one, only other speech is mixed in."""

    val_corpus: Path | None = None
    """Speech corpus to validate on. It is mixed with the same noise, identically in every validation."""

    plan: PlanConfig = PlanConfig()
    """How cuts are grouped into microbatches and steps."""

    mix: MixConfig = MixConfig()
    """How interference is added."""

    noise_sampler: NoiseConfig = NoiseConfig()
    """How noise is drawn."""

    short_audio: ShortAudio = "repeat"
    """How cuts shorter than `plan.min_audio_seconds` are lengthened."""

    augment: AugmentConfig = AugmentConfig()
    """Chains of audiomentations transforms, applied in training only."""

    bad_audio: BadAudioConfig = BadAudioConfig()
    """Tolerance for unreadable audio."""

    num_workers: int = 2
    """Loader processes per rank. The batches do not depend on it."""

    start_method: StartMethod | None = None
    """How loader processes are started. By default, `fit` uses a fork server; otherwise, see
    `AudioNoiseDataset.loader`."""

    remote: RemoteConfig = RemoteConfig()
    """How audio in object stores is read."""

    def __post_init__(self) -> None:
        given = [self.corpus] if isinstance(self.corpus, str | Path) else self.corpus
        object.__setattr__(self, "corpus", tuple(Path(path) for path in given))
        require_parts("data", self)
        require_at_least(0, "data", self, "num_workers")

    @property
    def corpora(self) -> tuple[Path, ...]:
        """The speech corpora as a tuple."""
        assert isinstance(self.corpus, tuple)
        return self.corpus


@with_field_docs
@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model, where its first weights come from, and what computes it."""

    config: NestConfig
    """Sizes, features, quantizer, masks and optimizer."""

    init_from: Path | None = None
    """Checkpoint or .nemo file to take weights from, or a folder for Hugging Face."""

    init_parts: WeightParts = "all"
    """Whether to take all weights of that file, or only the weights of the encoder."""

    backend: BackendName = "auto"
    """What computes a training step. `auto`: on a GPU, kernels of this package, and compiled features and blocks; on a
    CPU, operations of PyTorch. `torch`: operations of PyTorch on both."""


@with_field_docs
@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """Length, hardware and numbers of a run; `lightning` passes whatever else Lightning's Trainer takes."""

    max_steps: int = -1
    """Optimizer steps of the run, including earlier starts; -1: no limit."""

    max_time: str | None = None
    """Longest time of this start, such as 30m, 12h, 1d or 11:30:00. The run ends after the step in which it passes."""

    val_check_interval: int | float | None = None
    """Optimizer steps between validations; a share such as 0.5 counts in epochs; None: after each epoch."""

    early_stop: int | None = None
    """End after this number of validations in a row without a lower validation loss; None: never."""

    log_every_n_steps: int = 50
    """Optimizer steps between log entries."""

    gradient_clip_val: float | None = None
    """Largest norm of the gradients of a step; longer ones are scaled down to it."""

    precision: str = "32-true"
    """Precision of training, such as bf16-mixed or 32-true."""

    deterministic: bool = False
    """Whether equal runs on equal GPUs give equal bits, at the cost of time."""

    accelerator: str = "auto"
    """Kind of device: gpu or cpu."""

    devices: int | str = "auto"
    """GPUs or processes of a node: their number, auto, or indices of GPUs as text, such as "0,1"."""

    num_nodes: int = 1
    """Number of machines of the run."""

    strategy: str | ClassConfig = "auto"
    """How Lightning runs several ranks."""

    callbacks: tuple[ClassConfig, ...] = ()
    """Further callbacks of Lightning."""

    lightning: dict[str, Any] = field(default_factory=dict)
    """Other arguments of `pytorch_lightning.Trainer`, such as {limit_val_batches: 20}."""

    def __post_init__(self) -> None:
        require(self.max_steps != 0, "trainer.max_steps", 0, "the number of steps to train, or -1 for no limit")
        require_at_least(1, "trainer", self, "num_nodes", "log_every_n_steps", "early_stop")
        interval = self.val_check_interval
        is_valid = interval is None or (isinstance(interval, int) and interval > 0)
        is_valid |= isinstance(interval, float) and 0 < interval <= 1
        expected = "a number of optimizer steps without a point, or a share of an epoch such as 0.5"
        require(is_valid, "trainer.val_check_interval", interval, expected)
        if isinstance(interval, int) and self.lightning.get("check_val_every_n_epoch") is not None:
            raise ConfigError(
                f"trainer.val_check_interval {interval} counts optimizer steps across epochs: leave out "
                "trainer.lightning.check_val_every_n_epoch, or give a share of an epoch such as 0.5."
            )
        if self.max_time is not None:
            parse_duration("trainer.max_time", self.max_time)
        owned = {part.name for part in fields(self)} & self.lightning.keys()
        require(not owned, "trainer.lightning", sorted(owned), "settings that `trainer` has no field for")
        are_named = all(isinstance(given, ClassConfig) for given in self.callbacks)
        require(
            are_named, "trainer.callbacks", self.callbacks, "ClassConfigs; fit(config, callbacks=[...]) takes objects"
        )


@with_field_docs
@dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are written, and which are kept."""

    every_n_steps: int = 1000
    """Optimizer steps between two checkpoints."""

    keep: int = 2
    """Number of newest checkpoints to keep."""

    keep_every_n_steps: int | None = None
    """Checkpoints at multiples of this number of steps are never removed; None removes them too."""

    directory: Path | None = None
    """Where checkpoints are written; by default `checkpoints` in the log directory of the run."""

    monitor: Literal["val_loss"] | None = None
    """`val_loss` keeps `best.ckpt`, the checkpoint with the lowest validation loss; None keeps none."""

    def __post_init__(self) -> None:
        require_at_least(1, "checkpoints", self, "every_n_steps", "keep", "keep_every_n_steps")


@with_field_docs
@dataclass(frozen=True)
class GuardConfig:
    """The stall guard, which reports the rank that stalls the others, and ends the run with exit code 44."""

    limits: StallLimits = StallLimits()
    """Seconds that a rank may spend in each phase without a heartbeat."""

    report_dir: Path | None = None
    """Where reports are written; by default `stalls` in the output folder."""

    port: int | None = None
    """Port of node 0 to which the monitors of the other nodes connect; by default MASTER_PORT + 1."""

    enabled: bool = True
    """Whether the stall guard is active."""

    def __post_init__(self) -> None:
        require(self.port is None or 0 < self.port < 65536, "guard.port", self.port, "a port from 1 to 65535")


@with_field_docs
@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All settings of a run."""

    data: DataConfig = DataConfig()
    """Corpora and batches."""

    model: ModelConfig
    """The model."""

    trainer: TrainerConfig = TrainerConfig()
    """Length, hardware and numbers."""

    checkpoints: CheckpointConfig = CheckpointConfig()
    """What is saved."""

    guard: GuardConfig = GuardConfig()
    """The stall guard."""

    seed: int = 0
    """Seed of weights, batches and masks."""

    output: Path = Path("runs")
    """Folder of logs and checkpoints; each start has a folder `version_N` of its own in it."""

    log: tuple[TrackerName, ...] = ()
    """Where metrics go besides metrics.csv; by default tensorboard, if it is installed. `--log` may be repeated; it
    replaces the value of files."""

    quiet: bool = False
    """Show no summary, no progress and no results."""

    ckpt_path: str | None = None
    """Checkpoint to load; `last`: the newest of the output folder, if any."""

    resume: bool = False
    """Continue from the newest checkpoint of the output folder."""

    def __post_init__(self) -> None:
        require_parts("", self)
        # One seed decides everything.
        plan, model = replace(self.data.plan, seed=self.seed), replace(self.model.config, seed=self.seed)
        object.__setattr__(self, "data", replace(self.data, plan=plan))
        object.__setattr__(self, "model", replace(self.model, config=model))
        if self.resume and self.ckpt_path not in (None, LAST):
            raise ConfigError("--resume and --ckpt-path name different checkpoints: give one of them.")

    def stored(self) -> dict[str, Any]:
        """Returns the settings as plain values, as `config.yaml` and checkpoints hold them; `read` takes them back."""
        return {name: value for name, value in to_plain(self).items() if name not in _NOT_STORED}

    @classmethod
    def read(cls, names: Iterable[str | Path]) -> "RunConfig":
        """Returns the settings of presets and YAML files; later ones replace values of earlier ones.

        Args:
            names: Each a file or the name of a preset.

        Raises:
            ConfigError: A name is neither, a file cannot be read, a key is unknown, a value has the wrong type or is
                out of range, or together they are not a whole model.
            GuardError: A limit of the stall guard is not positive.
        """
        names = list(names)
        paths = [config_path(name) for name in names]
        content = read_files(paths)
        if "model" not in content:
            raise ConfigError(
                f"no configuration: give --config with a preset ({', '.join(preset_names())}) or a YAML file. "
                "`nestmodel presets` compares the presets."
            )
        if paths[0] in map(preset_path, PARTIAL_PRESETS):
            raise ConfigError(
                f"{paths[0].stem} is not a whole model: give it after a size, such as `--config small --config "
                f"{paths[0].stem}`."
            )
        try:
            return build(cls, content, "")
        except ConfigError as error:
            files = [str(name) for name in names if Path(name).is_file()]
            raise ConfigError(f"{', '.join(files)}: {error}" if files else str(error)) from error


def read_data(names: Iterable[str | Path]) -> tuple[DataConfig, int]:
    """Returns the section `data` of presets and YAML files, and their seed, for commands that need no model.

    Raises:
        ConfigError: As `RunConfig.read`.
    """
    content = read_files(map(config_path, names))
    check_keys(content, [part.name for part in fields(RunConfig)], "", RunConfig)
    seed = content.get("seed", 0)
    require(type(seed) is int, "seed", seed, "a whole number")
    data = build(DataConfig, content.get("data", {}), "data", RunConfig)
    return replace(data, plan=replace(data.plan, seed=seed)), seed
