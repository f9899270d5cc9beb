"""Encoder features on disk: a directory with one array per utterance and an index.

    meta.json        model, layers, frame rate, counts
    index.jsonl      one line per utterance, longest first: id, file, path, start, duration, num_frames, labels
    features/        one file per utterance: (enc_frames, dim) for one layer, (layers, enc_frames, dim) for several
    rejected.jsonl   one line per input without features: its location and the reason

The directory is renamed to its target when it is complete. If the process is killed, the earlier content of
the target remains.
"""

import hashlib
import io
import json
import re
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestdata import AudioInputs, Corpus, output_directory
from nestdata.output import has_json_kind
from nestmodel.errors import ExtractError
from nestmodel.evaluate.config import ExtractConfig
from nestmodel.evaluate.encode import (
    Model,
    Utterance,
    as_network,
    frame_rate_hz,
    iterate_features,
    resolve_device,
    resolve_layers,
)
from nestmodel.evaluate.inputs import OnProgress, RejectedUtterance, RejectLog, audio_path, cut_labels, open_inputs
from nestmodel.nn.network import NestNetwork

FORMAT_VERSION = 1
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
    on_progress: OnProgress | None = None,
) -> ExtractReport:
    """Writes the encoder features of a corpus, or of any inputs that `nestdata prepare` reads.

    Args:
        model: A network, whose encoder is used in eval mode and moved to the device; or the path of one.
        inputs: A `Corpus`; or anything else that `prepare_corpus` accepts, such as a file, a folder or a `CutSet`,
            which is prepared with every file header read.
        output: Directory to create.
        config: Layers and storage of the features.
        overwrite: Whether an existing directory of features is replaced. It is replaced in one step at the end.
        model_name: Name of the model in `meta.json`.
        on_progress: Called with the number of finished utterances and their total.

    Raises:
        ConfigError: The layers or the device do not exist, or the corpus has another sampling rate than the model.
        ExtractError: No utterance has features, or a batch does not fit into memory.
        OutputError: `output` exists and may not be replaced, or cannot be written. Nothing is left behind.
        NestError: The model or an input cannot be read.
    """
    model, config = as_network(model), config or ExtractConfig()
    output = Path(output).resolve()
    resolve_layers(config.layers, model.config.encoder.num_layers)
    resolve_device(config.device)
    rate, rejects = model.config.features.sampling_rate, RejectLog()
    with (
        output_directory(
            output, kind="a directory of features", overwrite=overwrite, may_replace=_is_feature_directory
        ) as directory,
        open_inputs(inputs, rate, directory, rejects.add, on_progress) as corpus,
    ):
        report = _write_features(model, corpus, directory, config, rejects, on_progress)
        meta = _meta(corpus, report, config, model_name)
        (directory / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
        rejects.write(directory / "rejected.jsonl")
    return replace(report, path=output)


def _is_feature_directory(directory: Path) -> bool:
    return has_json_kind(directory, "meta.json", "features")


def file_stem(cut_id: str) -> str:
    """Returns a unique file name for any cut id: the readable characters of the id and a hash of it."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "_", cut_id).strip("._-")[-_MAX_READABLE_CHARACTERS:].lstrip("._-")
    digest = hashlib.blake2b(cut_id.encode("utf-8", "backslashreplace"), digest_size=10).hexdigest()
    return f"{readable}-{digest}" if readable else digest


def _write_features(
    model: NestNetwork,
    corpus: Corpus,
    directory: Path,
    config: ExtractConfig,
    rejects: RejectLog,
    on_progress: OnProgress | None,
) -> ExtractReport:
    (directory / "features").mkdir()
    num_utterances = num_frames = num_samples = 0
    with (directory / "index.jsonl").open("w", encoding="utf-8") as index:
        utterances = iterate_features(
            model, corpus, config.layers, config.max_batch_seconds, config.device, on_reject=rejects.add
        )
        for utterance in utterances:
            cut_id = utterance.line["id"]
            with np.errstate(over="ignore"):  # the next lines check for overflow
                values = utterance.values.astype(config.dtype)
            if not np.isfinite(values).all():
                detail = f"values up to {np.abs(utterance.values).max():.3g} do not fit into {config.dtype}"
                rejects.add(RejectedUtterance(audio_path(utterance.line) or "", cut_id, "overflow", detail))
                continue
            file = f"features/{file_stem(cut_id)}.npy"
            (directory / file).write_bytes(_encode_file(values[0] if len(values) == 1 else values))
            index.write(json.dumps(_index_row(utterance, file, corpus)) + "\n")
            num_utterances += 1
            num_frames += values.shape[1]
            num_samples += corpus.num_samples_of(utterance.row)
            if on_progress:
                on_progress(len(corpus) - utterance.row, len(corpus))
    if not num_utterances:
        _, cut_id, reason, detail = rejects.last
        raise ExtractError(
            f"none of {len(corpus)} utterances has features; for example {cut_id!r}: {reason}, {detail}. "
            "Check the audio."
        )
    return ExtractReport(
        path=directory,
        num_utterances=num_utterances,
        hours=num_samples / corpus.sampling_rate / 3600,
        num_frames=num_frames,
        layers=resolve_layers(config.layers, model.config.encoder.num_layers),
        dim=model.config.encoder.d_model,
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
