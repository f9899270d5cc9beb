"""Compares corpora of tars that NeMo, Lhotse and webdataset wrote with the files that they hold.

    python -m benchmarks run tars --manifest FILES.json --nemo-python PATH --converter PATH --webdataset-python PATH

Prints Markdown, and exits with 1 if a cut is missing, or has other samples than the file. NeMo's converter is
`scripts/speech_recognition/convert_to_tarred_audio_dataset.py` of its repository; it runs in an environment with
`nemo_toolkit[asr]==3.0.0`. Lhotse is that of this environment, and the third Python has the package webdataset. A peer
that is not given is left out. The manifest is NeMo's, with durations, and the files are 16-bit audio.

Every fourth file has three lines with spans of their own, so that NeMo writes `-sub` lines.
"""

import json
import logging
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.arguments import benchmark_parser
from benchmarks.harness.children import PEERS, run_peer
from benchmarks.harness.report import table_row
from nestdata import Corpus, prepare_corpus

_HEADER = """| written by | read by | cuts | rejected | ids | samples |
|---|---|---|---|---|---|"""
QUICK = None


def main() -> int:
    """Prints the comparison; returns 1 if something differs."""
    parser = benchmark_parser(__doc__, quick={"files": 40})
    parser.add_argument("--manifest", required=True, type=Path, help="NeMo manifest of audio files")
    parser.add_argument("--files", type=int, default=400, help="number of files of the manifest")
    parser.add_argument("--nemo-python", help="Python of an environment with NeMo")
    parser.add_argument("--converter", type=Path, help="NeMo's convert_to_tarred_audio_dataset.py")
    parser.add_argument("--webdataset-python", help="Python of an environment with webdataset")
    arguments = parser.parse_args()
    logging.getLogger().setLevel(logging.ERROR)
    print(_HEADER)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        rows = _rows(arguments.manifest, arguments.files)
        spans = [span for number, row in enumerate(rows) for span in (_spans(row) if number % 4 == 0 else [row])]
        # Without durations, which manifests round.
        whole_rows = [{key: value for key, value in row.items() if key != "duration"} for row in rows]
        whole = _corpus(_write(directory / "whole.json", whole_rows))
        is_equal = _check_shar(directory, whole)
        if arguments.nemo_python and arguments.converter:
            files = _corpus(_write(directory / "spans.json", spans))
            is_equal &= _check_nemo(directory, files, arguments.nemo_python, arguments.converter)
        if arguments.webdataset_python:
            is_equal &= _check_webdataset(directory, whole, arguments.webdataset_python)
    return 0 if is_equal else 1


def _check_nemo(directory: Path, files: Corpus, python: str, converter: Path) -> bool:
    target = directory / "nemo"
    command: list[str | Path] = [python, converter, "--manifest_path", directory / "spans.json", "--target_dir", target]
    run_peer([*command, "--num_shards", "4", "--max_duration", "1e6", "--shuffle", "--shuffle_seed", "1"])
    squashed = _samples(
        files, lambda cut_id: cut_id.partition("@")[0].replace("/", "_").replace(".", "_") + _span(cut_id)
    )
    one, many = target / "tarred_audio_manifest.json", target / "sharded_manifests" / "manifest_{0..3}.json"
    return all([_compare("NeMo", path.name, path, squashed) for path in (one, many)])


def _check_shar(directory: Path, files: Corpus) -> bool:
    from lhotse import CutSet

    target = directory / "shar"
    target.mkdir()
    cuts = [files.line(index) for index in range(len(files))]
    for cut in cuts:  # a name that begins with a slash is refused in tars
        cut["id"] = cut["id"].lstrip("/")
    CutSet.from_dicts(cuts).to_shar(target, {"recording": "flac"}, shard_size=100)
    # Lhotse scales samples by 32767/32768 when it writes FLAC, so they are compared with what it reads.
    expected = {cut.id: cut.load_audio()[0] for cut in CutSet.from_shar(in_dir=target)}
    return len(expected) == len(files) and _compare("Lhotse Shar", target.name, target, expected)


def _check_webdataset(directory: Path, files: Corpus, python: str) -> bool:
    target = directory / "webdataset"
    target.mkdir()
    run_peer([python, PEERS / "write_webdataset.py", directory / "whole.json", str(target / "set-%06d.tar")])
    keys = _samples(files, lambda cut_id: cut_id.lstrip("/").replace(".", "_"))
    return _compare("webdataset", target.name, target, keys)


def _compare(writer: str, name: str, path: Path, expected: dict[str, NDArray[np.float32]]) -> bool:
    corpus = _corpus(path)
    found = _samples(corpus, str)
    same_ids = found.keys() == expected.keys()
    same_samples = all(np.array_equal(samples, expected.get(cut_id, ())) for cut_id, samples in found.items())
    rejected = sum(corpus.meta["rejected"].values())
    words = ["equal" if same else "DIFFERENT" for same in (same_ids, same_samples)]
    print(table_row([writer, f"`{name}`", len(corpus), rejected, *words]), flush=True)
    return same_ids and same_samples and not rejected


def _rows(manifest: Path, number: int) -> list[dict[str, Any]]:
    """Returns lines of a manifest with absolute paths, taken at regular intervals.

    Files of another rate than that of the corpora are skipped: Lhotse would resample and round their samples.
    """
    import soundfile

    rows = [json.loads(line) for line in manifest.read_text().splitlines()]
    rows = [{**row, "audio_filepath": str((manifest.parent / row["audio_filepath"]).resolve())} for row in rows]
    rows = [row for row in rows if row["duration"] > 1 and soundfile.info(row["audio_filepath"]).samplerate == 16000]
    return rows[:: max(1, len(rows) // number)][:number]


def _spans(row: dict[str, Any]) -> list[dict[str, Any]]:
    step = round(row["duration"] / 3 - 0.01, 2)
    return [{**row, "offset": round(number * step, 2), "duration": step} for number in range(3)]


def _write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _corpus(path: Path) -> Corpus:
    output = path.parent / f"{path.name}.corpus"
    prepare_corpus([path], output)
    return Corpus.open(output)


def _samples(corpus: Corpus, name: Callable[[str], str]) -> dict[str, NDArray[np.float32]]:
    """Returns the samples of all cuts by their ids, renamed as a writer of tars does."""
    loaded = (corpus.load(index) for index in range(len(corpus)))
    return {name(cut_id): samples for cut_id, samples in loaded}


def _span(cut_id: str) -> str:
    _, sign, span = cut_id.partition("@")
    return sign + span


if __name__ == "__main__":
    sys.exit(main())
