"""Lengths that `prepare` gives to audio of all encodings, that decoding gives, and that FFmpeg gives.

    python -m benchmarks run lengths --results FILE

Makes about 280 files by several encoders, with and without tags, piped, cut off and joined, and prints Markdown: a line
for each kind of file. Exits with 1 if a file is shorter than FFmpeg's audio by more than the tolerance of its kind, or
decodes to another number of samples than its cut has. Needs ffmpeg, lame, oggenc, opusenc, flac, sox, twolame and the
package torchcodec; encoders that are not installed are left out.
"""

import json
import logging
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import soundfile

from benchmarks.harness.arguments import benchmark_parser
from benchmarks.harness.report import Report, machine
from nestdata import Corpus, PrepareConfig, prepare_corpus
from nestdata.audio.decode import load_samples

QUICK = ("--quick",)
TOLERANCES_S = {"MP3, cut off": 0.08, "WMA": 0.07, "Ogg, damaged": 0.1}
"""Seconds by which a file may be shorter than FFmpeg's audio: a frame or block that is not whole, or that only FFmpeg
plays (the last block of WMA)."""

TOLERANCE_S = 0.011
WAVES = {
    "a": (6.3, 16000, 1),
    "b": (4.1, 16000, 1),
    "n": (9.7, 44100, 1),
    "s": (5.2, 48000, 2),
    "t": (3.3, 22050, 1),
    "e": (4.4, 8000, 1),
}
"""Seconds, sampling rate and channels of the audio that is encoded."""

FFMPEG = "ffmpeg -v error -y -i IN"
ENCODERS = [
    *(("MP3 with a tag", f"{i}.mp3", f"lame --quiet {how} IN OUT") for i, how in enumerate(("-V 0", "-V 5", "-V 9"))),
    ("MP3 with a tag", "b64.mp3", "lame --quiet -b 64 IN OUT"),
    ("MP3 with a tag", "abr.mp3", "lame --quiet --abr 56 IN OUT"),
    ("MP3 with a tag", "ff.mp3", f"{FFMPEG} -q:a 4 OUT"),
    ("MP3 with a tag", "sox.mp3", "sox IN OUT"),
    *(("MP3 without a tag", f"t{i}.mp3", f"lame --quiet -t -V {i} IN OUT") for i in (0, 5, 9)),
    ("MP3 without a tag", "tb64.mp3", "lame --quiet -t -b 64 IN OUT"),
    ("MP3 without a tag", "tabr.mp3", "lame --quiet -t --abr 56 IN OUT"),
    ("MP3 without a tag", "pipe.mp3", f"{FFMPEG} -q:a 4 -f mp3 -"),
    ("MP2", "ff.mp2", f"{FFMPEG} OUT"),
    ("MP2", "two.mp2", "twolame -v 5 IN OUT"),
    ("Ogg Vorbis", "1.ogg", "oggenc -Q -q 1 -o OUT IN"),
    ("Ogg Vorbis", "7.ogg", "oggenc -Q -q 7 -o OUT IN"),
    ("Ogg Vorbis", "ff.ogg", f"{FFMPEG} -c:a libvorbis OUT"),
    ("Ogg Opus", "enc.opus", "opusenc --quiet IN OUT"),
    ("Ogg Opus", "ff.opus", f"{FFMPEG} -c:a libopus OUT"),
    ("FLAC", "flac.flac", "flac -s -f -o OUT IN"),
    ("FLAC", "ff.flac", f"{FFMPEG} OUT"),
    ("FLAC without a length", "pipe.flac", f"{FFMPEG} -f flac -"),
    ("Ogg FLAC", "flac.oga", "flac -s -f --ogg -o OUT IN"),
    ("Ogg FLAC", "ff.oga", f"{FFMPEG} -c:a flac OUT"),
    ("M4A", "ff.m4a", f"{FFMPEG} -c:a aac OUT"),
    ("M4A in fragments", "f.m4a", f"{FFMPEG} -c:a aac -movflags frag_keyframe+empty_moov OUT"),
    ("AAC (ADTS)", "ff.aac", f"{FFMPEG} -c:a aac OUT"),
    ("WMA", "ff.wma", f"{FFMPEG} -c:a wmav2 OUT"),
    ("WebM and Matroska, piped", "ff.webm", f"{FFMPEG} -c:a libopus -f webm -"),
    ("WebM and Matroska, piped", "ff.mka", f"{FFMPEG} -c:a aac -f matroska -"),
    *(("WAV", f"{codec}.wav", f"{FFMPEG} -c:a {codec} OUT") for codec in ("pcm_s16le", "pcm_f32le", "pcm_mulaw")),
    ("WAV", "adpcm_ms.wav", f"{FFMPEG} -c:a adpcm_ms OUT"),
    ("WAV, piped", "pipe.wav", f"{FFMPEG} -f wav -"),
    *(("AIFF, AU, CAF, W64", f"ff.{suffix}", f"{FFMPEG} OUT") for suffix in ("aiff", "caf", "w64")),
    ("AIFF, AU, CAF, W64", "ff.au", f"{FFMPEG} -f au -"),
    ("Speex", "ff.spx", f"{FFMPEG} -c:a libspeex OUT"),
]
"""Kind, end of the file's name, and command; without OUT, the output of the command is the file."""

