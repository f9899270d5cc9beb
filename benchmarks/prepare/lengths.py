"""Lengths that `prepare` gives to audio of all encodings, and that decoding gives, beside those of FFmpeg.

    python -m benchmarks run lengths [--hours 1] --results FILE

Makes about 200 files by several encoders, with and without tags, piped, cut off and joined, and prints Markdown: a line
for each kind of file, and what it costs to count samples that no header gives. Exits with 1 if a file is shorter than
FFmpeg's audio by more than the tolerance of its kind, or decodes to another number of samples than its cut has.
Needs ffmpeg, lame, oggenc, opusenc, flac, sox, twolame and the package torchcodec; encoders that are not installed are
left out.
"""

import logging
import os
import shutil
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import orjson
import soundfile

from benchmarks.harness.arguments import benchmark_parser
from benchmarks.harness.report import Report, machine, table_row
from nestdata import Corpus, PrepareConfig, prepare_corpus
from nestdata.audio.decode import load_samples
from nestdata.prepare.header import read_header
from nestdata.prepare.inputs.audio import File

QUICK = None
# Seconds by which a file may be shorter than FFmpeg's audio: a frame or block that is not whole, or that only FFmpeg
# plays (the last block of WMA).
_TOLERANCE_S = {"MP3, cut off": 0.08, "WMA": 0.07, "Ogg, damaged": 0.1}
_DEFAULT_TOLERANCE_S = 0.011


class Made(NamedTuple):
    """A file, and its kind."""

    kind: str
    path: Path
    parts: tuple[Path, ...] = ()
    """The files that it is joined of."""


def main() -> int:
    """Prints the result; returns 1 if a file is too short."""
    parser = benchmark_parser(__doc__, quick={"hours": 0.05})
    parser.add_argument("--hours", type=float, default=1.0, help="length of the files that are counted [%(default)s]")
    arguments = parser.parse_args()
    logging.getLogger().setLevel(logging.ERROR)
    report = Report(
        "Lengths of audio files",
        __file__,
        f"one run; times are the least of 3 (10 for files of 10 s); ffmpeg {_version_of_ffmpeg()}, {machine()}.",
        results=arguments.results,
    )
    with tempfile.TemporaryDirectory() as folder:
        is_right = _compare(report, Path(folder))
        _measure(report, Path(folder), arguments.hours)
    return 0 if is_right else 1


def _compare(report: Report, folder: Path) -> bool:
    audio = folder / "audio"
    audio.mkdir()
    made = list(_make(folder, audio))
    manifest = folder / "all.json"
    manifest.write_bytes(b"\n".join(orjson.dumps({"audio_filepath": str(file.path)}) for file in made))
    config = PrepareConfig(min_seconds=0.01, max_seconds=None)
    prepare_corpus([manifest], folder / "corpus", config)
    corpus = Corpus.open(folder / "corpus")
    cuts = {corpus.line(i)["recording"]["sources"][0]["source"]: i for i in range(len(corpus))}
    rejects = {
        row["where"]: row
        for row in map(orjson.loads, (folder / "corpus/rejected.jsonl").read_bytes().split(b"\n")[:-1])
    }
    found: dict[str, list[float]] = defaultdict(list)
    rejected: dict[str, list[str]] = defaultdict(list)
    wrong = []
    for number, file in enumerate(made):
        index = cuts.get(str(file.path))
        if index is None:
            rejected[file.kind].append(rejects[f"{manifest}:{number + 1}"]["reason"])
            found[file.kind] += []
            continue
        # FFmpeg does not cut the end of a link as its last page says, if another link follows.
        expected = sum(map(_length_by_ffmpeg, file.parts)) if file.parts else _length_by_ffmpeg(file.path)
        if expected == 0:  # FFmpeg does not read the free format
            continue
        seconds = corpus[index].num_samples / 16000
        found[file.kind].append(seconds - expected)
        if seconds - expected < -_TOLERANCE_S.get(file.kind, _DEFAULT_TOLERANCE_S):
            wrong.append(f"{file.path.name} is {expected - seconds:.3f} s too short")
        try:
            num_decoded = len(load_samples(corpus.line(index)))
        except Exception as error:
            if "FLAC, cut off" not in file.kind:
                wrong.append(f"{file.path.name}: {error}")
            continue
        if num_decoded != corpus[index].num_samples:
            wrong.append(f"{file.path.name} decodes to {num_decoded} samples, its cut has {corpus[index].num_samples}")
    report.section(f"{len(made)} files")
    report.text(
        "Length of the cut less that of FFmpeg's audio, in ms; for joined files, less the sum of its lengths of the "
        "files. All cuts decode to exactly their number of samples, "
        "apart from FLAC that was cut off, which loading refuses, and `--probe decode` rejects."
    )
    rows = [table_row(["kind", "files", "least", "greatest", "rejected as"]), "|---|---|---|---|---|"]
    for kind in dict.fromkeys(file.kind for file in made):
        values = found[kind]
        span = [f"{1000 * value:+.1f}" for value in (min(values), max(values))] if values else ["-", "-"]
        names = ", ".join(sorted(set(rejected[kind]))) or "-"
        counts = f"{len(rejected[kind])} {names}" if rejected[kind] else "-"
        rows.append(table_row([kind, len(values) + len(rejected[kind]), *span, counts]))
    report.markdown("\n".join(rows) + "\n")
    for line in wrong:
        report.text(f"WRONG: {line}")
    return not wrong


