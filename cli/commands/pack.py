"""`nestdata pack`: writes the audio of corpora as Lhotse Shar."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from nestdata import PackConfig

from ..options import AsJson
from ..output import console, print_json
from ..parsing import Positionals, Unprefixed, option
from ..progress import progress


def pack_command(
    corpora: Annotated[
        tuple[Path, ...], Positionals, option(metavar="CORPUS", help="Corpora from `nestdata prepare`.")
    ],
    *,
    output: Annotated[
        str, option("-o", metavar="DIR|URL", help="Folder to write to: a path, or a URL such as s3://bucket/packed.")
    ],
    config: Annotated[PackConfig, Unprefixed] = PackConfig(),
    jobs: Annotated[int, option("-j", help="Number of processes, each of which writes a shard.")] = 1,
    overwrite: Annotated[bool, option(help="Delete shards of other corpora or settings before writing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write the audio of corpora as Lhotse Shar: large tar files, in the order of the input.

    Each cut becomes a file of its own, at the sampling rate of the corpus. After an interruption, run the same command
    again: complete shards are kept.
    """
    from nestdata import pack_corpora

    with progress("packing shards") as on_progress:
        report = pack_corpora(list(corpora), output, config, overwrite=overwrite, jobs=jobs, on_progress=on_progress)
    if as_json:
        return print_json(asdict(report))
    out = console()
    out.print(
        f"{report.location}: {report.num_cuts} cuts, {report.hours:.2f} h, {report.num_shards} shards, "
        f"{report.num_bytes / 1e9:.3f} GB"
    )
    if report.num_kept_shards:
        out.print(f"  kept from an earlier run: {report.num_kept_shards} shards")
    if report.num_rounded:
        out.print(f"  rounded to 16 bits: {report.num_rounded} cuts")
    if report.num_scaled:
        out.print(f"  made quieter because they exceeded full scale: {report.num_scaled} cuts")
    if report.left_out:
        counts = ", ".join(f"{number} {reason}" for reason, number in report.left_out.items())
        out.print(f"  left out: {counts}; see {report.left_out_file}")
    out.print(f"  prepare a corpus from it: {report.prepare_command}")
