"""Measures on a GPU what cannot be decided without one, and writes one results file.

    python -m benchmarks.gpu [-o FILE.md] [--only SECTION ...] [--presets large xlarge] [--nemo-wheels FOLDER]
    torchrun --nproc-per-node 8 -m benchmarks.gpu

Takes half an hour on one GPU, in one start or in several. Results are written after each row, as Markdown and as JSON.
A second start with the same file keeps finished rows and measures the others, also after a start that was killed or
whose `--minutes` were over. A section that fails is reported as failed, and the others still run; the exit code is 1
then. `--device cpu` runs all sections with a tiny model. docs/gpu.md says which question each row decides.
"""

import argparse
import logging
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import yaml

from benchmarks.gpu.context import Context, full_extent, tiny_extent
from benchmarks.gpu.device import identity, measure_ceilings, measure_device
from benchmarks.gpu.feed import measure_feeding
from benchmarks.gpu.forms import measure_forms
from benchmarks.gpu.loop import measure_deterministic, measure_resume, measure_waits
from benchmarks.gpu.nemo import measure_nemo
from benchmarks.gpu.parity import measure_best_parity, measure_golden, measure_parity
from benchmarks.gpu.parts import measure_parts
from benchmarks.gpu.report import Report, Section
from benchmarks.gpu.stalls import measure_stalls
from benchmarks.gpu.steps import measure_budgets, measure_kernels, measure_presets, measure_steps
from nestdata import last_error_line
from nestmodel import prepare_deterministic, preset_path

PRESETS = ("small", "medium", "large", "xlarge")


class Plan(NamedTuple):
    """A section of the plan."""

    run: Callable[[Context, Section], None]
    minutes: float
    """In each start, a section begins no further row after this time."""

    decides: str


SECTIONS = {
    "device": Plan(measure_device, 0.5, "which machine and versions the other rows are about."),
    "ceilings": Plan(measure_ceilings, 1, "what the other rows are compared with, and what a launch costs the host."),
    "parity": Plan(measure_parity, 1, "whether numbers agree with a CPU's, and what bf16 costs in accuracy."),
    "golden": Plan(measure_golden, 0.5, "whether numbers agree with NeMo's."),
    "steps": Plan(measure_steps, 2.5, "whether the host or the GPU limits a step, and which kernels do."),
    "kernels": Plan(measure_kernels, 0.5, "which kernel is worth writing next."),
    "forms": Plan(measure_forms, 4, "which form of each part is the fastest here; `presets` and `nemo` take it."),
    "parts": Plan(measure_parts, 1.5, "which implementation of a single part is the fastest here."),
    "budgets": Plan(measure_budgets, 1, "the `max_batch_seconds` of the preset `small`."),
    "nemo": Plan(measure_nemo, 4.5, "how fast this project is beside NeMo, on the same GPU and the same audio."),
    "presets": Plan(
        measure_presets, 3, "speed, share of the peak, memory and energy that README and docs/gpu.md quote."
    ),
    "best": Plan(measure_best_parity, 2, "whether the fastest form may be the default."),
    "deterministic": Plan(measure_deterministic, 1.5, "what deterministic mode costs."),
    "waits": Plan(measure_waits, 0.5, "whether a step waits once."),
    "resume": Plan(measure_resume, 1, "whether equal runs and resumed runs have equal bits."),
    "feeding": Plan(measure_feeding, 1.5, "whether the loader feeds the GPU."),
    "stalls": Plan(measure_stalls, 2, "whether the stall guard names what hangs."),
}
"""The sections in the order in which they run: what decides most comes first."""

_NEED_CORPORA = {"feeding", "waits", "resume", "stalls"}

