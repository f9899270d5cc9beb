"""Preview of one batch: pictures, sound, an HTML page, and digests for comparing batches.

The log-mel pictures are not the features of the model: they are not normalised, and span 80 dB.
"""

import hashlib
import io
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from numpy.typing import NDArray

from nestdata.batch.batch import AudioNoiseBatch
from nestdata.batch.mix import Mix
from nestdata.filters import mel_filters
from nestdata.output import output_directory
from nestdata.pages import write_page
from nestdata.redaction import redacted

_SIGNALS = ("clean", "noise", "noisy")
_OWN_FILES = re.compile(r"index\.html|batch\.json|\d{2,}(?:_(?:clean|noise|noisy)\.wav|\.png)")
_FFT_SIZE = 512
_NUM_MELS = 80
_COLOURS = {"clean": "#2f6f9f", "noise": "#b5532a", "noisy": "#4b4b4b"}


@dataclass(frozen=True, kw_only=True, slots=True)
class PreviewRow:
    """One row of the preview table, which describes one cut."""

    cut: str
    seconds: float
    mode: str
    """What was added: `noise` or `speech`; `clean` if nothing was."""

    noise: str
    """The interference: ids of noise or speech cuts, `white noise`, or empty."""

    snr_db: float | None
    padding: float
    """Padding as a share of the padded length of the batch."""


def preview_rows(batch: AudioNoiseBatch, sampling_rate: int) -> list[PreviewRow]:
    """Returns one table row for every cut of a batch."""
    width = batch.audio.shape[1]
    return [
        PreviewRow(
            cut=cut_id,
            seconds=int(length) / sampling_rate,
            mode="clean" if mix.mode == "none" else mix.mode,
            noise=" + ".join(mix.sources),
            snr_db=None if mix.mode == "none" else mix.snr_db,
            padding=1.0 - int(length) / width,
        )
        for cut_id, length, mix in zip(batch.sample_id, batch.audio_len, batch.mixes, strict=True)
    ]


def batch_digest(batch: AudioNoiseBatch) -> dict[str, Any]:
    """Returns the content of a batch as JSON values, with the SHA-256 of the bytes of every tensor.

    Two batches with equal digests are equal byte for byte.
    """
    return {
        "key": batch.key._asdict(),
        "sample_id": batch.sample_id,
        "mixes": [_plain(mix) for mix in batch.mixes],
        "tensors": {
            name: {
                "shape": list(tensor.shape),
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "sha256": hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest(),
            }
            for name, tensor in batch.tensors().items()
        },
    }


def write_preview(batch: AudioNoiseBatch, sampling_rate: int, directory: str | Path, *, max_cuts: int = 8) -> Path:
    """Writes pictures and sound of up to `max_cuts` cuts, `batch.json`, and an HTML page that shows them.

    The directory appears complete. It may exist if it is empty, or if it holds an earlier preview and nothing else,
    which is then replaced; if this raises, it stays as it was.

    Args:
        batch: A batch on the CPU.
        sampling_rate: Sampling rate of the batch, in Hz.
        directory: Directory of the output.
        max_cuts: Largest number of cuts with pictures and sound.

    Returns:
        The path of the page, `index.html` in the directory.

    Raises:
        OutputError: The files cannot be written, or the directory holds other files.
    """
    target = Path(directory).resolve()
    with output_directory(
        target, kind="a preview", names=_OWN_FILES, overwrite=True, may_replace=_is_preview
    ) as partial:
        _write_files(batch, sampling_rate, partial / "index.html", max_cuts)
    return Path(directory) / "index.html"


def _is_preview(directory: Path) -> bool:
    """Returns whether a directory is empty, or holds a preview."""
    if not directory.is_dir():
        return False
    names = {path.name for path in directory.iterdir()}
    return not names or {"index.html", "batch.json"} <= names


