"""Measures loading and preparing from tars and from an S3 server, beside local files, MosaicML Streaming and Lhotse.

    python -m benchmarks run remote SPEECH.json NOISE.json [--mosaic-python PATH] [--rounds 5] [--quick]

Prints Markdown; takes about ten minutes. SPEECH.json is a NeMo manifest of FLAC files, which are joined to utterances
of about 10 s. Two S3 servers run on this machine: `range_server.py`, which delays its answers and needs little
CPU time, and SeaweedFS, which needs a multiple of it, behind a proxy that delays every request. Every measurement
is a process of its own with one loader worker. Each round measures each contestant once; ratios are computed within a
round. The CPU time of worker, consumer, server and proxy is listed for an utterance. The rows `one core` restrict
worker and consumer to the first core, and server and proxy to the last one, so that the ratio to local files is that of
the reader's own CPU time. MosaicML Streaming needs an environment with `mosaicml-streaming`, `soundfile` and
torch.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import tarfile
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import soundfile
import torch
from numpy.typing import NDArray

from benchmarks.harness.arguments import benchmark_parser
from benchmarks.harness.children import PEERS, json_of, own_command, run_peer
from benchmarks.harness.report import Report, machine
from benchmarks.harness.rounds import ratios, run_rounds, spread_cells
from benchmarks.peers.steady import NUM_UNCOUNTED
from benchmarks.remote.cpu_time import descendants, on_core, seconds, seconds_of_main_threads
from benchmarks.remote.range_server import range_server
from nestdata import (
    AudioNoiseDataset,
    BatchPlan,
    Corpus,
    NoiseSampler,
    PlanConfig,
    PrepareConfig,
    SpeakerNoiseMixer,
    Storage,
    microbatches,
    prepare_corpus,
)
from tests.remote.proxy import FaultProxy, Faults
from tests.remote.server import s3_server

QUICK = None
UTTERANCE_S = 8.0
"""Prompts are joined until they last at least this long."""

MEMBERS_PER_TAR = 335
DELAYS_MS = (0, 25, 50)
SEAWEED_DELAY_MS = 25
BUCKET = "s3://speech"
BATCH_SECONDS = 160.0
NUM_WORKERS = 1
MIN_BATCHES = 10 * NUM_UNCOUNTED
WITHOUT_SAMPLES = PrepareConfig(report_samples=0)
"""Copying the samples of the report takes the same time for every size of a corpus."""

ONE_CORE = ("local files", "S3 at 25 ms", f"SeaweedFS at {SEAWEED_DELAY_MS} ms")
"""What is also measured with worker and consumer on one core, and server and proxy on another."""

PROCESSES = ("decoding thread", "other threads", "consumer", "server", "proxy")


class Store(NamedTuple):
    """A way to a server."""

    environment: Mapping[str, str]
    """Environment variables of a process that uses it."""

    pids: Mapping[str, int]
    """The processes on the way, by name."""


@dataclass(frozen=True)
class Site:
    """Where the data of the benchmark are."""

    folder: Path
    stores: Mapping[str, Store]

    mosaic_python: str | None

    def corpus(self, name: str) -> Path:
        """Returns the path of a prepared corpus."""
        return self.folder / f"{name}.corpus"


def main() -> int:
    """Runs the measurements and prints them."""
    parser = benchmark_parser(__doc__, rounds=5, quick={"rounds": 1, "share": 1 / 3, "ordered": 20_000})
    parser.add_argument("speech", type=Path, nargs="?")
    parser.add_argument("noise", type=Path, nargs="?")
    parser.add_argument("--mosaic-python", help="Python of an environment with mosaicml-streaming")
    parser.add_argument("--share", type=float, default=1.0, help="share of the speech that is used")
    parser.add_argument("--ordered", type=int, default=200_000, help="utterances in the table of orders; 0: no table")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # for all contestants
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    if arguments.child:
        print(json.dumps(_CHILDREN[arguments.child[0]](*arguments.child[1:])))
        return 0
    if arguments.speech is None or arguments.noise is None:
        parser.error("SPEECH.json and NOISE.json are required")
    with tempfile.TemporaryDirectory() as directory, ExitStack() as servers:
        site = _set_up(arguments, Path(directory), servers)
        rounds = [
            found["all"] for found in run_rounds({"all": lambda: dict(_measure(site))}, arguments.rounds, warm_up=0)
        ]
        orders = _orders(site, arguments.ordered) if arguments.ordered else {}
    _print(arguments, rounds, orders)
    return 0


def _set_up(arguments: argparse.Namespace, folder: Path, servers: ExitStack) -> Site:
    """Writes all forms of the speech, starts the servers, and prepares the corpora."""
    prompts = [json.loads(line) for line in arguments.speech.open()]
    prompts = [Path(arguments.speech.parent, row["audio_filepath"]) for row in prompts]
    prompts = prompts[: round(arguments.share * len(prompts))]
    _write_utterances(prompts, folder / "files")
    _write_tars(sorted((folder / "files" / "audio").iterdir()), folder / "tars")
    _copy_prompts(prompts, folder / "prompts")
    _write_tars(sorted((folder / "prompts" / "audio").iterdir()), folder / "prompt_tars")
    (folder / "served" / "speech").mkdir(parents=True)
    (folder / "served" / "speech" / "tars").symlink_to(folder / "tars")
    site = Site(folder, _start_servers(folder, servers), arguments.mosaic_python)
    _upload(site)
    for name in ("files", "tars"):
        _prepare(site, name, folder / name)
    _child(site, "prepare", f"{BUCKET}/tars", site.corpus("s3"), store="S3 at 0 ms")
    _child(site, "prepare", f"{BUCKET}/tars", site.corpus("seaweed"), store="SeaweedFS")
    prepare_corpus([arguments.noise], site.corpus("noise"), PrepareConfig(pcm=True))
    manifest = folder / "files" / "speech.json"
    run_peer([sys.executable, PEERS / "lhotse_shar.py", "write", folder / "shar", "--manifest", manifest])
    if site.mosaic_python:
        run_peer([site.mosaic_python, PEERS / "mosaic_streaming.py", "write", folder / "mds", "--manifest", manifest])
        _child(site, "upload", folder / "mds", f"{BUCKET}/mds", store="SeaweedFS")
    return site


def _start_servers(folder: Path, servers: ExitStack) -> dict[str, Store]:
    """Returns the ways to the servers, by name."""
    seaweed = servers.enter_context(s3_server(folder / "server"))
    proxy = servers.enter_context(FaultProxy(seaweed.port, Faults(delay_s=SEAWEED_DELAY_MS / 1000)))
    pid = descendants(seaweed.pid)[0]
    stores = {
        "SeaweedFS": Store(seaweed.environment(), {"server": pid}),
        f"SeaweedFS at {SEAWEED_DELAY_MS} ms": Store(
            seaweed.environment(endpoint=proxy.url), {"server": pid, "proxy": proxy.pid}
        ),
    }
    for delay in DELAYS_MS:
        server = servers.enter_context(range_server(folder / "served", delay_ms=delay))
        stores[f"S3 at {delay} ms"] = Store(seaweed.environment(endpoint=server.url), {"server": server.pid})
    return stores


def _write_utterances(prompts: list[Path], folder: Path) -> None:
    """Joins prompts to utterances, and writes them as FLAC files with a NeMo manifest."""
    (folder / "audio").mkdir(parents=True)
    parts: list[NDArray[np.int16]] = []
    rows = list[dict[str, Any]]()
    for prompt in prompts:
        samples, rate = soundfile.read(prompt, dtype="int16")
        if rate != 16000 or samples.ndim != 1:
            continue
        parts.append(samples)
        if sum(map(len, parts)) >= UTTERANCE_S * rate:
            name = f"audio/{len(rows):06d}.flac"
            utterance = np.concatenate(parts)
            soundfile.write(folder / name, utterance, rate)
            rows.append({"audio_filepath": name, "duration": len(utterance) / rate})
            parts = []
    _write_manifest(folder / "speech.json", rows)


def _copy_prompts(prompts: list[Path], folder: Path) -> None:
    (folder / "audio").mkdir(parents=True)
    rows = []
    for number, prompt in enumerate(prompts):
        name = f"audio/{number:06d}.flac"
        shutil.copyfile(prompt, folder / name)
        rows.append({"audio_filepath": name, "duration": soundfile.info(prompt).duration})
    _write_manifest(folder / "speech.json", rows)


def _write_tars(paths: list[Path], folder: Path) -> None:
    """Writes the NeMo tars of a folder of files, in random order, with the header that `tar.add` makes."""
    folder.mkdir()
    rows = [json.loads(line) for line in (paths[0].parents[1] / "speech.json").open()]
    random.Random(0).shuffle(rows)
    for first in range(0, len(rows), MEMBERS_PER_TAR):
        number = first // MEMBERS_PER_TAR
        with tarfile.open(folder / f"audio_{number}.tar", "w") as tar:
            for row in rows[first : first + MEMBERS_PER_TAR]:
                tar.add(paths[0].parents[1] / row["audio_filepath"], arcname=row["audio_filepath"])
                row["shard_id"] = number
    _write_manifest(folder / "tarred_audio_manifest.json", rows)


def _write_manifest(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _upload(site: Site) -> None:
    _child(site, "upload", site.folder / "tars", f"{BUCKET}/tars", store="SeaweedFS")


def _prepare(site: Site, name: str, folder: Path) -> None:
    if (folder / "tarred_audio_manifest.json").exists():
        _prepare_tars(str(folder), str(site.corpus(name)))
    else:
        prepare_corpus([folder / "speech.json"], site.corpus(name))


def _child(site: Site, *arguments: str | Path, store: str | None = None) -> Any:
    """Runs a measurement of this script in a process of its own, with the server of a store."""
    environment = site.stores[store].environment if store else {}
    return json_of(own_command(__file__, "--child", *arguments), **environment)


def _measure(site: Site) -> Iterator[tuple[str, float]]:
    """Yields the name and the result of every measurement of a round."""
    remote = {f"S3 at {delay} ms": "s3" for delay in DELAYS_MS} | {f"SeaweedFS at {SEAWEED_DELAY_MS} ms": "seaweed"}
    local = {"local files": "files", "local tars": "tars"}
    for name, corpus in (local | remote).items():
        yield from _measure_speed(site, name, corpus, noise=True)
    if len(os.sched_getaffinity(0)) > 1:
        for name, corpus in (local | remote).items():
            if name in ONE_CORE:
                yield from _measure_speed(site, name, corpus, noise=True, one_core=True)
    yield from _measure_speed(site, "local tars", "tars")
    yield "resume, local tars", _child(site, "resume", site.corpus("tars"))["seconds"]
    seaweed = f"SeaweedFS at {SEAWEED_DELAY_MS} ms"
    yield f"resume, {seaweed}", _child(site, "resume", site.corpus("seaweed"), store=seaweed)["seconds"]
    yield from _measure_speed(site, seaweed, "seaweed")
    shar: list[str | Path] = [sys.executable, PEERS / "lhotse_shar.py"]
    for what, value in (("speed", "utterances_per_s"), ("resume", "seconds")):
        command = [*shar, what, site.folder / "shar", "--workers", str(NUM_WORKERS), "--min-batches", str(MIN_BATCHES)]
        yield f"{what}, Lhotse Shar", json_of(command)[value]
    if site.mosaic_python:
        yield "speed, MosaicML", _mosaic(site, "speed", site.folder / "mds")["utterances_per_s"]
        yield "resume, MosaicML", _mosaic(site, "resume", site.folder / "mds", num_workers=0)["seconds"]
        first = _mosaic(site, "speed", site.folder / "cache", "--remote", f"{BUCKET}/mds", store=seaweed)
        yield f"speed, MosaicML, {seaweed}, first epoch", first["utterances_per_s"]
    reads = _child(site, "reads", site.folder / "prompts" / "audio", site.folder / "prompt_tars")
    yield from ((f"reads, {name}", seconds) for name, seconds in reads.items())
    for name in ("prompts", "prompt_tars"):
        measured = _child(site, "prepare", site.folder / name, site.folder / "prepared.corpus")
        yield f"prepare, {name}", measured["cuts"] / measured["seconds"]
    megabytes = sum(path.stat().st_size for path in (site.folder / "tars").glob("*.tar")) / 1e6
    measured = _child(site, "prepare", f"{BUCKET}/tars", site.folder / "prepared.corpus", store="SeaweedFS")
    yield "prepare, S3", megabytes / measured["seconds"]
    yield "curl, S3", megabytes / _curl(site)


def _measure_speed(
    site: Site, name: str, corpus: str, *, noise: bool = False, one_core: bool = False
) -> Iterator[tuple[str, float]]:
    """Yields the speed of a corpus, and the CPU time of each process in milliseconds an utterance."""
    store = site.stores.get(name)
    pids = dict(store.pids) if store else {}
    cores = sorted(os.sched_getaffinity(0))
    options = {"noise": str(site.corpus("noise")) if noise else None, "core": cores[0] if one_core else None}
    with on_core(cores[-1], pids.values()) if one_core else nullcontext():
        options_json = json.dumps({**options, "pids": pids})
        measured = _child(site, "speed", site.corpus(corpus), options_json, store=name if store else None)
    full_name = f"{name}{', noise' if noise else ''}{', one core' if one_core else ''}"
    yield f"speed, {full_name}", measured["utterances_per_s"]
    for process, milliseconds in measured["cpu_ms"].items():
        yield f"cpu, {full_name}, {process}", milliseconds


def _mosaic(
    site: Site, *arguments: str | Path, store: str | None = None, num_workers: int = NUM_WORKERS
) -> dict[str, float]:
    assert site.mosaic_python is not None
    environment = dict(site.stores[store].environment) if store else {}
    if store:
        environment["S3_ENDPOINT_URL"] = environment["AWS_ENDPOINT_URL"]
    command = [site.mosaic_python, PEERS / "mosaic_streaming.py", *arguments, "--workers", str(num_workers)]
    command += ["--min-batches", str(MIN_BATCHES)]
    measured: dict[str, float] = json_of(command, **environment)
    return measured


def _curl(site: Site) -> float:
    """Returns the seconds in which curl reads all tars, one after the other over one connection."""
    variables = site.stores["SeaweedFS"].environment
    key = f"{variables['AWS_ACCESS_KEY_ID']}:{variables['AWS_SECRET_ACCESS_KEY']}"
    urls = []
    for path in sorted((site.folder / "tars").glob("*.tar")):
        urls += ["-o", "/dev/null", f"{variables['AWS_ENDPOINT_URL']}/speech/tars/{path.name}"]
    command = ["curl", "--silent", "--fail", "--aws-sigv4", "aws:amz:us-east-1:s3", "--user", key, *urls]
    started = time.perf_counter()
    run_peer(command)
    return time.perf_counter() - started


def _dataset(corpus: Corpus, noise: str | None) -> AudioNoiseDataset:
    plan = BatchPlan.of(corpus, PlanConfig(max_batch_seconds=BATCH_SECONDS, microbatches_per_step=1))
    if noise is None:
        return AudioNoiseDataset(corpus, plan)
    return AudioNoiseDataset(corpus, plan, NoiseSampler(Corpus.open(noise)), SpeakerNoiseMixer())


def _speed(path: str, options: str) -> dict[str, Any]:
    """Reads two epochs or more, and measures while as much is read ahead as is used.

    Args:
        path: The corpus.
        options: JSON: the noise corpus, the core for this process and its worker, and the processes of the server.
    """
    given = json.loads(options)
    if given["core"] is not None:
        os.sched_setaffinity(0, {given["core"]})
    dataset = _dataset(Corpus.open(path), given["noise"])
    num_batches = max(MIN_BATCHES, 2 * dataset.plan.steps_per_epoch)
    indices = microbatches(dataset.plan, num_steps=num_batches)
    number, started, before = 0, 0.0, {}
    for position, batch in enumerate(dataset.loader(indices, num_workers=NUM_WORKERS), 1):
        number += len(batch.sample_id)
        if position == NUM_UNCOUNTED:
            number, started, before = 0, time.perf_counter(), _cpu_s(given["pids"])
        elif position == num_batches - NUM_UNCOUNTED:
            speed, cpu_s = number / (time.perf_counter() - started), _cpu_s(given["pids"])
            cpu_ms = {name: 1e3 * (cpu_s[name] - before[name]) / number for name in cpu_s}
    return {"utterances_per_s": speed, "cpu_ms": cpu_ms}


def _cpu_s(pids: Mapping[str, int]) -> dict[str, float]:
    """Returns the CPU time of this process, of its worker, and of other processes, by name."""
    workers = descendants(os.getpid())
    decoding = seconds_of_main_threads(workers)
    own = {"decoding thread": decoding, "other threads": seconds(workers) - decoding, "consumer": time.process_time()}
    return own | {name: seconds([pid]) for name, pid in pids.items()}


def _resume(path: str) -> dict[str, float]:
    """Opens a corpus and reads the batch in the middle of an epoch; another batch was read before, for the imports."""
    dataset = _dataset(Corpus.open(path), None)
    next(iter(dataset.loader([(0, 0)])))
    started = time.perf_counter()
    dataset = _dataset(Corpus.open(path), None)
    middle = dataset.plan.steps_per_epoch // 2
    indices = microbatches(dataset.plan, start_step=middle, num_steps=dataset.plan.steps_per_epoch - middle)
    next(iter(dataset.loader(indices)))
    return {"seconds": time.perf_counter() - started}


def _reads(files: str, tars: str) -> dict[str, float]:
    """Reads all members of tars in random order, and the same number of files; returns seconds for each read."""
    corpus = Path(tars).with_name("reads.corpus")
    if not corpus.exists():
        _prepare_tars(tars, str(corpus))
    opened = Corpus.open(corpus)
    addresses = [address for index in range(len(opened)) if (address := opened.address(index)) is not None]
    paths = sorted(Path(files).iterdir())
    random.Random(0).shuffle(addresses)
    random.Random(1).shuffle(paths)
    started = time.perf_counter()
    storage = Storage()
    for address in addresses:
        storage.read_range(address.location, address.offset, address.length, size=address.shard_size)
    members_s = (time.perf_counter() - started) / len(addresses)
    started = time.perf_counter()
    for path in paths:
        path.read_bytes()
    return {"random members of tars": members_s, "random files": (time.perf_counter() - started) / len(paths)}


def _prepare_child(source: str, output: str) -> dict[str, float]:
    """Prepares a corpus after a first one of one file, for which all modules are imported."""
    shutil.rmtree(output, ignore_errors=True)
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "audio").mkdir()
        soundfile.write(Path(directory) / "audio" / "a.flac", np.zeros(16000, np.float32), 16000)
        prepare_corpus([Path(directory) / "audio"], Path(directory) / "a.corpus")
    started = time.perf_counter()
    if (Path(source) / "speech.json").exists():
        report = prepare_corpus([Path(source) / "speech.json"], Path(output), WITHOUT_SAMPLES)
    else:
        report = _prepare_tars(source, output)
    return {"seconds": time.perf_counter() - started, "cuts": report.num_cuts}


def _prepare_tars(folder: str, output: str) -> Any:
    return prepare_corpus([f"{folder}/tarred_audio_manifest.json"], Path(output), WITHOUT_SAMPLES)


def _upload_child(folder: str, url: str) -> dict[str, float]:
    started = time.perf_counter()
    storage = Storage()
    for path in sorted(Path(folder).iterdir()):
        storage.write(f"{url}/{path.name}", path)
    return {"seconds": time.perf_counter() - started}


_CHILDREN: dict[str, Any] = {
    "prepare": _prepare_child,
    "reads": _reads,
    "resume": _resume,
    "speed": _speed,
    "upload": _upload_child,
}


class Order(NamedTuple):
    """How uniform a shuffle is, and how long its state takes to restore; see `_uniformity`."""

    correlation: float
    distance: float
    resume_s: float


def _orders(site: Site, num_utterances: int) -> dict[str, Order]:
    """Returns the orders of each contestant for utterances without audio."""
    lengths = np.sort(np.random.default_rng(0).integers(8 * 16000, 12 * 16000, num_utterances))
    plan = _own_plan(lengths)
    stored = np.random.default_rng(1).permutation(num_utterances)  # number in the store, by length
    positions = [_own_positions(plan, epoch, stored) for epoch in range(2)]
    started = time.perf_counter()
    plan = _own_plan(lengths)
    plan.indices(plan.steps_per_epoch // 2, 0)
    orders: dict[str, dict[str, Any]] = {"ours": {"positions": positions, "resume_s": time.perf_counter() - started}}
    number = ["--utterances", str(num_utterances)]
    orders["Lhotse Shar"] = json_of([sys.executable, PEERS / "lhotse_shar.py", "order", site.folder / "order", *number])
    if site.mosaic_python:
        orders["MosaicML"] = json_of([site.mosaic_python, PEERS / "mosaic_streaming.py", "order", *number])
    return {
        f"{name}, {num_utterances:,} utterances": Order(*_uniformity(*order["positions"]), order["resume_s"])
        for name, order in orders.items()
    }


def _own_plan(lengths: NDArray[np.int64]) -> BatchPlan:
    return BatchPlan(lengths, 16000, PlanConfig(max_batch_seconds=BATCH_SECONDS, microbatches_per_step=1))


def _own_positions(plan: BatchPlan, epoch: int, stored: NDArray[np.int64]) -> NDArray[np.int64]:
    first = epoch * plan.steps_per_epoch
    order = stored[np.concatenate([plan.indices(first + step, 0) for step in range(plan.steps_per_epoch)])]
    positions = np.zeros(len(stored), np.int64)
    positions[order] = np.arange(len(order))
    return positions


def _uniformity(first: Any, second: Any) -> tuple[float, float]:
    """Returns how little order is left after shuffling.

    Args:
        first: Position of each utterance in one epoch, in the order in which they are stored.
        second: The same for the next epoch.

    Returns:
        The rank correlation of positions between the epochs, 0 for independent orders; and the median distance, in an
        epoch, of utterances that are stored next to each other, as a share of the epoch: 0.29 for a uniform shuffle.
    """
    correlation = float(np.corrcoef(np.asarray(first), np.asarray(second))[0, 1])
    return correlation, float(np.median(np.abs(np.diff(np.asarray(first))))) / len(first)


_SEAWEED = f"SeaweedFS at {SEAWEED_DELAY_MS} ms"
_RATIOS = [
    ("speed, local tars, noise", "speed, local files, noise"),
    *((f"speed, S3 at {delay} ms, noise", "speed, local files, noise") for delay in DELAYS_MS),
    (f"speed, {_SEAWEED}, noise", "speed, local files, noise"),
    *((f"speed, {name}, noise, one core", "speed, local files, noise, one core") for name in ONE_CORE[1:]),
    ("speed, local tars", "speed, Lhotse Shar"),
    ("speed, local tars", "speed, MosaicML"),
    (f"speed, {_SEAWEED}", f"speed, MosaicML, {_SEAWEED}, first epoch"),
    ("resume, Lhotse Shar", "resume, local tars"),
    ("resume, MosaicML", "resume, local tars"),
    ("reads, random files", "reads, random members of tars"),
    ("prepare, prompt_tars", "prepare, prompts"),
    ("prepare, S3", "curl, S3"),
]
_UNITS = {"speed": "utterances/s", "resume": "s", "reads": "µs a read", "prepare": "members/s", "curl": "MB/s"}


def _print(arguments: argparse.Namespace, rounds: list[dict[str, float]], orders: dict[str, Order]) -> None:
    report = Report(
        "Audio in tars and object stores",
        __file__,
        f"{len(rounds)} rounds, {machine()}.",
        results=arguments.results,
    )
    report.text(f"""Each contestant has one loader worker, and one thread of torch, OpenMP and OpenBLAS in each process;
        ours and MosaicML fetch in further threads. Utterances of {UTTERANCE_S:g} s and more; batches of
        {BATCH_SECONDS:g} s, of MosaicML 16 utterances. Local data are in the page cache. Speeds are those of two epochs
        that follow on each other (one in MosaicML's first), without the first and last {NUM_UNCOUNTED} batches, for
        each contestant.""")
    figures = ("median", "minimum", "maximum")
    rows = []
    for name in (name for name in rounds[0] if not name.startswith("cpu")):
        unit = "MB/s" if name == "prepare, S3" else _UNITS[name.split(",")[0]]
        factor = 1e6 if unit.startswith("µs") else 1.0
        rows.append([name, unit, *spread_cells([factor * measured[name] for measured in rounds], ".4g")])
    report.table(["what", "unit", *figures], rows)
    pairs = [(name, other) for name, other in _RATIOS if name in rounds[0] and other in rounds[0]]
    report.table(["ratio", *figures], ([f"{a} / {b}", *spread_cells(ratios(rounds, a, b))] for a, b in pairs))
    _print_cpu_time(report, rounds)
    if orders:
        _print_orders(report, orders)


def _print_orders(report: Report, orders: dict[str, Order]) -> None:
    report.text("""Order: rank correlation of the positions of utterances in two epochs; median distance, in an epoch,
        of utterances that are stored next to each other, as a share of the epoch (uniform: 0.29); seconds to restore
        the state in the middle of an epoch, without audio.""")
    rows = (
        [name, f"{one.correlation:+.4f}", f"{one.distance:.3f}", f"{one.resume_s:.3g}"] for name, one in orders.items()
    )
    report.table(["order", "rank correlation", "distance", "resume, s"], rows)


def _print_cpu_time(report: Report, rounds: list[dict[str, float]]) -> None:
    report.text("""Median CPU time in milliseconds an utterance. `worker` is the sum of its decoding thread and of its
        other threads, which fetch. The server's and the proxy's is spent outside of the training node.""")
    rows = []
    for name in (name.removeprefix("speed, ") for name in rounds[0] if f"cpu{name[5:]}, consumer" in rounds[0]):
        medians = {
            process: statistics.median(measured[key] for measured in rounds)
            for process in PROCESSES
            if (key := f"cpu, {name}, {process}") in rounds[0]
        }
        cells = [f"{medians[process]:.3f}" if process in medians else "" for process in PROCESSES]
        rows.append([name, f"{medians['decoding thread'] + medians['other threads']:.3f}", *cells])
    report.table(["what", "worker", *PROCESSES], rows)


if __name__ == "__main__":
    sys.exit(main())
