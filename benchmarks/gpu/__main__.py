"""Measures on a GPU what cannot be decided without one, and writes one results file.

    python -m benchmarks.gpu [-o FILE.md] [--only SECTION ...] [--presets large xlarge] [--minutes 30] [--device cpu]
    torchrun --nproc-per-node 8 -m benchmarks.gpu

Takes less than thirty minutes on one GPU. Results are written after each section, as Markdown and as JSON. A section
that fails is reported as failed, and the others still run; the exit code is 1 then. `--device cpu` runs all sections
with a tiny model. docs/gpu.md says which question each row decides.
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

import torch
import torch.distributed as dist
import yaml

from benchmarks.gpu.context import Context, full_extent, tiny_extent
from benchmarks.gpu.device import measure_device
from benchmarks.gpu.feed import measure_feeding
from benchmarks.gpu.loop import measure_deterministic, measure_resume, measure_waits
from benchmarks.gpu.parity import measure_golden, measure_parity
from benchmarks.gpu.presets import measure_presets
from benchmarks.gpu.report import Report, Section
from benchmarks.gpu.stalls import measure_stalls
from nestdata import last_error_line
from nestmodel import prepare_deterministic, preset_path

PRESETS = ("small", "medium", "large", "xlarge")
SECTIONS: dict[str, tuple[Callable[[Context, Section], None], float]] = {
    "device": (measure_device, 0.0),
    "parity": (measure_parity, 0.1),
    "golden": (measure_golden, 0.05),
    "presets": (measure_presets, 0.4),
    "feeding": (measure_feeding, 0.15),
    "waits": (measure_waits, 0.05),
    "deterministic": (measure_deterministic, 0.1),
    "resume": (measure_resume, 0.05),
    "stalls": (measure_stalls, 0.1),
}
"""Functions of the sections, and their shares of the time. A section starts no further measurement after its share."""

_NEED_CORPORA = {"feeding", "waits", "resume", "stalls"}

_GROUP_TIMEOUT = timedelta(minutes=20)  # ranks wait for each other at the end of each section


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the sections and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path("gpu_results.md"))
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=list(PRESETS))
    parser.add_argument("--minutes", type=float, default=30.0, help="time of all sections")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args(argv)
    for library in ("pytorch_lightning", "lightning_fabric", "lightning.pytorch"):
        logging.getLogger(library).setLevel(logging.ERROR)
    # Before CUDA starts: cuBLAS reads its variable once. All sections run with it.
    prepare_deterministic()
    shown = " ".join(sys.argv[1:] if argv is None else argv)
    report = Report(f"python -m benchmarks.gpu {shown}".strip())
    with tempfile.TemporaryDirectory() as directory:
        context = _context(arguments, Path(directory))
        if _NEED_CORPORA.intersection(arguments.only):
            context.prepare_corpora()
        for name in arguments.only:
            run, share = SECTIONS[name]
            context.deadline_s = time.monotonic() + 60 * arguments.minutes * share
            report.sections.append(_run(context, name, run))
            if context.rank == 0:
                report.write(arguments.output)
                print(f"{name}: {report.sections[-1].error or 'done'}", file=sys.stderr, flush=True)
    if context.rank == 0:
        print(report.markdown())
    has_failed = bool(context.from_first_rank(report.has_failed))
    if context.world_size > 1:
        dist.destroy_process_group()
    return int(has_failed)


def _run(context: Context, name: str, run: Callable[[Context, Section], None]) -> Section:
    """Runs a section; an error on any rank ends it at the next case. Returns the results of this rank with all errors.

    An error between the collectives of a training loop leaves the other ranks waiting until the process group times
    out.
    """
    section, started = Section(name), time.perf_counter()
    try:
        run(context, section)
    except Exception as error:
        traceback.print_exc()
        section.error = f"{type(error).__name__}: {last_error_line(error)}"
    context.free_memory()
    section.seconds = time.perf_counter() - started
    errors = context.end_section(section.error)
    if context.world_size > 1:
        section.error = "; ".join(f"rank {rank}: {error}" for rank, error in enumerate(errors) if error) or None
    return section


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
