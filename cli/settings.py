"""The settings that people set, in one table: option, configuration key, group and help.

The help of `fit`, `validate` and `preflight`, their short options, the options of `nestdata plan` and `preview`,
suggestions for mistyped names, completion, and the table in `docs/command-line.md` all come from here. An option is
the last part of its key, with dashes. This module imports only the standard library.
"""

from dataclasses import dataclass
from typing import Literal

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
    """One setting that has an option of its own."""

    option: str
    """Name of the option, without dashes in front; `CORPUS` is positional."""

    key: str
    """Key of the configuration."""

    group: str
    """One of `GROUPS`."""

    help: str
    """One line, which fits beside the option within 80 columns."""

    default: object = None
    """Value if neither a file nor an option sets it; None is not shown."""

    metavar: str = "N"
    """Placeholder of the value."""

    letter: str = ""
    """One-letter form."""

    kind: Literal["value", "switch", "numbers", "list"] = "value"
    """A switch takes no value; numbers are separated by commas; a list has one value for each use of the option."""

    in_presets: bool = False
    """Whether presets set it."""

    is_rare: bool = False
    """Whether the short help only names it."""

    commands: tuple[str, ...] = LIGHTNING_COMMANDS
    """The commands of `LIGHTNING_COMMANDS` whose help shows it; see `accepted_by`."""

    value: str = ""
    """Value that a switch stands for, if it is not `true`."""

    @property
    def flag(self) -> str:
        """The option with its dashes, or the name of the positional argument."""
        return self.option if self.option.isupper() else f"--{self.option}"

    @property
    def default_text(self) -> str:
        """The default as help shows it, or an empty string."""
        if self.default is None or self.default is False:
            return "off" if self.default is False else ""
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)


