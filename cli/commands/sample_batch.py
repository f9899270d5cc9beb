"""`nestdata sample-batch preview`: shows one training batch as a table, pictures and sound."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from nestdata.config_checks import require
from nestmodel.run_config import DataConfig

from ..options import AsJson, ConfigNames, RunSeed, WorldSize
from ..output import console, print_json
from ..parsing import option

if TYPE_CHECKING:
    from rich.table import Table

    from nestdata import PreviewRow


def preview_command(
    *,
    data: Annotated[DataConfig, option(help="Corpora and batches.")],
    config: ConfigNames = (),
    seed: RunSeed,
    step: Annotated[int, option(help="Optimizer step, counted from 0 at the start of training.")] = 0,
    rank: Annotated[int, option(help="Rank whose first microbatch of the step is shown.")] = 0,
    world_size: WorldSize = 1,
    output: Annotated[Path, option("-o", help="Directory for the page, pictures and sound.")] = Path("preview"),
    as_json: AsJson = False,
) -> None:
    """Show the first microbatch of a step and rank, as a run trains on it."""
    from nestdata import batch_digest, preview_rows, write_preview
    from nestdata.plan.summary import left_out_text
    from nestmodel.training.open_data import open_training_data

    del config  # its values are the defaults
    for name, value in (("--step", step), ("--rank", rank)):
        require(value >= 0, name, value, "0 or more")
    dataset = open_training_data(replace(data, plan=replace(data.plan, seed=seed)))
    plan, sampling_rate = dataset.plan, dataset.corpus.sampling_rate
    batch = dataset[step, plan.microbatches_of(rank, world_size)[0]]
    page = write_preview(batch, sampling_rate, output)
    if as_json:
        return print_json(batch_digest(batch))
    out = console()
    out.print(
        f"step {step} (epoch {plan.epoch(step)}, {plan.steps_per_epoch} steps per epoch), "
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
