"""Encoder features on disk: a directory with one array per utterance and an index.

    meta.json        model, layers, frame rate, counts
    index.jsonl      one line per utterance, longest first: id, file, path, start, duration, num_frames, labels
    features/        one file per utterance: (enc_frames, dim) for one layer, (layers, enc_frames, dim) for several
    rejected.jsonl   one line per input without features: its location and the reason

The directory is renamed to its target when it is complete. If a process is killed, the earlier content of the target
remains, and the next run goes on with the batches that are missing.

Several ranks divide the batches: rank 0 calls `extract_features`, which prepares the inputs and completes the output,
and the others call `extract_share`. The batches are the same for any number of ranks, and so are the files.
"""

import hashlib
import io
import json
import logging
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nestdata import AudioInputs, Corpus, OutputError, output_directory
from nestdata.output import has_json_kind, is_full_disk, package_version, partial_path
from nestmodel.errors import ExtractError
from nestmodel.evaluate.encode import (
    Model,
    Utterance,
    as_network,
    batches_of,
    encode_batch,
    frame_rate_hz,
    in_eval_mode,
    layer_function,
    resolve_device,
    resolve_layers,
)
from nestmodel.evaluate.evaluation_config import ExtractConfig
from nestmodel.evaluate.extract_ranks import (
    FEATURES,
    RECORDS,
    FeatureFolder,
    FinishedBatch,
    Ranks,
    Start,
    has_records,
    keep_records,
    read_records,
    remove_records,
)
from nestmodel.evaluate.inputs import (
    OnProgress,
    RejectedUtterance,
    RejectLog,
    as_corpus,
    audio_path,
    cut_labels,
    open_inputs,
    open_prepared,
    reject_cut,
)
from nestmodel.formats.weights import digest_of
from nestmodel.nn.network import NestNetwork

_log = logging.getLogger(__name__)

FORMAT_VERSION = 1
_NAMES = re.compile(rf"meta\.json|index\.jsonl|rejected\.jsonl|{FEATURES}")
_MAX_READABLE_CHARACTERS = 80


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtractReport:
    """Summary of the features that `extract_features` wrote."""

    path: Path
    num_utterances: int
    hours: float
    num_frames: int
    layers: list[int]
    dim: int
    frame_rate_hz: float
    left_out: dict[str, int] = field(default_factory=dict)
    """Number of inputs without features by reason; each of them is a line of `rejected.jsonl`."""


