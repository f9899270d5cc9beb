"""`nestdata sample-batch preview`: shows one training batch as a table, pictures and sound."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..arguments.options import (
    AsJson,
    ConfigFiles,
    CorpusArguments,
    MicrobatchesPerStep,
    MicrobatchSeconds,
    PlanSeed,
    WorldSize,
    setting_option,
)
from ..output import console, print_json

if TYPE_CHECKING:
    from rich.table import Table

    from nestdata import PreviewRow

sample_batch = typer.Typer(rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]})


@sample_batch.callback()
def _group() -> None:
    """Inspect single training batches."""


@sample_batch.command(short_help="Show the first microbatch of a step and rank, as a run trains on it.")
def preview(
    corpora: CorpusArguments = None,
    config: ConfigFiles = None,
    noise: Annotated[Path | None, setting_option("noise", "data.noise")] = None,
    step: Annotated[int, typer.Option(min=0, help="Optimizer step, counted from 0 at the start of training.")] = 0,
    rank: Annotated[int, typer.Option(min=0, help="Rank whose first microbatch of the step is shown.")] = 0,
    world_size: WorldSize = 1,
    microbatches_per_step: MicrobatchesPerStep = None,
    max_batch_seconds: MicrobatchSeconds = None,
    mix_prob: Annotated[float | None, setting_option("mix-prob")] = None,
    seed: PlanSeed = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory for the page, pictures and sound.")] = Path(
        "preview"
    ),
    as_json: AsJson = False,
) -> None:
    """Show the first microbatch of a step and rank, as a run trains on it.

    With --json, print the cut ids and the SHA-256 digest of every tensor.
    """
    from nestdata import MixConfig, batch_digest, preview_rows, write_preview
    from nestdata.plan.summary import left_out_text

    from ..arguments.run_config import RunData

    run = RunData.read(config)
    dataset = run.training_dataset(
        corpus=run.corpus_paths(corpora),
        noise=noise,
        plan=run.plan_config(
            microbatches_per_step=microbatches_per_step, max_batch_seconds=max_batch_seconds, seed=seed
        ),
        mix=run.get("mix", MixConfig, prob=mix_prob),
    )
    plan, sampling_rate = dataset.plan, dataset.corpus.sampling_rate
    batch = dataset[step, plan.microbatches_of(rank, world_size)[0]]
    page = write_preview(batch, sampling_rate, output)
    if as_json:
        print_json(batch_digest(batch))
        return
    out = console()
    out.print(
        f"step {step} (epoch {batch.key.epoch}, {plan.steps_per_epoch} steps per epoch), "
        f"microbatch {batch.key.microbatch} of {plan.config.microbatches_per_step}"
    )
    if text := left_out_text(plan):
        out.print(f"left out of the plan: {text}")
    out.print(_table(preview_rows(batch, sampling_rate)))
    out.print(f"pictures and sound: {page}")


def _table(rows: list["PreviewRow"]) -> "Table":
    from rich.table import Table

    table = Table()
    for name in ("cut", "noise"):
        table.add_column(name, overflow="fold")
    for name in ("mode", "seconds", "SNR, dB", "padding"):
        table.add_column(name, justify="left" if name == "mode" else "right", no_wrap=True)
    for row in rows:
        snr_db = "" if row.snr_db is None else f"{row.snr_db:.1f}"
        table.add_row(row.cut, row.noise, row.mode, f"{row.seconds:.2f}", snr_db, f"{100 * row.padding:.1f} %")
    return table