JOINED = {
    "MP3": ("MP3 with a tag", "MP3 without a tag", "MP2"),
    "Ogg": ("Ogg Vorbis", "Ogg Opus", "Ogg FLAC"),
    "FLAC": ("FLAC",),
    "WAV": ("WAV",),
}
"""Kinds of files that are cut off, and joined with files of the same kind."""


class Made(NamedTuple):
    """A file, and its kind."""

    kind: str
    path: Path
    parts: tuple[Path, ...] = ()
    """The files that were joined to it."""


def main() -> int:
    """Prints the result; returns 1 if a file is too short."""
    parser = benchmark_parser(__doc__, quick={"waves": "ab"})
    parser.add_argument("--waves", default="".join(WAVES), help="audio that is encoded, by letters [%(default)s]")
    arguments = parser.parse_args()
    logging.getLogger().setLevel(logging.ERROR)
    version = subprocess.run(["ffmpeg", "-version"], capture_output=True, text=True, check=True).stdout.split()[2]
    report = Report("Lengths of audio files", __file__, f"ffmpeg {version}, {machine()}.", results=arguments.results)
    with tempfile.TemporaryDirectory() as folder:
        made = encoded(Path(folder), arguments.waves)
        made += [*joined(made), *cut_off(made), *damaged(made)]
        wrong = compare(report, Path(folder), made)
    for line in wrong:
        report.text(f"WRONG: {line}")
    return 1 if wrong else 0


def encoded(folder: Path, waves: str) -> list[Made]:
    """Writes the audio by all encoders that are installed."""
    rng = np.random.default_rng(1)
    made = []
    for wave in waves:
        seconds, rate, channels = WAVES[wave]
        time_s = np.arange(round(seconds * rate)) / rate
        samples = 0.3 * np.sin(2 * np.pi * (150 + 40 * time_s) * time_s * 3) * (np.sin(2 * time_s) > -0.5)
        samples = samples + 0.02 * rng.standard_normal(len(time_s)) * (np.sin(2 * time_s) > -0.2)
        source = folder / f"{wave}.wav"
        soundfile.write(source, np.stack([samples] * channels, axis=1), rate)
        for kind, end, command in ENCODERS:
            # The name without its suffix, which is the id of the cut, is unique.
            path = folder / f"{wave}-{end.replace('.', '-')}{Path(end).suffix}"
            words = [{"IN": str(source), "OUT": str(path)}.get(word, word) for word in shlex.split(command)]
            if shutil.which(words[0]):
                found = subprocess.run(words, capture_output=True, check=False)
                if "OUT" not in command:
                    path.write_bytes(found.stdout)
                if path.is_file() and path.stat().st_size:
                    made.append(Made(kind, path))
    return made


def joined(made: list[Made]) -> Iterator[Made]:
    """Joins two and all files of one rate, and files of two rates."""
    for name, kinds in JOINED.items():
        for kind in kinds:
            files = [one.path for one in made if one.kind == kind]
            if kind == "WAV":
                files = [path for path in files if "s16le" in path.name]
            of_one_rate = [path for path in files if path.name[0] in "ab"]
            sets = {"two": [of_one_rate[0], of_one_rate[-1]], "many": of_one_rate, "rates": [files[0], files[-1]]}
            for how, parts in sets.items():
                path = files[0].with_name(f"{how}-{kind.replace(' ', '-')}{files[0].suffix}")
                path.write_bytes(b"".join(part.read_bytes() for part in parts))
                yield Made(f"{name}, joined", path, tuple(parts))


