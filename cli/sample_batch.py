"""`nestdata sample-batch preview`: one batch, as a table, pictures and sound."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from nestdata import (
    AudioNoiseDataset,
    BatchPlan,
    Corpus,
    MixConfig,
    NoiseSampler,
    PlanConfig,
    PreviewRow,
    SpeakerNoiseMixer,
    batch_digest,
    preview_rows,
    write_preview,
)

sample_batch = typer.Typer(help="Look at single batches.", rich_markup_mode=None)


@sample_batch.callback()
def _group() -> None:
    """Look at single batches."""


@sample_batch.command()
def preview(
    corpus: Annotated[Path, typer.Argument(help="Speech, as `nestdata prepare` writes it.")],
    noise: Annotated[Path | None, typer.Option(help="Noise corpus; without one, only speech is mixed in.")] = None,
    step: Annotated[int, typer.Option(min=0, help="Optimizer step, counted from the start of training.")] = 0,
    rank: Annotated[int, typer.Option(min=0, help="The rank whose first microbatch of the step is shown.")] = 0,
    world_size: Annotated[int, typer.Option(min=1, help="Number of ranks that share a step.")] = 1,
    microbatches: Annotated[int | None, typer.Option(help="Microbatches in a step. [default: the world size]")] = None,
    max_batch_seconds: Annotated[float, typer.Option(help="Most audio in a microbatch.")] = 240.0,
    seed: Annotated[int, typer.Option(help="Seed of the plan and of every draw.")] = 0,
    prob: Annotated[float, typer.Option(help="Share of cuts that something is mixed into.")] = 0.5,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where pictures and sound go.")] = Path("preview"),
    as_json: Annotated[bool, typer.Option("--json", help="Print ids and SHA-256 of every tensor instead.")] = False,
) -> None:
    """Show the batch of one step and rank as it will be trained on."""
    speech = Corpus.open(corpus)
    config = PlanConfig(
        max_batch_seconds=max_batch_seconds,
        microbatches_per_step=world_size if microbatches is None else microbatches,
        seed=seed,
    )
    plan = BatchPlan.of(speech, config)
    sampler = NoiseSampler(Corpus.open(noise) if noise else None)
    dataset = AudioNoiseDataset(speech, plan, sampler, SpeakerNoiseMixer(MixConfig(prob=prob)))
    batch = dataset[step, plan.microbatches_of(rank, world_size)[0]]
    page = write_preview(batch, speech.sampling_rate, output)
    if as_json:
        print(json.dumps(batch_digest(batch), indent=2))
        return
    out = Console(highlight=False, soft_wrap=True)
    out.print(
        f"step {step} (epoch {batch.key.epoch}) of {plan.steps_per_epoch} an epoch, microbatch {batch.key.microbatch}"
    )
    out.print(_table(preview_rows(batch, speech.sampling_rate)))
    out.print(f"pictures and sound: {page}")


def _table(rows: list[PreviewRow]) -> Table:
    table = Table()
    for name in ("cut", "noise"):
        table.add_column(name, overflow="fold")
    for name in ("mode", "seconds", "ratio, dB", "padding"):
        table.add_column(name, justify="left" if name == "mode" else "right", no_wrap=True)
    for row in rows:
        ratio = "" if row.snr_db is None else f"{row.snr_db:.1f}"
        table.add_row(row.cut, row.noise, row.mode, f"{row.seconds:.2f}", ratio, f"{100 * row.padding:.1f} %")
    return table
