"""Encoder outputs of the utterances of a corpus, each at its own length.

Owns the iteration over a corpus in batches, longest utterance first. Writing files is left to `extract`, the linear
probe to `probe`. The features of an utterance do not depend on the other utterances of its batch, except for rounding,
and each utterance is either yielded or reported with a reason.
"""

import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from nestdata import AudioError, Corpus, PrepareConfig, prepare_corpus
from nestmodel.errors import ConfigError, ExtractError
from nestmodel.training.module import NestModel

Layers = Literal["all", "last"] | Sequence[int]
"""Outputs of an encoder: 0 is the input of the first block, i the output of the i-th."""

OnProgress = Callable[[int, int | None], None]
"""Called with what is done and the total, or None where that is not known."""

Compute = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Makes (layers, batch, frames, dim) and the numbers of valid frames of audio and its numbers of valid samples."""

_NOT_A_LABEL = frozenset({"id", "recording_id", "start", "duration", "channel", "custom", "alignment"})
# What torch says on a CPU and on a GPU; it has a class of its own for GPUs alone.
_NO_MEMORY = re.compile("out of memory|allocate memory|not enough memory")


class RejectedUtterance(NamedTuple):
    """An utterance without features; the same fields as the rejects of `nestdata prepare`."""

    where: str
    cut_id: str
    reason: str
    """In one word, for counting."""

    detail: str
    """A sentence with the values that were found."""


class Utterance(NamedTuple):
    """The features of one utterance."""

    row: int
    """Its row in the corpus."""

    line: dict[str, Any]
    """The cut, as it stands in `cuts.jsonl`."""

    values: NDArray[np.float32]
    """Shape (layers, enc_frames, dim), in the order of the layers that were asked for; valid frames alone."""


@contextmanager
def open_inputs(
    inputs: Corpus | Sequence[str | Path],
    model: NestModel,
    directory: Path,
    on_progress: OnProgress | None = None,
) -> Iterator[Corpus]:
    """Yields a corpus of inputs at the rate of a model; one that had to be prepared is removed at the end.

    Args:
        inputs: A corpus, which is taken as it is; or manifests, folders and corpora, which are prepared again, so that
            broken files are found. No cut is too short for it.
        model: Says at which rate.
        directory: Where a corpus may be made.
        on_progress: Called with the number of entries looked at and their total.

    Raises:
        ConfigError: The corpus has another sampling rate than the model.
        NestDataError: An input cannot be read, or none of its audio can be used.
    """
    rate = model.config.features.sampling_rate
    if isinstance(inputs, Corpus):
        if inputs.sampling_rate != rate:
            raise ConfigError(
                f"{inputs.path} is at {inputs.sampling_rate} Hz and the model at {rate} Hz. "
                f"Prepare it with --sampling-rate {rate}."
            )
        yield inputs
        return
    made = directory / "corpus"
    settings = PrepareConfig(sampling_rate=rate, min_seconds=0.0, probe="all")
    prepare_corpus([_manifest_of(Path(path)) for path in inputs], made, settings, on_progress=on_progress)
    try:
        yield Corpus.open(made)
    finally:
        shutil.rmtree(made)


def iterate_features(
    model: NestModel,
    corpus: Corpus,
    layers: Layers = "all",
    max_batch_seconds: float = 120.0,
    device: str = "auto",
    *,
    rows: Sequence[int] | None = None,
    on_reject: Callable[[RejectedUtterance], None] | None = None,
) -> Iterator[Utterance]:
    """Yields the encoder features of utterances, the longest first.

    Args:
        model: Its encoder is used, in eval mode, and moved to the device.
        corpus: At the model's sampling rate.
        layers: Which outputs of the encoder.
        max_batch_seconds: Audio in a batch, padding included; an utterance that is longer makes a batch of its own.
        device: Such as `cpu`; `auto` takes a GPU where there is one.
        rows: Rows of the corpus; all by default.
        on_reject: Called for each utterance without features; without it, such an utterance is an error.

    Raises:
        ConfigError: The layers or the device do not exist.
        ExtractError: A batch does not fit into memory; or an utterance has no features, and there is no `on_reject`.
    """
    chosen = resolve_layers(layers, model.config.encoder.num_layers)

    def encode(audio: Tensor, audio_lens: Tensor) -> tuple[Tensor, Tensor]:
        states, enc_lens = model.encoder.hidden_states(*model.features(audio, audio_lens))
        return torch.stack([states[layer] for layer in chosen]), enc_lens

    return _walk(model, corpus, encode, max_batch_seconds, device, rows, on_reject)


def iterate_log_mels(
    model: NestModel,
    corpus: Corpus,
    max_batch_seconds: float = 120.0,
    device: str = "auto",
    *,
    rows: Sequence[int] | None = None,
    on_reject: Callable[[RejectedUtterance], None] | None = None,
) -> Iterator[Utterance]:
    """Yields log-mel frames as one layer of shape (frames, mels), not normalised; otherwise as `iterate_features`."""

    def compute(audio: Tensor, audio_lens: Tensor) -> tuple[Tensor, Tensor]:
        mels, feat_lens = log_mels(model, audio, audio_lens)
        return mels.transpose(1, 2).unsqueeze(0), feat_lens

    return _walk(model, corpus, compute, max_batch_seconds, device, rows, on_reject)


@torch.no_grad()
def log_mels(
    model: NestModel, audio: Float[Tensor, "batch samples"], audio_lens: Int[Tensor, " batch"]
) -> tuple[Float[Tensor, "batch mels frames"], Int[Tensor, " batch"]]:
    """Returns the logarithms of mel energies that a model normalises, before it does, and the numbers of valid frames.

    Dithered where the model is in training mode; frames past the valid ones mean nothing.
    """
    featurizer = model.features.featurizer
    with torch.autocast(audio.device.type, enabled=False):
        mels = featurizer._log_mels(featurizer._emphasise(audio.float(), audio_lens))
    return mels, audio_lens // featurizer.config.hop_length


def parse_layers(text: str) -> Layers:
    """Reads `all`, `last`, or numbers separated by commas.

    Raises:
        ConfigError: It is none of these.
    """
    if text == "all":
        return "all"
    if text == "last":
        return "last"
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise ConfigError(f"layers is {text!r}: give all, last, or numbers such as 0,4,16.") from None


def resolve_layers(layers: Layers, num_layers: int) -> list[int]:
    """Returns the numbers of the layers of an encoder of so many blocks.

    Raises:
        ConfigError: One of them is not there, one is named twice, or there are none.
    """
    if layers == "all":
        return list(range(num_layers + 1))
    if layers == "last":
        return [num_layers]
    chosen = [layer for layer in layers if isinstance(layer, int)]
    if not chosen or len(set(chosen)) < len(layers) or not all(0 <= layer <= num_layers for layer in chosen):
        raise ConfigError(
            f"layers is {','.join(map(str, layers))!r}: give each of them once, from 0, the input of the first block, "
            f"to {num_layers}, the output of the last."
        )
    return chosen


def resolve_device(name: str) -> torch.device:
    """Returns the device of a name; `auto` takes a GPU where there is one.

    Raises:
        ConfigError: There is no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigError(f"device is {name!r}, and there is no such device here: give cpu, cuda or auto.") from error
    return device