def cut_off(made: list[Made]) -> Iterator[Made]:
    """Writes the first two thirds of some files."""
    for name, kinds in JOINED.items():
        for kind in kinds:
            files = [one.path for one in made if one.kind == kind]
            for path in (files[0], files[len(files) // 2], files[-1]):
                content = path.read_bytes()
                cut = path.with_name(f"cut-{path.name}")
                cut.write_bytes(content[: len(content) * 2 // 3])
                yield Made(f"{name}, cut off", cut)


def damaged(made: list[Made]) -> Iterator[Made]:
    """Writes bytes that are not audio into the middle of files."""
    id3 = b"ID3\x04\0\0\0\0\x07\x76" + bytes(1014)
    for kind, source, name, between in (
        ("Ogg, damaged", "Ogg Vorbis", "damaged", b"junk" * 700),
        ("MP3, joined", "MP3 without a tag", "id3", id3),
    ):
        files = [one.path for one in made if one.kind == source]
        for path in (files[0], files[-1]):
            content = path.read_bytes()
            half = len(content) // 2 if kind == "Ogg, damaged" else len(content)
            target = path.with_name(f"{name}-{path.name}")
            target.write_bytes(content[:half] + between + (content[half:] or content))
            yield Made(kind, target)


def compare(report: Report, folder: Path, made: list[Made]) -> list[str]:
    """Prints the lengths by kind, and returns what is wrong."""
    manifest = folder / "all.json"
    manifest.write_text("".join(json.dumps({"audio_filepath": str(one.path)}) + "\n" for one in made))
    prepare_corpus([manifest], folder / "corpus", PrepareConfig(min_seconds=0.01, max_seconds=None))
    corpus = Corpus.open(folder / "corpus")
    cuts = {corpus.line(i)["recording"]["sources"][0]["source"]: i for i in range(len(corpus))}
    rejects = {row["where"]: row for row in map(json.loads, (folder / "corpus/rejected.jsonl").open())}
    found: dict[str, list[float]] = {one.kind: [] for one in made}
    rejected: dict[str, list[str]] = {one.kind: [] for one in made}
    wrong = []
    for number, one in enumerate(made, start=1):
        index = cuts.get(str(one.path))
        if index is None:
            rejected[one.kind].append(rejects[f"{manifest}:{number}"]["reason"])
            continue
        # FFmpeg does not cut the end of a link as its last page says, if another link follows.
        expected = sum(map(length_by_ffmpeg, one.parts or [one.path]))
        if expected == 0:  # FFmpeg does not read the free format
            continue
        difference = corpus[index].num_samples / 16000 - expected
        found[one.kind].append(difference)
        if difference < -TOLERANCES_S.get(one.kind, TOLERANCE_S):
            wrong.append(f"{one.path.name} is {-difference:.3f} s too short")
        try:
            num_decoded = len(load_samples(corpus.line(index)))
        except Exception as error:
            if one.kind != "FLAC, cut off":
                wrong.append(f"{one.path.name}: {error}")
            continue
        if num_decoded != corpus[index].num_samples:
            wrong.append(f"{one.path.name} decodes to {num_decoded} samples, its cut has {corpus[index].num_samples}")
    report.section(f"{len(made)} files")
    report.text("""Length of the cut minus length of FFmpeg's audio, in ms; for joined files, minus the sum of FFmpeg's
        lengths of the files. All cuts decode to exactly their number of samples, apart from FLAC that was cut off,
        which loading refuses, and `--probe decode` rejects.""")
    rows = []
    for kind, values in found.items():
        span = [f"{1000 * value:+.1f}" for value in (min(values), max(values))] if values else ["-", "-"]
        reasons = ", ".join(sorted(set(rejected[kind])))
        counts = f"{len(rejected[kind])} {reasons}" if reasons else "-"
        rows.append([kind, len(values) + len(rejected[kind]), *span, counts])
    report.table(["kind", "files", "least", "greatest", "rejected as"], rows)
    return wrong


def length_by_ffmpeg(path: Path) -> float:
    """Returns the seconds of the audio that FFmpeg decodes."""
    probe = "ffprobe -v quiet -select_streams a:0 -show_entries stream=sample_rate,channels -of csv=p=0".split()
    line = subprocess.run([*probe, str(path)], capture_output=True, text=True, check=False).stdout
    rate, channels = (int(value) for value in line.strip().split("\n")[0].strip(",").split(",")[:2])
    if not rate:
        return 0.0
    decode = ["ffmpeg", "-v", "quiet", "-i", str(path), "-map", "0:a:0", "-f", "s16le", "-"]
    return len(subprocess.run(decode, capture_output=True, check=False).stdout) / 2 / channels / rate


if __name__ == "__main__":
    sys.exit(main())
