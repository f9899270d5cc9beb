"""`nestmodel presets`: compares the presets, or prints one as YAML to start a configuration from."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from nestmodel import EncoderConfig, NestConfig
from nestmodel.attention_context import Context, format_context
from nestmodel.config_files import LIVE_PRESETS, read_yaml

from ..output import console
from ..parsing import Positionals, option

if TYPE_CHECKING:
    from rich.table import Table

_HOUR = 3600
_DAY = 24 * _HOUR

_NOTES = """\
audio a run: the steps of the preset, whatever the size of the corpus.
GPU memory, audio-s/s: measured on one H100 with the batches of the preset and
  cuts of 15 s, not compiled (benchmarks/results/gpu_forms_h100_2026-11.md;
  medium: an earlier version); demo runs on a CPU.
days: the audio of a run at that rate on one H100. No such run was made.
24, 40, 80 GB: estimate of the largest --max-batch-seconds on such a GPU, for
  cuts of up to 60 s (docs/gpu.md); `preflight --find-budget` finds yours.

streaming, unified: share of microbatches; given after a size, as in `--config
  small --config streaming`. The frames are of 80 ms (docs/streaming.md).
v2: features, targets and mixing of NEST v2; given after a size
  (docs/from-nemo.md).

`nestmodel presets large > run.yaml` starts a configuration, and
`nestmodel fit speech.corpus --config run.yaml` trains with it."""


class Figures(NamedTuple):
    """What was counted or measured of a preset."""

    parameters: float
    """Millions."""

    memory_gb: float | None = None
    """GPU memory that a step reserved on an H100, in GB."""

    audio_s_per_s: int | None = None
    """Seconds of audio per second on an H100."""

    budgets: tuple[int, int, int] | None = None
    """Largest `max_batch_seconds` for 24, 40 and 80 GB."""


FIGURES = {
    "demo": Figures(2.2),
    "small": Figures(14, 19.1, 20832, (3640, 6260, 12800)),
    "medium": Figures(28, 30.09, 9263, (2740, 4760, 9780)),
    "large": Figures(113, 24.2, 11270, (1160, 2120, 4500)),
    "xlarge": Figures(616, 34.9, 3817, (160, 500, 1400)),
}
"""Figures of each preset, in order of size."""


def presets_command(
    name: Annotated[str | None, Positionals, option(metavar="NAME", help="Preset to print as YAML.")] = None,
) -> None:
    """Compare the presets, or print one as YAML to start a configuration from."""
    from nestmodel import preset_path

    if name is not None:
        print(preset_path(name).read_text(encoding="utf-8"), end="")
        return
    contents = {preset: read_yaml(preset_path(preset).read_text(encoding="utf-8")) for preset in FIGURES}
    out = console()
    out.print(_sizes(contents))
    out.print(_demands(contents))
    out.print(_contexts({preset: NestConfig.preset("small", preset) for preset in LIVE_PRESETS}))
    out.print(f"\n{_NOTES}")


def _sizes(contents: Mapping[str, Any]) -> "Table":
    table = _table("parameters", "dim x layers", "frame", "audio a step", "audio a run")
    for preset, content in contents.items():
        config = NestConfig.from_dict(content["model"]["config"])
        hours = audio_of_run(content) / _HOUR
        table.add_row(
            preset,
            f"{FIGURES[preset].parameters:g} M",
            f"{config.conformer.d_model} x {config.conformer.num_layers}",
            f"{1000 * config.frame_s:.0f} ms",
            f"{_audio_of_step(content):,.0f} s",
            f"{hours:,.0f} h",
        )
    return table


def _demands(contents: Mapping[str, Any]) -> "Table":
    table = _table("GPU memory", "audio-s/s", "days", "24 GB", "40 GB", "80 GB")
    for preset, content in contents.items():
        figures = FIGURES[preset]
        if figures.audio_s_per_s is not None:
            days = audio_of_run(content) / figures.audio_s_per_s / _DAY
            budgets = (f"{budget:,}" for budget in figures.budgets or ())
            table.add_row(preset, f"{figures.memory_gb:.1f} GB", f"{figures.audio_s_per_s:,}", f"{days:.0f}", *budgets)
    return table


def _contexts(configs: Mapping[str, NestConfig]) -> "Table":
    """Returns the attention contexts of presets, and in which share of its microbatches each preset draws them."""
    table = _table("left", "chunk", "look-ahead", "delay", *configs, first="context")
    shares = {preset: _shares(config.conformer) for preset, config in configs.items()}
    config = next(iter(configs.values()))
    for context in sorted({context for of_preset in shares.values() for context in of_preset}, reverse=True):
        cells = ["utterance"] + 3 * ["-"]
        look_ahead_s, delay_s = config.look_ahead_s(context), config.delay_s(context)
        if look_ahead_s is not None and delay_s is not None:
            left, right = context
            cells = [f"{left * config.frame_s:.1f} s", f"{(right + 1) * config.frame_s:.2f} s"]
            cells += [f"{look_ahead_s:.2f} s", f"{1000 * delay_s:,.0f} ms"]
        drawn = (of_preset.get(context, 0.0) for of_preset in shares.values())
        table.add_row(format_context(context), *cells, *(f"{100 * share:g} %" for share in drawn))
    return table


def _shares(encoder: EncoderConfig) -> dict[Context, float]:
    contexts = encoder.att_context_size
    return dict(zip(contexts, encoder.att_context_probs or [1 / len(contexts)] * len(contexts), strict=True))


def audio_of_run(content: Mapping[str, Any]) -> float:
    """Returns the seconds of audio in all steps of a preset."""
    seconds: float = content["trainer"]["max_steps"] * _audio_of_step(content)
    return seconds


def _audio_of_step(content: Mapping[str, Any]) -> float:
    plan = content["data"]["plan"]
    seconds: float = plan["max_batch_seconds"] * plan["microbatches_per_step"]
    return seconds


def _table(*names: str, first: str = "preset") -> "Table":
    from rich.table import Table

    table = Table(first, box=None, padding=(0, 3, 0, 0), pad_edge=False)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    return table
