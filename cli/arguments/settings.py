"""The settings that people set, in one table: option, configuration key, group and help.

The help of `fit`, `validate` and `preflight`, their short options, the options of `nestdata plan` and `preview`,
suggestions for mistyped names, completion, and the table in `docs/command-line.md` all come from here. An option is
the last part of its key, with dashes. The fields of `data.plan` and `model.config.optimizer` declare their
help and default; those of all other settings are here.
"""

from dataclasses import dataclass
from typing import Any, Literal

from nestdata.field_docs import field_summaries

CHECKS = "Checks"
"""Group of the settings that only preflight has."""

GROUPS = ("Data", "Batches", "Model and optimizer", "Run", "Hardware", "Output", CHECKS)

LIGHTNING_COMMANDS = ("fit", "validate", "preflight")
"""Commands whose arguments jsonargparse parses."""

_FIT = ("fit",)
_TRAINING = ("fit", "preflight")
_PREFLIGHT = ("preflight",)


@dataclass(frozen=True)
class Setting:
    """One setting that has an option of its own.

    If it is in `data.plan` or `model.config.optimizer`, its field has the help and the default. Other settings have
    them here.
    """

    key: str
    """Key of the configuration."""

    group: str
    """One of `GROUPS`."""

    own_help: str = ""
    """One line, which fits beside the option within 80 columns."""

    own_default: object = None
    """Value if neither a file nor an option sets it; None is not shown."""

    name: str = ""
    """Name of the option, if it is not the last part of the key; `CORPUS` is positional."""

    metavar: str = "N"
    """Placeholder of the value."""

    letter: str = ""
    """One-letter form."""

    kind: Literal["value", "switch", "numbers", "list"] = "value"
    """A switch takes no value; numbers are separated by commas; a list has one value for each use of the option."""

    value: str = ""
    """Value that a switch stands for, if it is not `true`."""

    in_presets: bool = False
    """Whether presets set it."""

    is_rare: bool = False
    """Whether the short help only names it."""

    commands: tuple[str, ...] = LIGHTNING_COMMANDS
    """The commands of `LIGHTNING_COMMANDS` whose help shows it; see `accepted_by`."""

    @property
    def option(self) -> str:
        """Name of the option, without dashes in front."""
        return self.name or self.field_name.replace("_", "-")

    @property
    def flag(self) -> str:
        """The option with its dashes, or the name of the positional argument."""
        return self.option if self.option.isupper() else f"--{self.option}"

    @property
    def field_name(self) -> str:
        """The last part of the key."""
        return self.key.rpartition(".")[2]

    @property
    def help(self) -> str:
        """What the setting does."""
        owner = self._owner
        return self.own_help if owner is None else field_summaries(owner)[self.field_name]

    @property
    def default(self) -> object:
        """Value if neither a file nor an option sets it; None is not shown."""
        owner = self._owner
        return self.own_default if owner is None else owner.__dataclass_fields__[self.field_name].default

    @property
    def default_text(self) -> str:
        """The default as help shows it, or an empty string."""
        default = self.default
        if default is None or default is False:
            return "off" if default is False else ""
        return f"{default:g}" if isinstance(default, float) else str(default)

    @property
    def _owner(self) -> Any:
        """The class whose field declares the setting, imported for the help alone."""
        section = self.key.rpartition(".")[0]
        if section == "data.plan":
            from nestdata import PlanConfig

            return PlanConfig
        if section == "model.config.optimizer":
            from nestmodel.config import OptimizerConfig

            return OptimizerConfig
        return None