def _write_files(batch: AudioNoiseBatch, sampling_rate: int, page: Path, max_cuts: int) -> None:
    """Writes a page, with its pictures and sound beside it."""
    directory = page.parent
    rows = preview_rows(batch, sampling_rate)
    shown = []
    for i in range(min(max_cuts, len(rows))):
        length = int(batch.audio_len[i])
        tensors = (batch.audio, batch.noise, batch.noisy_audio)
        signals = {name: tensor[i, :length].numpy() for name, tensor in zip(_SIGNALS, tensors, strict=True)}
        if np.array_equal(signals["clean"], signals["noisy"]):
            del signals["noise"], signals["noisy"]
        stem = f"{i:02d}"
        for name, samples in signals.items():
            # As float, because a noisy signal may exceed [-1, 1] and must not be clipped.
            sound = io.BytesIO()  # libsndfile does not say that a disk is full
            soundfile.write(sound, samples, sampling_rate, format="WAV", subtype="FLOAT")
            (directory / f"{stem}_{name}.wav").write_bytes(sound.getvalue())
        _draw(signals, batch.mixes[i], rows[i], sampling_rate, directory / f"{stem}.png")
        shown.append({"row": rows[i], "stem": stem, "signals": [*signals]})
    (directory / "batch.json").write_text(json.dumps(batch_digest(batch), indent=2) + "\n")
    write_page(page, "preview.html", batch=batch, rows=rows, shown=shown, rate=sampling_rate)


def _plain(mix: Mix) -> dict[str, Any]:
    return {**asdict(mix), "snr_db": None if mix.mode == "none" else mix.snr_db}


def _draw(signals: dict[str, NDArray[np.float32]], mix: Mix, row: PreviewRow, rate: int, path: Path) -> None:
    from matplotlib.figure import Figure  # not pyplot, which keeps global state and looks for a display

    height = 2.6 * len(signals) + 0.9  # inches; labels stay legible on a narrow screen
    figure = Figure(figsize=(6.5, height))
    # Fixed margins: a layout engine would draw every picture twice.
    margins = {"left": 0.12, "right": 0.985, "top": 1 - 0.5 / height, "bottom": 0.45 / height, "hspace": 0.12}
    axes = figure.subplots(2 * len(signals), 1, sharex=True, height_ratios=[1, 1.4] * len(signals), gridspec_kw=margins)
    # A dollar sign in an id must not begin a formula.
    figure.suptitle(_title(row), y=1 - 0.05 / height, fontsize=9, parse_math=False)
    peak = max(float(np.abs(samples).max()) for samples in signals.values()) or 1.0
    mels = {name: _log_mel_db(samples, rate) for name, samples in signals.items()}
    top_db = max(float(mel.max()) for mel in mels.values())
    for i, (name, samples) in enumerate(signals.items()):
        wave, spectrum = axes[2 * i], axes[2 * i + 1]
        wave.plot(np.arange(len(samples)) / rate, samples, color=_COLOURS[name], linewidth=0.5)
        wave.set(ylim=(-1.05 * peak, 1.05 * peak), ylabel=name)
        for start, number in mix.segments:
            wave.axvspan(start / rate, (start + number) / rate, color="#b5532a", alpha=0.12, linewidth=0)
        extent = (0, len(samples) / rate, 0, mels[name].shape[0])
        spectrum.imshow(
            mels[name], origin="lower", aspect="auto", extent=extent, cmap="magma", vmin=top_db - 80, vmax=top_db
        )
        spectrum.set(ylabel="mel bin", yticks=[0, 40, 80])
    axes[-1].set_xlabel("seconds")
    figure.savefig(path, dpi=130)


def _title(row: PreviewRow) -> str:
    """Returns two lines that fit above the picture: the cut and its interference."""
    cut, noise = _shortened(redacted(row.cut), 80), _shortened(redacted(row.noise), 50)
    interference = row.mode if row.snr_db is None else f"{row.mode} ({noise}) at {row.snr_db:.1f} dB"
    return f"{cut}\n{interference}"


def _shortened(text: str, length: int) -> str:
    """Shortens a text to `length` characters by leaving out the middle, because ids often differ at an end."""
    half = (length - 1) // 2
    return text if len(text) <= length else f"{text[:half]}…{text[-half:]}"


def _log_mel_db(samples: NDArray[np.float32], rate: int) -> NDArray[np.float32]:
    hop_length = max(1, rate // 100)
    spectrum = torch.stft(
        torch.tensor(samples), _FFT_SIZE, hop_length, window=torch.hann_window(_FFT_SIZE), return_complex=True
    )
    power = mel_filters(_NUM_MELS, _FFT_SIZE // 2 + 1, rate) @ spectrum.abs().square()
    decibels: NDArray[np.float32] = (10 * torch.log10(power + 1e-10)).numpy()
    return decibels