def _length_by_ffmpeg(path: Path) -> float:
    """Returns the seconds of the audio that FFmpeg decodes."""
    probe = ["ffprobe", "-v", "quiet", "-select_streams", "a:0", "-show_entries", "stream=sample_rate,channels"]
    line = subprocess.run([*probe, "-of", "csv=p=0", str(path)], capture_output=True, text=True, check=False).stdout
    rate, channels = (int(value) for value in line.strip().split("\n")[0].strip(",").split(",")[:2])
    if not rate:
        return 0.0
    decode = ["ffmpeg", "-v", "quiet", "-i", str(path), "-map", "0:a:0", "-f", "s16le", "-"]
    return len(subprocess.run(decode, capture_output=True, check=False).stdout) / 2 / channels / rate


def _make(folder: Path, audio: Path) -> Iterator[Made]:
    """Writes the files of all kinds."""
    rng = np.random.default_rng(1)
    waves = {}
    for name, seconds, rate, channels in (
        ("a", 6.3, 16000, 1),
        ("b", 4.1, 16000, 1),
        ("n", 9.7, 44100, 1),
        ("s", 5.2, 48000, 2),
        ("t", 3.3, 22050, 1),
        ("e", 4.4, 8000, 1),
    ):
        time_s = np.arange(round(seconds * rate)) / rate
        samples = 0.3 * np.sin(2 * np.pi * (150 + 40 * time_s) * time_s * 3) * (np.sin(2 * time_s) > -0.5)
        samples = samples + 0.02 * rng.standard_normal(len(time_s)) * (np.sin(2 * time_s) > -0.2)
        waves[name] = folder / f"{name}.wav"
        soundfile.write(waves[name], np.stack([samples] * channels, axis=1), rate)

    def path_of(name: str) -> Path:
        """Returns a path whose name without its suffix, which is the id of the cut, is unique."""
        return audio / f"{name.replace('.', '-')}{Path(name).suffix}"

    def run(kind: str, name: str, *command: str | Path) -> Iterator[Made]:
        path = path_of(name)
        if not shutil.which(command[0]):
            return
        filled = [str(path) if part == "OUT" else str(part) for part in command]
        subprocess.run(filled, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
        if path.is_file() and path.stat().st_size:
            yield Made(kind, path)

    def piped(kind: str, name: str, *command: str | Path) -> Iterator[Made]:
        path = path_of(name)
        if shutil.which(command[0]):
            with path.open("wb") as file:
                subprocess.run([str(part) for part in command], stdout=file, stderr=subprocess.DEVNULL, check=False)
            if path.stat().st_size:
                yield Made(kind, path)

    def joined(kind: str, name: str, parts: list[Made]) -> Iterator[Made]:
        if len(parts) > 1:
            path_of(name).write_bytes(b"".join(part.path.read_bytes() for part in parts))
            yield Made(kind, path_of(name), tuple(part.path for part in parts))

    def changed(kind: str, name: str, part: Made, change: Callable[[bytes], bytes]) -> Iterator[Made]:
        path_of(name).write_bytes(change(part.path.read_bytes()))
        yield Made(kind, path_of(name))

    ffmpeg = ("ffmpeg", "-v", "error", "-y", "-i")
    tagged, untagged, mp2, vorbis, opus, flac, ogg_flac = ([] for _ in range(7))  # type: ignore[var-annotated]
    modes = {"V0": ["-V", "0"], "V5": ["-V", "5"], "V9": ["-V", "9"], "b64": ["-b", "64"], "abr": ["--abr", "56"]}
    for wave, source in waves.items():
        for mode, options in modes.items():
            tagged += run("MP3 with a tag", f"{wave}-{mode}.mp3", "lame", "--quiet", *options, source, "OUT")
            untagged += run(
                "MP3 without a tag", f"{wave}-{mode}-t.mp3", "lame", "--quiet", "-t", *options, source, "OUT"
            )
        tagged += run("MP3 with a tag", f"{wave}-ff.mp3", *ffmpeg, source, "-q:a", "4", "OUT")
        untagged += piped("MP3 without a tag", f"{wave}-ffpipe.mp3", *ffmpeg, source, "-q:a", "4", "-f", "mp3", "-")
        tagged += run("MP3 with a tag", f"{wave}-sox.mp3", "sox", source, "OUT")
        mp2 += run("MP2", f"{wave}-ff.mp2", *ffmpeg, source, "OUT")
        mp2 += run("MP2", f"{wave}-two.mp2", "twolame", "-v", "5", source, "OUT")
        for quality in ("1", "7"):
            vorbis += run("Ogg Vorbis", f"{wave}-{quality}.ogg", "oggenc", "-Q", "-q", quality, "-o", "OUT", source)
        vorbis += run("Ogg Vorbis", f"{wave}-ff.ogg", *ffmpeg, source, "-c:a", "libvorbis", "OUT")
        opus += run("Ogg Opus", f"{wave}.opus", "opusenc", "--quiet", source, "OUT")
        opus += run("Ogg Opus", f"{wave}-ff.opus", *ffmpeg, source, "-c:a", "libopus", "OUT")
        flac += run("FLAC", f"{wave}.flac", "flac", "-s", "-f", "-o", "OUT", source)
        flac += run("FLAC", f"{wave}-ff.flac", *ffmpeg, source, "OUT")
        yield from piped("FLAC without a length", f"{wave}-pipe.flac", *ffmpeg, source, "-f", "flac", "-")
        ogg_flac += run("Ogg FLAC", f"{wave}.oga", "flac", "-s", "-f", "--ogg", "-o", "OUT", source)
        ogg_flac += run("Ogg FLAC", f"{wave}-ff.oga", *ffmpeg, source, "-c:a", "flac", "OUT")
        yield from run("M4A", f"{wave}.m4a", *ffmpeg, source, "-c:a", "aac", "OUT")
        fragments = ("-movflags", "frag_keyframe+empty_moov")
        yield from run("M4A in fragments", f"{wave}-f.m4a", *ffmpeg, source, "-c:a", "aac", *fragments, "OUT")
        yield from run("AAC (ADTS)", f"{wave}.aac", *ffmpeg, source, "-c:a", "aac", "OUT")
        yield from run("WMA", f"{wave}.wma", *ffmpeg, source, "-c:a", "wmav2", "OUT")
        yield from piped(
            "WebM and Matroska, piped", f"{wave}.webm", *ffmpeg, source, "-c:a", "libopus", "-f", "webm", "-"
        )
        yield from piped(
            "WebM and Matroska, piped", f"{wave}.mka", *ffmpeg, source, "-c:a", "aac", "-f", "matroska", "-"
        )
        for codec in ("pcm_s16le", "pcm_f32le", "pcm_mulaw", "adpcm_ms"):
            yield from run("WAV", f"{wave}-{codec}.wav", *ffmpeg, source, "-c:a", codec, "OUT")
        yield from piped("WAV, piped", f"{wave}-pipe.wav", *ffmpeg, source, "-f", "wav", "-")
        yield from run("AIFF, AU, CAF, W64", f"{wave}.aiff", *ffmpeg, source, "OUT")
        yield from piped("AIFF, AU, CAF, W64", f"{wave}.au", *ffmpeg, source, "-f", "au", "-")
        yield from run("AIFF, AU, CAF, W64", f"{wave}.caf", *ffmpeg, source, "OUT")
        yield from run("AIFF, AU, CAF, W64", f"{wave}.w64", *ffmpeg, source, "OUT")
    yield from run("Speex", "a.spx", *ffmpeg, waves["a"], "-c:a", "libspeex", "OUT")
    for files in (tagged, untagged, mp2, vorbis, opus, flac, ogg_flac):
        yield from files
    kinds = {"MP3": [tagged, untagged, mp2], "Ogg": [vorbis, opus, ogg_flac], "FLAC": [flac]}
    for kind, groups in kinds.items():
        for group in groups:
            of_one_rate = [file for file in group if file.path.name[0] in "ab"]
            suffix = group[0].path.suffix if group else ""
            yield from joined(f"{kind}, joined", f"two-{len(group)}{suffix}", [of_one_rate[0], of_one_rate[-1]])
            yield from joined(f"{kind}, joined", f"many-{len(group)}{suffix}", of_one_rate)
            yield from joined(f"{kind}, joined", f"rates-{len(group)}{suffix}", [group[0], group[-1]])
            for i in (0, len(group) // 2, -1):
                name = f"cut-{i}-{group[i].path.name}"
                yield from changed(f"{kind}, cut off", name, group[i], lambda content: content[: len(content) * 2 // 3])
    damage, id3 = b"junk" * 700, b"ID3\x04\0\0\0\0\x07\x76" + bytes(1014)
    for i in (0, -1):
        content = vorbis[i].path.read_bytes()
        half = len(content) // 2
        (audio / f"damaged{i}.ogg").write_bytes(content[:half] + damage + content[half:])
        yield Made("Ogg, damaged", audio / f"damaged{i}.ogg")
        content = untagged[i].path.read_bytes()
        (audio / f"id3{i}.mp3").write_bytes(content + id3 + content)
        yield Made("MP3, joined", audio / f"id3{i}.mp3")
    wav = Made("", waves["a"])
    yield from joined("WAV, joined", "joined.wav", [wav, Made("", waves["b"])])
    yield from changed("WAV, cut off", "cut.wav", wav, lambda content: content[: len(content) // 2])


def _measure(report: Report, folder: Path, hours: float) -> None:
    """Prints what reading headers costs, and counting."""
    rate, rng = 16000, np.random.default_rng(2)
    long, short = folder / "long.wav", folder / "short.wav"
    minute = 0.1 * rng.standard_normal(60 * rate).astype(np.float32)
    with soundfile.SoundFile(long, "w", rate, 1, "PCM_16") as file:
        for _ in range(max(1, round(60 * hours))):
            file.write(minute)
    soundfile.write(short, minute[: 10 * rate], rate)
    commands: dict[str, list[str]] = {
        "MP3 with a tag": ["lame", "--quiet", "-V", "5", "IN", "OUT.mp3"],
        "MP3 without a tag": ["lame", "--quiet", "-t", "-V", "5", "IN", "OUT-t.mp3"],
        "Ogg Vorbis": ["oggenc", "-Q", "-o", "OUT.ogg", "IN"],
        "FLAC": ["flac", "-s", "-f", "-o", "OUT.flac", "IN"],
        "WAV": ["cp", "IN", "OUT-copy.wav"],
    }
    report.section("What it costs")
    report.text(
        f"CPU time of the header in `prepare` (with counting where the header is not enough), for a file of 10 s and "
        f"of {hours:g} h at 16 kHz, beside that of decoding the longer one."
    )
    rows = [
        table_row(["file", "10 s: header, µs", f"{hours:g} h: header, ms", "decoding, s", "counting, s per hour"]),
        "|---|---|---|---|---|",
    ]
    files = {}
    for kind, command in commands.items():
        for source in (short, long):
            target = str(folder / source.stem)
            filled = [part.replace("OUT", target).replace("IN", str(source)) for part in command]
            subprocess.run(filled, check=True, stderr=subprocess.DEVNULL)
            files[kind, source] = Path(next(part for part in filled if part.startswith(target) and part != str(source)))
    for source in (short, long):
        chain, piped = folder / f"{source.stem}-chain.ogg", folder / f"{source.stem}-pipe.flac"
        chain.write_bytes(2 * files["Ogg Vorbis", source].read_bytes())
        files["Ogg Vorbis, two links", source] = chain
        with piped.open("wb") as output:
            command = ["ffmpeg", "-v", "error", "-i", str(source), "-f", "flac", "-"]
            subprocess.run(command, stdout=output, check=True)
        files["FLAC without a length", source] = piped
    for kind in dict.fromkeys(kind for kind, _ in files):
        times = [_least_time(files[kind, source], 10 if source == short else 3) for source in (short, long)]
        info = read_header(File(str(files[kind, long])))
        before = time.process_time()
        _decode(files[kind, long], info.num_frames)  # type: ignore[union-attr]
        decoding = time.process_time() - before
        seconds = info.num_frames / rate  # type: ignore[union-attr]
        rows.append(
            table_row(
                [
                    kind,
                    f"{1e6 * times[0]:.0f}",
                    f"{1e3 * times[1]:.2f}",
                    f"{decoding:.2f}",
                    f"{times[1] * 3600 / seconds:.3f}",
                ]
            )
        )
    report.markdown("\n".join(rows) + "\n")


def _least_time(path: Path, rounds: int) -> float:
    times = []
    for _ in range(rounds):
        before = time.process_time()
        read_header(File(str(path)))
        times.append(time.process_time() - before)
    return min(times)


def _decode(path: Path, num_samples: int) -> None:
    source = {"type": "file", "channels": [0], "source": str(path)}
    seconds = num_samples / 16000
    recording = {
        "id": "a",
        "sources": [source],
        "sampling_rate": 16000,
        "num_samples": num_samples,
        "duration": seconds,
    }
    load_samples({"id": "a", "start": 0.0, "duration": seconds, "channel": 0, "recording": recording})


def _version_of_ffmpeg() -> str:
    return subprocess.run(["ffmpeg", "-version"], capture_output=True, text=True, check=True).stdout.split()[2]


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    raise SystemExit(main())
