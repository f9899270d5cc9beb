"""Measures loading from tars and an S3 server with latency, beside local files, MosaicML Streaming and Lhotse Shar.

    python -m benchmarks run remote SPEECH.json NOISE.json [--mosaic-python PATH] [--rounds 5] [--quick]

Prints Markdown. SPEECH.json is a NeMo manifest of FLAC files, which are joined to utterances of about 10 s. The S3
server is `range_server.py` on this machine, which delays its answers and needs little CPU time. Every measurement is a
process of its own with one loader worker. Each round measures each contestant once; ratios are computed within a
round. MosaicML Streaming needs an environment with `mosaicml-streaming`, `soundfile` and torch.
"""

import argparse
import json
import os
import random
import sys
import tarfile
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from numpy.typing import NDArray

from benchmarks.harness.arguments import benchmark_parser
from benchmarks.harness.children import PEERS, json_of, own_command, run_peer
from benchmarks.harness.report import Report, machine
from benchmarks.harness.rounds import ratios, run_rounds, spread_cells
from benchmarks.peers.steady import NUM_UNCOUNTED, utterances_per_s
from benchmarks.remote.range_server import range_server
from nestdata import (
    AudioNoiseDataset,
    BatchPlan,
    Corpus,
    NoiseSampler,
    PlanConfig,
    PrepareConfig,
    SpeakerNoiseMixer,
    microbatches,
    prepare_corpus,
)

QUICK = ["{speech}", "{noise}", "--quick"]
RATE = 16000
UTTERANCE_S = 8.0
"""Prompts are joined until they last at least this long."""

MEMBERS_PER_TAR = 335
DELAYS_MS = (0, 25, 50)
BATCH_SECONDS = 160.0
MIN_BATCHES = 10 * NUM_UNCOUNTED
PEER_OPTIONS = ["--workers", "1", "--min-batches", str(MIN_BATCHES)]
RATIOS = (
    ("local tars, noise", "local files, noise"),
    *((f"S3 at {delay} ms, noise", "local files, noise") for delay in DELAYS_MS),
    ("local tars", "Lhotse Shar"),
    ("local tars", "MosaicML"),
    ("S3 at 25 ms", "MosaicML, S3 at 25 ms, first epoch"),
    ("resume, Lhotse Shar", "resume, local tars"),
    ("resume, MosaicML", "resume, local tars"),
)


def main() -> int:
    """Runs the measurements and prints them."""
    parser = benchmark_parser(__doc__, rounds=5, quick={"rounds": 1})
    parser.add_argument("speech", type=Path, nargs="?")
    parser.add_argument("noise", type=Path, nargs="?")
    parser.add_argument("--mosaic-python", help="Python of an environment with mosaicml-streaming")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # for all contestants
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    if arguments.child:
        what, *rest = arguments.child
        children: dict[str, Callable[..., Any]] = {"prepare": prepare_tars, "speed": speed, "resume": resume}
        print(json.dumps(children[what](*rest)))
        return 0
    if arguments.speech is None or arguments.noise is None:
        parser.error("SPEECH.json and NOISE.json are required")
    with tempfile.TemporaryDirectory() as directory, ExitStack() as servers:
        rounds = run_rounds(set_up(arguments, Path(directory), servers), arguments.rounds, warm_up=0)
    report = Report(
        "Audio in tars and object stores", __file__, f"{len(rounds)} rounds, {machine()}.", results=arguments.results
    )
    report.text(f"""Each contestant has one loader worker, and one thread of torch, OpenMP and OpenBLAS in each process;
        ours and MosaicML fetch in further threads. Utterances of {UTTERANCE_S:g} s and more; batches of
        {BATCH_SECONDS:g} s, of MosaicML 16 utterances. Local data are in the page cache. Speeds are measured over two
        consecutive epochs (one in MosaicML's first), without the first and last {NUM_UNCOUNTED} batches, for each
        contestant.""")
    figures = ("median", "minimum", "maximum")
    rows = (
        [
            name,
            "s" if name.startswith("resume") else "utterances/s",
            *spread_cells([one[name] for one in rounds], ".4g"),
        ]
        for name in rounds[0]
    )
    report.table(["what", "unit", *figures], rows)
    pairs = [pair for pair in RATIOS if set(pair) <= rounds[0].keys()]
    report.table(["ratio", *figures], ([f"{a} / {b}", *spread_cells(ratios(rounds, a, b))] for a, b in pairs))
    return 0