SETTINGS = (
    Setting("CORPUS", "data.corpus", "Data", "Speech corpora from `nestdata prepare`.", kind="list"),
    Setting("noise", "data.noise", "Data", "Noise corpus; without one, speech is mixed in.", metavar="DIR"),
    Setting("val-corpus", "data.val_corpus", "Data", "Speech corpus to validate on.", metavar="DIR"),
    Setting("mix-prob", "data.mix.prob", "Data", "Share of cuts that receive interference.", 0.5),
    Setting(
        "allow-commands",
        "data.allow_commands",
        "Data",
        "Run shell commands that a manifest or corpus contains instead of files.",
        kind="switch",
        is_rare=True,
    ),
    Setting(
        "max-batch-seconds",
        "data.plan.max_batch_seconds",
        "Batches",
        "Seconds per microbatch, padding included.",
        240.0,
        in_presets=True,
    ),
    Setting(
        "microbatches-per-step",
        "data.plan.microbatches_per_step",
        "Batches",
        "Microbatches per step over all ranks.",
        8,
        in_presets=True,
    ),
    Setting("num-shapes", "data.plan.num_shapes", "Batches", "Number of padded lengths, for compiled kernels."),
    Setting(
        "min-audio-seconds",
        "data.plan.min_audio_seconds",
        "Batches",
        "Lengthen shorter cuts to this many seconds.",
        1.0,
        is_rare=True,
    ),
    Setting(
        "quadratic-seconds",
        "data.plan.quadratic_seconds",
        "Batches",
        "Value of q, where a cut of d seconds counts as d + d²/q against the maximum.",
        is_rare=True,
    ),
    Setting("max-cuts", "data.plan.max_cuts", "Batches", "Maximum number of cuts per microbatch.", is_rare=True),
    Setting(
        "bucket-width",
        "data.plan.bucket_width",
        "Batches",
        "Largest difference of lengths in a bucket.",
        1 / 32,
        is_rare=True,
    ),
    Setting(
        "weights",
        "data.plan.weights",
        "Batches",
        "Share of each corpus in the hours of an epoch, such as 0.7,0.3.",
        metavar="NUMBERS",
        kind="numbers",
        is_rare=True,
    ),
    Setting(
        "temperature",
        "data.plan.temperature",
        "Batches",
        "Above 1, small corpora are repeated more often.",
        1.0,
        is_rare=True,
    ),
    Setting(
        "mixed-lengths",
        "data.plan.mixed_lengths",
        "Batches",
        "Take the microbatches of a step from different buckets.",
        False,
        kind="switch",
        is_rare=True,
    ),
    Setting(
        "config",
        "config",
        "Model and optimizer",
        "Preset, such as small, or YAML file; repeatable.",
        metavar="NAME",
        letter="c",
    ),
    Setting(
        "lr",
        "model.config.optimizer.lr",
        "Model and optimizer",
        "Factor of the Noam schedule, not a rate.",
        5.0,
        in_presets=True,
        commands=_TRAINING,
    ),
    Setting(
        "warmup-steps",
        "model.config.optimizer.warmup_steps",
        "Model and optimizer",
        "Steps in which the rate rises.",
        25000,
        in_presets=True,
        commands=_TRAINING,
    ),
    Setting(
        "init-from",
        "model.init_from",
        "Model and optimizer",
        "Checkpoint or .nemo file to take weights from.",
        metavar="FILE",
        commands=_TRAINING,
    ),
    Setting("max-steps", "trainer.max_steps", "Run", "Optimizer steps of the run.", -1, in_presets=True, commands=_FIT),
    Setting("max-time", "trainer.max_time", "Run", "Longest time, as DD:HH:MM:SS.", metavar="TIME", commands=_FIT),
    Setting(
        "val-check-interval",
        "trainer.val_check_interval",
        "Run",
        "Steps between validations.",
        in_presets=True,
        commands=_FIT,
    ),
    Setting(
        "log-every-n-steps",
        "trainer.log_every_n_steps",
        "Run",
        "Steps between log entries.",
        50,
        in_presets=True,
        commands=_FIT,
    ),
    Setting("seed", "seed_everything", "Run", "Seed of weights, batches and masks.", 0, in_presets=True),
    Setting(
        "ckpt-path",
        "ckpt_path",
        "Run",
        "Checkpoint to load; `last`: the newest, if any.",
        metavar="FILE",
        commands=("fit", "validate"),
    ),
    Setting(
        "resume",
        "ckpt_path",
        "Run",
        "Continue from the newest checkpoint of --output.",
        kind="switch",
        value="last!",
        commands=_FIT,
    ),
    Setting("devices", "trainer.devices", "Hardware", "GPUs or processes of a node.", "auto"),
    Setting("num-nodes", "trainer.num_nodes", "Hardware", "Machines of the run.", 1),
    Setting("accelerator", "trainer.accelerator", "Hardware", "Kind of device: gpu or cpu.", "auto", metavar="NAME"),
    Setting(
        "precision",
        "trainer.precision",
        "Hardware",
        "Such as bf16-mixed or 32-true.",
        "32-true",
        in_presets=True,
        metavar="NAME",
    ),
    Setting("num-workers", "data.num_workers", "Hardware", "Loader processes per rank.", 2, in_presets=True),
    Setting(
        "output",
        "trainer.default_root_dir",
        "Output",
        "Folder of logs and checkpoints.",
        in_presets=True,
        metavar="DIR",
        letter="o",
    ),
    Setting("log", "log", "Output", "csv, tensorboard, wandb or mlflow; repeatable.", metavar="NAME", kind="list"),
    Setting("quiet", "quiet", "Output", "Show no summary and no progress.", kind="switch"),
    Setting(
        "find-budget",
        "find_budget",
        CHECKS,
        "Instead, find the largest --max-batch-seconds.",
        kind="switch",
        commands=_PREFLIGHT,
    ),
    Setting(
        "memory-limit",
        "memory_limit",
        CHECKS,
        "With --find-budget: memory of a rank, as 8GiB.",
        metavar="SIZE",
        commands=_PREFLIGHT,
    ),
    Setting("memory-margin", "memory_margin", CHECKS, "With --find-budget: share left free.", 0.1, commands=_PREFLIGHT),
    Setting("tune", "tune", CHECKS, "Instead, race the kernels for fit.", kind="switch", commands=_PREFLIGHT),
    Setting("num-batches", "num_batches", CHECKS, "Batches that each rank reads.", 3, commands=_PREFLIGHT),
    Setting("timeout-s", "timeout_s", CHECKS, "Seconds that ranks wait in a check.", 300.0, commands=_PREFLIGHT),
    Setting(
        "feeding-seconds",
        "feeding_seconds",
        CHECKS,
        "Seconds per number of workers; 0 skips it.",
        2.0,
        commands=_PREFLIGHT,
    ),
    Setting(
        "store-seconds",
        "store_seconds",
        CHECKS,
        "Seconds to measure the object store.",
        2.0,
        commands=_PREFLIGHT,
    ),
    Setting(
        "price-per-1000-requests",
        "price_per_1000_requests",
        CHECKS,
        "Price of 1,000 requests to the store.",
        commands=_PREFLIGHT,
    ),
    Setting("price-per-gb", "price_per_gb", CHECKS, "Price of 1 GB that leaves the store.", commands=_PREFLIGHT),
    Setting("json", "json", CHECKS, "Print the result as JSON.", kind="switch", commands=_PREFLIGHT),
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