_GROUP_TIMEOUT = timedelta(minutes=20)  # ranks wait for each other at the end of each section


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the sections and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path("gpu_results.md"))
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=list(PRESETS))
    parser.add_argument("--minutes", type=float, default=30.0, help="time of this start; no row begins after it")
    parser.add_argument("--nemo-wheels", type=Path, help="folder made by benchmarks/nemo_wheels.py")
    parser.add_argument("--fresh", action="store_true", help="measure again what the file holds")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args(argv)
    for library in ("pytorch_lightning", "lightning_fabric", "lightning.pytorch"):
        logging.getLogger(library).setLevel(logging.ERROR)
    # Before CUDA starts: cuBLAS reads its variable once. All sections run with it.
    prepare_deterministic()
    shown = " ".join(sys.argv[1:] if argv is None else argv)
    end_s = time.monotonic() + 60 * arguments.minutes
    with tempfile.TemporaryDirectory() as directory:
        context = _context(arguments, Path(directory))
        report = context.from_first_rank(_report(arguments, context, f"python -m benchmarks.gpu {shown}".strip()))
        context.sections = report.sections
        names = [name for name in arguments.only if not (name in report.sections and report.sections[name].is_complete)]
        if _NEED_CORPORA.intersection(names):
            context.prepare_corpora()

        def save() -> None:
            if context.rank == 0:
                report.write(arguments.output)

        for name in names:
            plan = SECTIONS[name]
            section = report.sections.setdefault(name, Section(name, plan.decides))
            section.begin(save)
            context.deadline_s = min(end_s, time.monotonic() + 60 * plan.minutes)
            _run(context, section, plan.run)
            save()
            if context.rank == 0:
                print(f"{name}: {section.error or ('cut' if section.is_cut else 'done')}", file=sys.stderr, flush=True)
    if context.rank == 0:
        print(report.markdown())
    has_failed = bool(context.from_first_rank(report.has_failed))
    if context.world_size > 1:
        dist.destroy_process_group()
    return int(has_failed)


def _report(arguments: argparse.Namespace, context: Context, command: str) -> Report | None:
    """Returns the report to continue; None on other ranks, which get that of the first one."""
    if context.rank != 0:
        return None
    found = identity(context)
    return Report(command, found) if arguments.fresh else Report.resume(arguments.output, command, found)


def _run(context: Context, section: Section, run: Callable[[Context, Section], None]) -> None:
    """Runs a section; an error on any rank ends it at the next case. The section then has the errors of all ranks.

    An error between the collectives of a training loop leaves the other ranks waiting until the process group times
    out.
    """
    started = time.perf_counter()
    try:
        run(context, section)
    except Exception as error:
        traceback.print_exc()
        section.error = f"{type(error).__name__}: {last_error_line(error)}"
    context.free_memory()
    section.seconds += time.perf_counter() - started
    errors = context.end_section(section.error)
    if context.world_size > 1:
        section.error = "; ".join(f"rank {rank}: {error}" for rank, error in enumerate(errors) if error) or None
    section.is_complete = section.error is None and not section.is_cut


def _context(arguments: argparse.Namespace, directory: Path) -> Context:
    """Returns the context of this rank; connects the ranks that torchrun has started."""
    is_cuda = arguments.device == "cuda"
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
        extent = full_extent(arguments.presets, {name: _budget(name) for name in arguments.presets})
    else:
        extent = tiny_extent()
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    num_local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    context = Context(
        device,
        extent,
        directory,
        rank=int(os.environ.get("RANK", "0")),
        local_rank=local_rank,
        world_size=world_size,
        num_nodes=world_size // num_local_ranks,
        num_local_ranks=num_local_ranks,
        nemo_wheels=arguments.nemo_wheels,
    )
    if world_size > 1:
        dist.init_process_group("nccl" if is_cuda else "gloo", timeout=_GROUP_TIMEOUT)
        shared: list[Path | None] = [None] * world_size
        dist.all_gather_object(shared, directory)
        # The directory of the first rank of this node; on other nodes, ranks have others.
        first = shared[context.rank - local_rank]
        assert first is not None
        context.directory = first
    return context


def _budget(preset: str) -> float:
    content = yaml.safe_load(preset_path(preset).read_text(encoding="utf-8"))
    return float(content["data"]["plan"]["max_batch_seconds"])


if __name__ == "__main__":
    sys.exit(main())
