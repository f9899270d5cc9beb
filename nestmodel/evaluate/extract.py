"""Encoder features on disk: a directory with one array per utterance and an index.

    meta.json        model, layers, frame rate, counts
    index.jsonl      one line per utterance, longest first: id, file, path, start, duration, num_frames, labels
    features/        one file per utterance: (enc_frames, dim) for one layer, (layers, enc_frames, dim) for several
    rejected.jsonl   every input that was left out: where it stood, and why

A killed run leaves what was at the target before, or the new features, never a mixture.
"""

import hashlib
import io
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TextIO

import numpy as np
from numpy.typing import NDArray

from nestdata import Corpus, has_json_kind, output_directory
from nestmodel.errors import ConfigError, ExtractError
from nestmodel.evaluate.encode import (
    Layers,
    OnProgress,
    RejectedUtterance,
    Utterance,
    check_batch_seconds,
    frame_rate_hz,
    iterate_features,
    labels_of,
    open_inputs,
    path_of,
    resolve_device,
    resolve_layers,
)
from nestmodel.training.module import NestModel

FileFormat = Literal["npy", "safetensors"]
FeatureType = Literal["float32", "float16"]

FORMAT_VERSION = 1
_MOST_OF_A_NAME = 80


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtractConfig:
    """What is kept of the encoder, and how it is stored."""

    layers: Layers = "last"
    """Which outputs are kept."""

    format: FileFormat = "npy"
    """Kind of the files."""

    dtype: FeatureType = "float32"
    """Precision of the files; the encoder computes in float32."""

    max_batch_seconds: float = 120.0
    """Audio in a batch, padding included. An utterance that is longer makes a batch of its own."""

    device: str = "auto"
    """Where the encoder runs, such as `cpu` or `cuda:1`; `auto` takes a GPU where there is one."""

    def __post_init__(self) -> None:
        check_batch_seconds(self.max_batch_seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtractReport:
    """What a run of `extract_features` wrote and left out."""

    path: Path
    num_utterances: int
    hours: float
    num_frames: int
    layers: list[int]
    dim: int
    frame_rate_hz: float
    left_out: dict[str, int] = field(default_factory=dict)
    """Number of inputs without features by reason; each one is a line of `rejected.jsonl`."""


def extract_features(
    model: NestModel,
    inputs: Corpus | Sequence[str | Path],
    output: str | Path,
    config: ExtractConfig | None = None,
    *,
    overwrite: bool = False,
    model_name: str = "",
    on_progress: OnProgress | None = None,
) -> ExtractReport:
    """Writes the encoder features of a corpus, or of whatever `nestdata prepare` reads.

    Args:
        model: Its encoder is used, in eval mode, and moved to the device.
        inputs: A corpus; or manifests, folders and corpora, which are prepared with the header of every file read.
        output: The directory to make.
        config: Which layers, and how they are stored.
        overwrite: Whether an existing directory of features is replaced, which happens at the end and at once.
        model_name: What `meta.json` calls the model.
        on_progress: Called with the number of utterances done and their total.

    Raises:
        ConfigError: The layers or the device do not exist, the corpus has another sampling rate than the model.
        ExtractError: No utterance gave features, or a batch does not fit into memory.
        OutputError: The target exists, cannot be written, or is being written by another run.
        NestDataError: An input cannot be read. Nothing is left behind.
    """
    config = config or ExtractConfig()
    output = Path(output).resolve()
    resolve_layers(config.layers, model.config.encoder.num_layers)
    resolve_device(config.device)
    _check_format(config.format)
    with output_directory(
        output, kind="a directory of features", overwrite=overwrite, may_replace=_is_feature_directory
    ) as partial:
        left_out: Counter[str] = Counter()
        with (
            (partial / "rejected.jsonl").open("w", encoding="utf-8") as rejected,
            open_inputs(inputs, model, partial, on_progress) as corpus,
        ):
            if not isinstance(inputs, Corpus):
                rejected.write((corpus.path / "rejected.jsonl").read_text(encoding="utf-8"))
                left_out.update(corpus.meta["rejected"])
            report = _write_all(model, corpus, partial, config, rejected, left_out, on_progress)
        meta = _meta(corpus, report, config, model_name)
        (partial / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
    return replace(report, path=output)


def _is_feature_directory(directory: Path) -> bool:
    return has_json_kind(directory, "meta.json", "features")


def file_stem(cut_id: str) -> str:
    """Returns a name for the file of any id: what can be read of it, and a hash, so that no two are alike."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "_", cut_id).strip("._-")[-_MOST_OF_A_NAME:].lstrip("._-")
    digest = hashlib.blake2b(cut_id.encode("utf-8", "backslashreplace"), digest_size=10).hexdigest()
    return f"{readable}-{digest}" if readable else digest


def _write_all(
    model: NestModel,
    corpus: Corpus,
    directory: Path,
    config: ExtractConfig,
    rejected: TextIO,
    left_out: Counter[str],
    on_progress: OnProgress | None,
) -> ExtractReport:
    first: RejectedUtterance | None = None

    def leave_out(found: RejectedUtterance) -> None:
        nonlocal first
        first = first or found
        left_out[found.reason] += 1
        rejected.write(json.dumps(found._asdict()) + "\n")

    (directory / "features").mkdir()
    num_utterances = num_frames = num_samples = 0
    with (directory / "index.jsonl").open("w", encoding="utf-8") as index:
        found = iterate_features(
            model, corpus, config.layers, config.max_batch_seconds, config.device, on_reject=leave_out
        )
        for utterance in found:
            with np.errstate(over="ignore"):  # looked for below
                values = utterance.values.astype(config.dtype)
            if not np.isfinite(values).all():
                detail = f"values up to {np.abs(utterance.values).max():.3g} do not fit into {config.dtype}"
                leave_out(RejectedUtterance(path_of(utterance.line) or "", utterance.line["id"], "overflow", detail))
                continue
            file = f"features/{file_stem(utterance.line['id'])}.{config.format}"
            (directory / file).write_bytes(_encoded(values[0] if len(values) == 1 else values, config.format))
            index.write(json.dumps(_index_row(utterance, file, corpus)) + "\n")
            num_utterances += 1
            num_frames += values.shape[1]
            num_samples += corpus.num_samples_of(utterance.row)
            if on_progress:
                on_progress(len(corpus) - utterance.row, len(corpus))
    if not num_utterances:
        assert first is not None
        raise ExtractError(
            f"none of {len(corpus)} utterances gave features; the first: {first.cut_id!r}: {first.reason}, "
            f"{first.detail}. Check the audio."
        )
    return ExtractReport(
        path=directory,
        num_utterances=num_utterances,
        hours=num_samples / corpus.sampling_rate / 3600,
        num_frames=num_frames,
        layers=resolve_layers(config.layers, model.config.encoder.num_layers),
        dim=model.config.encoder.d_model,
        frame_rate_hz=frame_rate_hz(model),
        left_out=dict(left_out.most_common()),
    )


def _index_row(utterance: Utterance, file: str, corpus: Corpus) -> dict[str, Any]:
    line, (num_layers, num_frames, dim) = utterance.line, utterance.values.shape
    path = path_of(line)
    return {
        "id": line["id"],
        "file": file,
        # Audio that was taken out of an input for the time being is not there afterwards.
        "path": None if path is None or Path(path).is_relative_to(corpus.path) else path,
        "start": line["start"],
        "duration": line["duration"],
        "num_frames": num_frames,
        "num_layers": num_layers,
        "dim": dim,
        "labels": labels_of(line),
    }


def _meta(corpus: Corpus, report: ExtractReport, config: ExtractConfig, model_name: str) -> dict[str, Any]:
    return {
        "format_version": FORMAT_VERSION,
        "kind": "features",
        "model": model_name,
        **{key: value for key, value in asdict(report).items() if key != "path"},
        "format": config.format,
        "dtype": config.dtype,
        "sampling_rate": corpus.sampling_rate,
        "inputs": corpus.meta["manifests"],
        "corpus_fingerprint": corpus.fingerprint,
    }


def _encoded(values: NDArray[Any], form: FileFormat) -> bytes:
    values = np.ascontiguousarray(values)
    if form == "safetensors":
        from safetensors.numpy import save

        return bytes(save({"features": values}))
    # By way of memory: NumPy's own writing to a file loses the reason where the disk is full.
    buffer = io.BytesIO()
    np.save(buffer, values, allow_pickle=False)
    return buffer.getvalue()


def _check_format(form: FileFormat) -> None:
    if form == "safetensors":
        try:
            import safetensors.numpy  # noqa: F401
        except ImportError as error:
            raise ConfigError(
                "format is safetensors, which is not installed: pip install 'nest-pretrain[safetensors]', or take npy."
            ) from error