def frame_rate_hz(model: NestModel) -> float:
    """Returns how many encoder frames there are in a second."""
    features = model.config.features
    return features.sampling_rate / (features.hop_length * model.config.encoder.subsampling_factor)


def labels_of(line: dict[str, Any]) -> dict[str, Any]:
    """Returns what a cut says about itself: its custom fields, and those that all of its supervisions agree on."""
    supervisions = line.get("supervisions") or []
    labels = dict(line.get("custom") or {})
    spoken = [
        {**(s.get("custom") or {}), **{k: v for k, v in s.items() if k not in _NOT_A_LABEL}} for s in supervisions
    ]
    for key in dict.fromkeys(key for each in spoken for key in each):
        values = [each.get(key) for each in spoken]
        if all(value == values[0] for value in values):
            labels[key] = values[0]
    return labels


def _walk(
    model: NestModel,
    corpus: Corpus,
    compute: Compute,
    max_batch_seconds: float,
    device_name: str,
    rows: Sequence[int] | None,
    on_reject: Callable[[RejectedUtterance], None] | None,
) -> Iterator[Utterance]:
    device = resolve_device(device_name)
    check_batch_seconds(max_batch_seconds)
    was_training = model.training
    model.eval().to(device)
    leave_out = on_reject or _refuse
    max_samples = int(max_batch_seconds * corpus.sampling_rate)
    try:
        for batch in _batches(corpus, range(len(corpus)) if rows is None else rows, max_samples):
            loaded = [(row, samples) for row in batch if (samples := _load(corpus, row, leave_out)) is not None]
            if loaded:
                yield from _computed(corpus, loaded, compute, device, leave_out)
    finally:
        model.train(was_training)