def extract_features(
    model: Model,
    inputs: AudioInputs,
    output: str | Path,
    config: ExtractConfig | None = None,
    *,
    overwrite: bool = False,
    model_name: str = "",
    num_ranks: int = 1,
    on_progress: OnProgress | None = None,
) -> ExtractReport:
    """Writes the encoder features of a corpus, or of any inputs that `nestdata prepare` reads.

    Args:
        model: A network, whose encoder is used in eval mode and moved to the device; or the path of one.
        inputs: A `Corpus`, or the path of one at the sampling rate of the model; or anything else that `prepare_corpus`
            accepts, such as a file, a folder or a `CutSet`, which is prepared with every file header read.
        output: Directory to create.
        config: Layers and storage of the features.
        overwrite: Whether an existing directory of features is replaced. It is replaced in one step at the end.
        model_name: Name of the model in `meta.json`.
        num_ranks: Number of processes that divide the work: this one, and those that call `extract_share` with ranks
            from 1. The features do not depend on it.
        on_progress: Called with the number of finished utterances and their total; other ranks count as being as far
            as this one.

    Raises:
        ConfigError: The layers or the device do not exist, or the corpus has another sampling rate than the model.
        ExtractError: No utterance has features, a batch does not fit into memory, or another rank has ended.
        OutputError: `output` exists and may not be replaced, or cannot be written.
        NestError: The model or an input cannot be read.

    If the call fails or is interrupted, finished batches are left in `OUTPUT.partial`: the next call with the same
    model, inputs, settings and target goes on from there, with any number of ranks.
    """
    model, config = as_network(model), config or ExtractConfig()
    output = Path(output).resolve()
    resolve_layers(config.layers, model.encoder.num_layers)
    device = resolve_device(config.device)
    rate, rejects = model.config.features.sampling_rate, RejectLog()
    inputs = as_corpus(inputs, rate)
    with output_directory(
        output,
        kind="a directory of features",
        names=_NAMES,
        overwrite=overwrite,
        may_replace=partial(has_json_kind, file_name="meta.json", kind="features"),
        resumable=(RECORDS, FEATURES),
    ) as directory:
        with (
            _keeps_finished_batches(directory),
            Ranks(directory, 0, num_ranks) as ranks,
            open_inputs(inputs, rate, directory, rejects.add, on_progress) as corpus,
        ):
            settings = _settings(model, corpus, config, device)
            start = ranks.start(settings, keep_records(directory, settings))
            _write_share(model, corpus, directory, config, start, ranks, on_progress)
            ranks.finish()
            report = _merge(model, corpus, directory, config, ranks.wait_for_others(start), rejects)
            meta = _meta(corpus, report, config, model_name)
            (directory / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
            rejects.write(directory / "rejected.jsonl")
        remove_records(directory)
    return replace(report, path=output)


def extract_share(
    model: Model,
    inputs: AudioInputs,
    output: str | Path,
    config: ExtractConfig | None = None,
    *,
    rank: int,
    num_ranks: int,
) -> None:
    """Writes the share of one rank of the features that rank 0 writes by `extract_features`.

    The ranks see the same directory of `output`. This one waits until rank 0 has prepared the inputs.

    Args:
        model: As for `extract_features`.
        inputs: As for `extract_features`; only a `Corpus` is read here.
        output: As for `extract_features`.
        config: As for `extract_features`; only the device may differ, but not its type.
        rank: Number of this rank, from 1.
        num_ranks: Number of all ranks.

    Raises:
        ConfigError: The layers or the device do not exist.
        ExtractError: A batch does not fit into memory, or rank 0 has ended, or has another model, inputs or settings.
        NestError: The model or the corpus cannot be read.
    """
    model, config = as_network(model), config or ExtractConfig()
    directory = partial_path(Path(output).resolve())
    resolve_layers(config.layers, model.encoder.num_layers)
    device = resolve_device(config.device)
    inputs = as_corpus(inputs, model.config.features.sampling_rate)
    with Ranks(directory, rank, num_ranks) as ranks:
        start = ranks.wait_for_start()
        corpus = inputs if isinstance(inputs, Corpus) else open_prepared(directory)
        settings = _settings(model, corpus, config, device)
        if settings != start.settings:
            other = ", ".join(name for name in settings if settings[name] != start.settings.get(name))
            raise ExtractError(
                f"rank {rank} of {num_ranks} has another {other} than rank 0. Start all ranks with the same command, "
                "with a model file and inputs that do not change meanwhile."
            )
        try:
            _write_share(model, corpus, directory, config, start, ranks, None)
        except OSError as error:
            if is_full_disk(error):
                raise OutputError(f"{output}: cannot be written ({error.strerror}). Make space on its disk.") from error
            raise
        ranks.finish()


@contextmanager
def _keeps_finished_batches(directory: Path) -> Iterator[None]:
    """If the block raises, logs that finished batches are kept; without any, removes their folders."""
    try:
        yield
    except BaseException:
        if has_records(directory):
            _log.warning(
                "finished batches are kept in %s. The same call goes on from there; remove the directory to start over",
                directory,
            )
        else:
            for name in (RECORDS, FEATURES):
                shutil.rmtree(directory / name, ignore_errors=True)
        raise


def _settings(model: NestNetwork, corpus: Corpus, config: ExtractConfig, device: torch.device) -> dict[str, Any]:
    """Returns all that a feature file and its line of the index depend on, as plain values."""
    with (corpus.path / "cuts.jsonl").open("rb") as cuts:
        content = hashlib.file_digest(cuts, "blake2b").hexdigest()
    return {
        "version": package_version(),
        "model": digest_of(model),
        "inputs": [corpus.fingerprint, content],
        "layers": resolve_layers(config.layers, model.encoder.num_layers),
        "dtype": config.dtype,
        "max_batch_seconds": config.max_batch_seconds,
        "window_seconds": config.window_seconds,
        "device": device.type,
    }


def file_stem(cut_id: str) -> str:
    """Returns a unique file name for any cut id: the readable characters of the id and a hash of it."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "_", cut_id).strip("._-")[-_MAX_READABLE_CHARACTERS:].lstrip("._-")
    digest = hashlib.blake2b(cut_id.encode("utf-8", "backslashreplace"), digest_size=10).hexdigest()
    return f"{readable}-{digest}" if readable else digest


def _write_share(
    model: NestNetwork,
    corpus: Corpus,
    directory: Path,
    config: ExtractConfig,
    start: Start,
    ranks: Ranks,
    on_progress: OnProgress | None,
) -> None:
    """Computes every n-th of the missing batches for n ranks, and writes a record of each."""
    compute, device = layer_function(model, config.layers, config.window_seconds), resolve_device(config.device)
    kept = set(start.kept)
    numbered = enumerate(batches_of(corpus, config.max_batch_seconds))
    missing = ((number, batch) for number, batch in numbered if number not in kept)
    share = islice(missing, start.names.index(ranks.name), None, len(start.names))
    with (
        ranks.records.open("w", encoding="utf-8") as records,
        FeatureFolder(directory / FEATURES) as folder,
        in_eval_mode(model, device),
    ):
        for number, batch in share:
            ranks.check()
            rejected: list[RejectedUtterance] = []
            utterances = encode_batch(corpus, batch, compute, device, rejected.append)
            written = list(_write_files(utterances, corpus, folder, config, rejected))
            for reject in rejected:  # an interrupted run may have written its features
                folder.remove(f"{file_stem(reject.cut_id)}.npy")
            folder.flush()
            record = FinishedBatch(
                number=number,
                rows=[line for _, line, _ in written],
                sizes=[size for _, _, size in written],
                num_samples=sum(corpus.num_samples_of(row) for row, _, _ in written),
                rejected=rejected,
            )
            records.write(record.to_line())
            records.flush()
            if on_progress:
                on_progress(len(corpus) - batch[-1], len(corpus))


def _write_files(
    utterances: Iterable[Utterance],
    corpus: Corpus,
    folder: FeatureFolder,
    config: ExtractConfig,
    rejected: list[RejectedUtterance],
) -> Iterator[tuple[int, dict[str, Any], int]]:
    """Writes features; yields the index of each utterance in the corpus, its line of `index.jsonl`, and its size."""
    for utterance in utterances:
        with np.errstate(over="ignore"):  # the next lines check for overflow
            values = utterance.values.astype(config.dtype)
        if not np.isfinite(values).all():
            detail = f"values up to {np.abs(utterance.values).max():.3g} do not fit into {config.dtype}"
            rejected.append(reject_cut(utterance.line, "overflow", detail))
            continue
        name, content = (
            f"{file_stem(utterance.line['id'])}.npy",
            _encode_file(values[0] if len(values) == 1 else values),
        )
        folder.write(name, content)
        yield utterance.row, _index_row(utterance, f"{FEATURES}/{name}", corpus), len(content)


def _merge(
    model: NestNetwork, corpus: Corpus, directory: Path, config: ExtractConfig, records: list[Path], rejects: RejectLog
) -> ExtractReport:
    """Writes the index from the records of all ranks, and adds their rejects to the rejects of the inputs."""
    num_utterances = num_frames = num_samples = 0
    with (directory / "index.jsonl").open("w", encoding="utf-8") as index:
        for record in read_records(records):
            index.writelines(json.dumps(row) + "\n" for row in record.rows)
            for reject in record.rejected:
                rejects.add(reject)
            num_utterances += len(record.rows)
            num_frames += sum(row["num_frames"] for row in record.rows)
            num_samples += record.num_samples
    if not num_utterances:
        shutil.rmtree(directory / RECORDS, ignore_errors=True)  # nothing is kept for another run
        _, cut_id, reason, detail = rejects.last
        raise ExtractError(
            f"none of {len(corpus)} utterances has features; for example {cut_id!r}: {reason}, {detail.rstrip('.')}. "
            "Check the audio."
        )
    return ExtractReport(
        path=directory,
        num_utterances=num_utterances,
        hours=num_samples / corpus.sampling_rate / 3600,
        num_frames=num_frames,
        layers=resolve_layers(config.layers, model.encoder.num_layers),
        dim=model.encoder.dim,
        frame_rate_hz=frame_rate_hz(model),
        left_out=rejects.counts,
    )


def _index_row(utterance: Utterance, file: str, corpus: Corpus) -> dict[str, Any]:
    line, (num_layers, num_frames, dim) = utterance.line, utterance.values.shape
    path = audio_path(line)
    return {
        "id": line["id"],
        "file": file,
        # A file inside the corpus was unpacked from an input, and is removed together with a temporary corpus.
        "path": None if path is None or Path(path).is_relative_to(corpus.path) else path,
        "start": line["start"],
        "duration": line["duration"],
        "num_frames": num_frames,
        "num_layers": num_layers,
        "dim": dim,
        "labels": cut_labels(line),
    }


def _meta(corpus: Corpus, report: ExtractReport, config: ExtractConfig, model_name: str) -> dict[str, Any]:
    return {
        "format_version": FORMAT_VERSION,
        "kind": "features",
        "model": model_name,
        **{key: value for key, value in asdict(report).items() if key != "path"},
        "dtype": config.dtype,
        "sampling_rate": corpus.sampling_rate,
        "inputs": corpus.meta["manifests"],
        "corpus_fingerprint": corpus.fingerprint,
    }


def _encode_file(values: NDArray[Any]) -> bytes:
    # The array is serialised in memory: an error of np.save on a file does not say that the disk is full.
    buffer = io.BytesIO()
    np.save(buffer, np.ascontiguousarray(values), allow_pickle=False)
    return buffer.getvalue()