SETTINGS = (
    Setting("data.corpus", "Data", "Speech corpora from `nestdata prepare`.", name="CORPUS", kind="list"),
    Setting("data.noise", "Data", "Noise corpus; without one, speech is mixed in.", metavar="DIR"),
    Setting("data.val_corpus", "Data", "Speech corpus to validate on.", metavar="DIR"),
    Setting("data.mix.prob", "Data", "Share of cuts that receive interference.", 0.5, name="mix-prob"),
    Setting("data.plan.max_batch_seconds", "Batches", in_presets=True),
    Setting("data.plan.microbatches_per_step", "Batches", in_presets=True),
    Setting("data.plan.num_shapes", "Batches"),
    Setting("data.plan.min_audio_seconds", "Batches", is_rare=True),
    Setting("data.plan.quadratic_seconds", "Batches", is_rare=True),
    Setting("data.plan.max_cuts", "Batches", is_rare=True),
    Setting("data.plan.bucket_width", "Batches", is_rare=True),
    Setting("data.plan.weights", "Batches", metavar="NUMBERS", kind="numbers", is_rare=True),
    Setting("data.plan.temperature", "Batches", is_rare=True),
    Setting(
        "config", "Model and optimizer", "Preset, such as small, or YAML file; repeatable.", metavar="NAME", letter="c"
    ),
    Setting("model.config.optimizer.lr", "Model and optimizer", in_presets=True, commands=_TRAINING),
    Setting("model.config.optimizer.warmup_steps", "Model and optimizer", in_presets=True, commands=_TRAINING),
    Setting(
        "model.init_from",
        "Model and optimizer",
        "Checkpoint or .nemo file to take weights from.",
        metavar="FILE",
        commands=_TRAINING,
    ),
    Setting("trainer.max_steps", "Run", "Optimizer steps of the run.", -1, in_presets=True, commands=_FIT),
    Setting("trainer.max_time", "Run", "Longest time, as DD:HH:MM:SS.", metavar="TIME", commands=_FIT),
    Setting("trainer.val_check_interval", "Run", "Steps between validations.", in_presets=True, commands=_FIT),
    Setting("trainer.log_every_n_steps", "Run", "Steps between log entries.", 50, in_presets=True, commands=_FIT),
    Setting("seed_everything", "Run", "Seed of weights, batches and masks.", 0, name="seed", in_presets=True),
    Setting(
        "ckpt_path",
        "Run",
        "Checkpoint to load; `last`: the newest, if any.",
        metavar="FILE",
        commands=("fit", "validate"),
    ),
    Setting(
        "ckpt_path",
        "Run",
        "Continue from the newest checkpoint of --output.",
        name="resume",
        kind="switch",
        value="last!",
        commands=_FIT,
    ),
    Setting("trainer.devices", "Hardware", "GPUs or processes of a node.", "auto"),
    Setting("trainer.num_nodes", "Hardware", "Machines of the run.", 1),
    Setting("trainer.accelerator", "Hardware", "Kind of device: gpu or cpu.", "auto", metavar="NAME"),
    Setting(
        "trainer.precision", "Hardware", "Such as bf16-mixed or 32-true.", "32-true", metavar="NAME", in_presets=True
    ),
    Setting("data.num_workers", "Hardware", "Loader processes per rank.", 2, in_presets=True),
    Setting(
        "trainer.default_root_dir",
        "Output",
        "Folder of logs and checkpoints.",
        name="output",
        metavar="DIR",
        letter="o",
        in_presets=True,
    ),
    Setting("log", "Output", "csv, tensorboard, wandb or mlflow; repeatable.", metavar="NAME", kind="list"),
    Setting("quiet", "Output", "Show no summary and no progress.", kind="switch"),
    Setting(
        "find_budget", CHECKS, "Instead, find the largest --max-batch-seconds.", kind="switch", commands=_PREFLIGHT
    ),
    Setting(
        "memory_limit", CHECKS, "With --find-budget: memory of a rank, as 8GiB.", metavar="SIZE", commands=_PREFLIGHT
    ),
    Setting("memory_margin", CHECKS, "With --find-budget: share left free.", 0.1, commands=_PREFLIGHT),
    Setting("num_batches", CHECKS, "Batches that each rank reads.", 3, commands=_PREFLIGHT),
    Setting("timeout_s", CHECKS, "Seconds that ranks wait in a check.", 300.0, commands=_PREFLIGHT),
    Setting("json", CHECKS, "Print the result as JSON.", kind="switch", commands=_PREFLIGHT),
)


def settings_of(command: str) -> list[Setting]:
    """Returns the settings that a command uses, in the order of the table."""
    return [setting for setting in SETTINGS if command in setting.commands]


def accepted_by(command: str) -> list[Setting]:
    """Returns the settings whose options a command accepts: preflight those of fit, so that one line suits both."""
    return [setting for setting in SETTINGS if command == "preflight" or setting.group != CHECKS]


def setting(option: str) -> Setting:
    """Returns the setting of an option, given its name without dashes in front."""
    return next(setting for setting in SETTINGS if setting.option == option)


def short_option(name: str) -> str:
    """Returns the option of a dotted key, or of an option with underscores; other names stay as they are."""
    dashed = name.replace("_", "-")
    by_key = {setting.key.replace("_", "-"): setting.option for setting in SETTINGS if "." in setting.key}
    if dashed in by_key:
        return by_key[dashed]
    return dashed if dashed in {setting.option for setting in SETTINGS} else name