def set_up(arguments: argparse.Namespace, folder: Path, servers: ExitStack) -> dict[str, partial[float]]:
    """Writes all forms of the speech, starts the servers and prepares the corpora; returns the contestants."""
    manifest = write_utterances(arguments.speech, folder / "files")
    served = folder / "served" / "speech"
    write_tars(manifest, served / "tars")
    prepare_corpus([manifest], folder / "files.corpus")
    prepare_tars(served / "tars", folder / "tars.corpus")
    prepare_corpus([arguments.noise], folder / "noise.corpus", PrepareConfig(pcm=True))
    stores = {
        f"S3 at {delay} ms": {
            "AWS_ENDPOINT_URL": servers.enter_context(range_server(folder / "served", delay_ms=delay)).url,
            "S3_ENDPOINT_URL": "",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }
        for delay in DELAYS_MS
    }
    s3 = stores["S3 at 25 ms"]
    child("prepare", "s3://speech/tars", folder / "s3.corpus", **stores["S3 at 0 ms"])
    noise = folder / "noise.corpus"
    found = {
        "local files, noise": partial(child, "speed", folder / "files.corpus", noise),
        "local tars, noise": partial(child, "speed", folder / "tars.corpus", noise),
        **{
            f"{name}, noise": partial(child, "speed", folder / "s3.corpus", noise, **store)
            for name, store in stores.items()
        },
        "local tars": partial(child, "speed", folder / "tars.corpus"),
        "S3 at 25 ms": partial(child, "speed", folder / "s3.corpus", **s3),
        "resume, local tars": partial(child, "resume", folder / "tars.corpus"),
        "resume, S3 at 25 ms": partial(child, "resume", folder / "s3.corpus", **s3),
    }
    shar: list[str | Path] = [sys.executable, PEERS / "lhotse_shar.py"]
    run_peer([*shar, "write", folder / "shar", "--manifest", manifest])
    found["Lhotse Shar"] = partial(peer, [*shar, "speed", folder / "shar"])
    found["resume, Lhotse Shar"] = partial(peer, [*shar, "resume", folder / "shar"])
    if arguments.mosaic_python:
        mosaic = [arguments.mosaic_python, PEERS / "mosaic_streaming.py"]
        run_peer([*mosaic, "write", served / "mds", "--manifest", manifest])
        found["MosaicML"] = partial(peer, [*mosaic, "speed", served / "mds"])
        found["resume, MosaicML"] = partial(peer, [*mosaic, "resume", served / "mds"])
        first = [*mosaic, "speed", folder / "cache", "--remote", "s3://speech/mds"]
        variables = {**s3, "S3_ENDPOINT_URL": s3["AWS_ENDPOINT_URL"]}
        found["MosaicML, S3 at 25 ms, first epoch"] = partial(peer, first, **variables)
    return found


def child(*arguments: str | Path, **variables: str) -> float:
    """Runs a function of this script in a process of its own, and returns what it measured."""
    return float(json_of(own_command(__file__, "--child", *arguments), **variables))


def peer(command: list[str | Path], **variables: str) -> float:
    """Returns what a script of another project measured."""
    return float(json_of([*command, *PEER_OPTIONS], **variables))


def write_utterances(speech: Path, folder: Path) -> Path:
    """Joins prompts to utterances, and writes them as FLAC files; returns their NeMo manifest."""
    (folder / "audio").mkdir(parents=True)
    parts: list[NDArray[np.int16]] = []
    rows = list[dict[str, Any]]()
    for line in speech.read_text(encoding="utf-8").splitlines():
        samples, rate = soundfile.read(speech.parent / json.loads(line)["audio_filepath"], dtype="int16")
        if rate != RATE or samples.ndim != 1:
            continue
        parts.append(samples)
        if sum(map(len, parts)) >= UTTERANCE_S * RATE:
            name = f"audio/{len(rows):06d}.flac"
            utterance = np.concatenate(parts)
            soundfile.write(folder / name, utterance, RATE)
            rows.append({"audio_filepath": name, "duration": len(utterance) / RATE})
            parts = []
    write_manifest(folder / "speech.json", rows)
    return folder / "speech.json"


def write_tars(manifest: Path, folder: Path) -> None:
    """Writes the files of a manifest as NeMo tars, in random order."""
    folder.mkdir(parents=True)
    rows = [json.loads(line) for line in manifest.read_text(encoding="utf-8").splitlines()]
    random.Random(0).shuffle(rows)
    for number in range(-(-len(rows) // MEMBERS_PER_TAR)):
        with tarfile.open(folder / f"audio_{number}.tar", "w") as tar:
            for row in rows[number * MEMBERS_PER_TAR : (number + 1) * MEMBERS_PER_TAR]:
                tar.add(manifest.parent / row["audio_filepath"], arcname=row["audio_filepath"])
                row["shard_id"] = number
    write_manifest(folder / "tarred_audio_manifest.json", rows)


def write_manifest(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes NeMo lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def prepare_tars(folder: str | Path, output: str | Path) -> int:
    """Prepares the NeMo tars of a folder or a bucket; returns the number of cuts."""
    return prepare_corpus([f"{folder}/tarred_audio_manifest.json"], Path(output)).num_cuts


def dataset_of(corpus: str, noise: str | None = None) -> AudioNoiseDataset:
    """Returns the batches of a corpus."""
    speech = Corpus.open(corpus)
    plan = BatchPlan.of(speech, PlanConfig(max_batch_seconds=BATCH_SECONDS, microbatches_per_step=1))
    if noise is None:
        return AudioNoiseDataset(speech, plan)
    return AudioNoiseDataset(speech, plan, NoiseSampler(Corpus.open(noise)), SpeakerNoiseMixer())


def speed(corpus: str, noise: str | None = None) -> float:
    """Reads two epochs or more; returns the utterances per second while as much is read ahead as is used."""
    dataset = dataset_of(corpus, noise)
    num_batches = max(MIN_BATCHES, 2 * dataset.plan.steps_per_epoch)
    loader = dataset.loader(microbatches(dataset.plan, num_steps=num_batches), num_workers=1)
    return utterances_per_s((len(batch.sample_id) for batch in loader), num_batches)


def resume(corpus: str) -> float:
    """Returns the seconds to open a corpus and read the batch in the middle of an epoch, after imports."""
    next(iter(dataset_of(corpus).loader([(0, 0)])))
    started = time.perf_counter()
    dataset = dataset_of(corpus)
    middle = dataset.plan.steps_per_epoch // 2
    indices = microbatches(dataset.plan, start_step=middle, num_steps=dataset.plan.steps_per_epoch - middle)
    next(iter(dataset.loader(indices)))
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
