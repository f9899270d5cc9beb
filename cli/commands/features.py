"""`nestmodel features`: writes a directory of encoder features from a model and inputs, by one or several ranks."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Annotated

from nestguard import describe_exit
from nestmodel import ConfigError, ExtractConfig, ExtractError
from nestmodel.training.ranks import OwnRank, end_with_parent, find_own_rank

from ..options import (
    AsJson,
    AttentionContext,
    InputArguments,
    ModelArgument,
    Overwrite,
    chosen_context,
)
from ..output import console, print_json, rejected_text
from ..parsing import Unprefixed, option
from ..program import exit_code_of
from ..progress import progress


def features_command(
    model: ModelArgument,
    inputs: InputArguments,
    *,
    output: Annotated[Path, option("-o", help="Feature directory to write.")],
    config: Annotated[ExtractConfig, Unprefixed] = ExtractConfig(),
    context: AttentionContext = None,
    devices: Annotated[
        int,
        option(
            help="Number of processes on this machine that divide the work, each with a GPU of its own if there are "
            "any. torchrun and srun start them on several machines."
        ),
    ] = 1,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> int:
    """Extract encoder features, one file per utterance."""
    own = find_own_rank(os.environ)
    if devices < 1:
        raise ConfigError(f"devices is {devices}: give at least 1.")
    if devices > 1 and own.num_ranks > 1:
        raise ConfigError(
            f"--devices is {devices}, but a launcher has started {own.num_ranks} processes: leave --devices out."
        )
    extract = partial(_extract, model, inputs, output, config, context, overwrite=overwrite, as_json=as_json)
    if devices > 1:
        return _run_local_ranks(extract, devices)
    extract(own)
    return 0


def _extract(
    model: Path,
    inputs: tuple[str, ...],
    output: Path,
    config: ExtractConfig,
    context: str | None,
    own: OwnRank,
    *,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Does the work of one rank."""
    from nestmodel import extract_features, extract_share, load_network
    from nestmodel.evaluate.encode import device_of_rank

    if own.num_ranks > 1:
        config = replace(config, device=device_of_rank(config.device, own.local_rank))
    network = load_network(model, chosen_context(context))
    if own.rank > 0:
        extract_share(network, inputs, output, config, rank=own.rank, num_ranks=own.num_ranks)
        return
    with progress("utterances") as on_progress:
        report = extract_features(
            network,
            inputs,
            output,
            config,
            overwrite=overwrite,
            model_name=str(model),
            num_ranks=own.num_ranks,
            on_progress=on_progress,
        )
    if as_json:
        return print_json(asdict(report))
    out = console()
    layers = "layer" if len(report.layers) == 1 else "layers"
    out.print(
        f"{report.path}: {report.num_utterances} utterances, {report.hours:.2f} h, {report.num_frames} frames at "
        f"{report.frame_rate_hz:g} Hz, {layers} {','.join(map(str, report.layers))} of dim {report.dim}"
    )
    if report.left_out:
        out.print(f"  {rejected_text(report.left_out, report.path)}")
    out.print(f"  index: {report.path / 'index.jsonl'}")


def _run_local_ranks(extract: Callable[[OwnRank], None], number: int) -> int:
    """Starts ranks on this machine and waits for them; returns the exit code of rank 0 if it has printed an error.

    Raises:
        ExtractError: Another rank has ended early, or rank 0 was killed.
    """
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_run_rank, args=(extract, OwnRank(rank, number, rank))) for rank in range(number)]
    running = {}
    try:
        on_ctrl_c = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: this process ends the ranks
        for rank, process in enumerate(ranks):
            process.start()
            running[rank] = process
        signal.signal(signal.SIGINT, on_ctrl_c)
        while running:
            wait([process.sentinel for process in running.values()])
            for rank, process in [*running.items()]:
                if process.exitcode is not None:
                    del running[rank]
                if process.exitcode and process.exitcode > 0 and rank == 0:
                    return process.exitcode
                if process.exitcode:
                    raise ExtractError(
                        f"rank {rank} of {number} {describe_exit(process.exitcode)}, and the others were ended. The "
                        "same command goes on with the batches that are missing."
                    )
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.join()
    return 0


def _run_rank(extract: Callable[[OwnRank], None], own: OwnRank) -> None:
    """Runs one of the ranks that `_run_local_ranks` starts."""
    end_with_parent(is_on=True)
    os.environ["RANK"] = str(own.rank)  # a mistake that all ranks find is printed by rank 0 only
    num_threads = max(1, len(os.sched_getaffinity(0)) // own.num_ranks)
    os.environ.setdefault("OMP_NUM_THREADS", str(num_threads))
    sys.exit(exit_code_of(lambda: extract(own)))