def _batches(corpus: Corpus, rows: Sequence[int], max_samples: int) -> Iterator[list[int]]:
    """Yields rows from the longest down, as many as fit when they are padded to the first."""
    batch: list[int] = []
    for row in sorted(rows, reverse=True):
        if batch and (len(batch) + 1) * corpus.num_samples_of(batch[0]) > max_samples:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _load(corpus: Corpus, row: int, leave_out: Callable[[RejectedUtterance], None]) -> NDArray[np.float32] | None:
    try:
        return corpus.load(row)[1]
    except AudioError as error:
        line = corpus.line(row)
        leave_out(RejectedUtterance(path_of(line) or "", line["id"], error.reason, str(error)))
        return None


def _computed(
    corpus: Corpus,
    loaded: list[tuple[int, NDArray[np.float32]]],
    compute: Compute,
    device: torch.device,
    leave_out: Callable[[RejectedUtterance], None],
) -> Iterator[Utterance]:
    audio = np.zeros((len(loaded), len(loaded[0][1])), np.float32)
    for place, (_, samples) in enumerate(loaded):
        audio[place, : len(samples)] = samples
    audio_lens = torch.tensor([len(samples) for _, samples in loaded])
    lines = [corpus.line(row) for row, _ in loaded]
    try:
        with torch.no_grad():
            states, num_frames = compute(torch.from_numpy(audio).to(device), audio_lens.to(device))
            values, lens = states.cpu().numpy(), num_frames.tolist()
    except RuntimeError as error:
        if not _NO_MEMORY.search(str(error)):
            raise
        seconds = audio.size / corpus.sampling_rate
        if len(loaded) > 1:
            raise ExtractError(
                f"a batch of {len(loaded)} utterances, {seconds:.0f} s with padding, does not fit into memory. "
                "Lower --max-batch-seconds."
            ) from error
        detail = f"its {seconds:.0f} s do not fit into memory: prepare it with --window-seconds, and give that corpus"
        leave_out(RejectedUtterance(path_of(lines[0]) or "", lines[0]["id"], "out_of_memory", detail))
        return
    for place, (row, samples) in enumerate(loaded):
        line, own = lines[place], values[:, place, : lens[place]]
        if not lens[place]:
            detail = f"{len(samples)} samples at {corpus.sampling_rate} Hz are less than one encoder frame"
            leave_out(RejectedUtterance(path_of(line) or "", line["id"], "too_short", detail))
        elif not np.isfinite(own).all():
            detail = "the model made NaN or Inf of it; look at the audio, and at the weights"
            leave_out(RejectedUtterance(path_of(line) or "", line["id"], "not_finite", detail))
        else:
            yield Utterance(row, line, own)


def check_batch_seconds(max_batch_seconds: float) -> None:
    """Raises ConfigError where no batch could be so long."""
    if not max_batch_seconds > 0:
        raise ConfigError(f"max_batch_seconds is {max_batch_seconds:g}: give a positive number of seconds.")


def _manifest_of(path: Path) -> Path:
    """A corpus directory stands for its cuts, which are a manifest too."""
    return path / "cuts.jsonl" if (path / "index.npy").is_file() else path


def path_of(line: dict[str, Any]) -> str | None:
    """Returns the file that a cut lies in; None where its audio comes from elsewhere."""
    sources = line["recording"]["sources"]
    source = next((source for source in sources if line["channel"] in source["channels"]), sources[0])
    return str(source["source"]) if source["type"] == "file" else None


def _refuse(found: RejectedUtterance) -> None:
    raise ExtractError(f"cut {found.cut_id!r}: {found.reason}, {found.detail}")
