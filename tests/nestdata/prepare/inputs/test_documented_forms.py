"""The forms of manifests that the documentation of other projects shows: each is read, or refused with what to do."""

import gzip
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from nestdata import Corpus, ManifestError
from tests.nestdata.prepare.inputs.reading import prepared
from tests.synthesis import hiss, read_audio, write_audio

NEMO = "docs.nvidia.com/nemo/speech/latest/asr/datasets.html"
NEMO_CODE = "NeMo 3.0, nemo/collections/common/parts/preprocessing/manifest.py"
KALDI = "kaldi-asr.org/doc/data_prep.html"
SEGMENTS = "Kaldi, src/featbin/extract-segments.cc"
WAV2VEC = "fairseq, examples/wav2vec/wav2vec_manifest.py"
SPEECH_TO_TEXT = "fairseq, examples/speech_to_text/prep_covost_data.py"
SCRIPTED = "github.com/common-voice/cv-dataset, datasets/scripted-speech"
SPONTANEOUS = "github.com/common-voice/cv-dataset, datasets/spontaneous-speech"
SPREADSHEET = "a spreadsheet that saves CSV"


class Span(NamedTuple):
    """What a cut should hold."""

    file: str
    start: int = 0
    stop: int | None = None
    channel: int = 0


A, B = Span("a.wav"), Span("b.wav")
# Source, files by name, name of the input, cuts by id, reasons of rejects. ROOT is the folder of the files.
READ: list[tuple[str, dict[str, str], str, dict[str, Span], list[str]]] = [
    (NEMO, {"m.json": '{"audio_filepath": "ROOT/a.wav", "text": "x", "duration": 0.5}\n'}, "m.json", {"a": A}, []),
    (NEMO_CODE, {"m.json": '{"audio_filename": "a.wav", "duration": 0.5}\n'}, "m.json", {"a": A}, []),
    (NEMO_CODE, {"l/m.json": '{"audio_filepath": "~/a.wav", "duration": 0.5}\n'}, "l/m.json", {"ROOT/a": A}, []),
    (NEMO_CODE, {"m.json": '{"audio_filepath": "a.wav", "offset": 0.25, "duration": 0.125, "rttm_filepath": null}\n'},
     "m.json", {"a@0.250+0.125": Span("a.wav", 4000, 6000)}, []),
    (NEMO_CODE, {"m.json": '\n{"audio_filepath": "a.wav", "duration": null, "label": "infer", "text": "-"}\r\n\r\n'},
     "m.json", {"a": A}, []),
    ("issue 41", {"m.json": '{"audio_filepath": "x_{0..3}.wav"}\n{"audio_filepath": "y[0..1]/a.wav"}\n'},
     "m.json", {"x_{0..3}": A, "y[0..1]/a": A}, []),
    (KALDI, {"k/wav.scp": "r1 ROOT/a.wav\n", "k/utt2spk": "r1 s1\n", "k/spk2utt": "s1 r1\n"}, "k", {"r1": A}, []),
    (KALDI, {"k/wav.scp": "r1 ROOT/a.wav\n", "k/segments": "u1 r1 0.125 0.25\n",
             "k/reco2file_and_channel": "r1 a A\n", "k/text": "u1 HELLO\n"},
     "k", {"u1": Span("a.wav", 2000, 4000)}, []),
    (SEGMENTS, {"k/wav.scp": "r ROOT/st.wav\n",
                "k/segments": "u0 r 0.125 0.25 0\nu1 r 0.25 -1 1\nu2 r 0 0.25\nu3 r 0 1e-1 2\n"},
     "k", {"u0": Span("st.wav", 2000, 4000, 0), "u1": Span("st.wav", 4000, None, 1), "u2": Span("st.wav", 0, 4000, 0)},
     ["no_such_channel"]),
    (WAV2VEC, {"l/train.tsv": "ROOT\na.wav\t8000\nb.wav\t8000\n"}, "l/train.tsv", {"a": A, "b": B}, []),
    (WAV2VEC, {"train.tsv": "/\nROOT/a.wav\t8000\n", "train.ltr": "X |\n", "train.km": "1 2\n"},
     "train.tsv", {"BARE/a": A}, []),
    ("facebookresearch/fairseq#4414",
     {"l/train.tsv": "ROOT\na.wav:4000:2000\t2000\nwide.wav:22050:11025\t11025\nb.wav:7000:2000\t2000\n"},
     "l/train.tsv",
     {"a:4000:2000": Span("a.wav", 4000, 6000), "wide:22050:11025": Span("wide.wav", 22050, 33075)},
     ["wrong_duration"]),
    (SPEECH_TO_TEXT, {"train.tsv": "id\taudio\tn_frames\ttgt_text\n1\tROOT/a.wav\t50\tx\n2\tb.wav:0:800\t5\ty\n"},
     "train.tsv", {"a": A, "b:0:800": Span("b.wav", 0, 800)}, []),
    (SCRIPTED, {"cv/validated.tsv": 'client_id\tpath\tsentence\nx\td.wav\tHe said "no\ny\te.wav\t"Yes"\n'},
     "cv/validated.tsv", {"d": Span("cv/clips/d.wav"), "e": Span("cv/clips/e.wav")}, []),
    (SPONTANEOUS, {"cv/ss-corpus-en.tsv": "client_id\taudio_id\taudio_file\tduration_ms\nx\t1\tf.wav\t500\n"},
     "cv/ss-corpus-en.tsv", {"f": Span("cv/audios/f.wav")}, []),
    ("common-voice/common-voice#4839", {"t.tsv": "path\ttext\na.wav\tone\ttwo\nb.wav\tok\n"}, "t.tsv", {"b": B},
     ["malformed_row"]),
    (SPREADSHEET, {"t.csv": '\ufeffpath;text\r\na.wav;"one;\r\ntwo"\r\nb.wav;x;;\r\nc.wav;y;z\r\n'}, "t.csv",
     {"a": A, "b": B}, ["malformed_row"]),
]  # fmt: skip
REFUSED: list[tuple[str, dict[str, str], str, str]] = [
    (NEMO_CODE, {"m.json": '{"audio_filepath": ["a.wav", "b.wav"], "duration": 1}\n'}, "m.json",
     r"m\.json:1: audio_filepath is .*`sox -M`"),
    (NEMO_CODE, {"l/m.json": '{"audio_filepath": "gone.wav", "duration": 0.5}\n'}, "l/m.json",
     r"ROOT/l/gone\.wav does not exist, nor below ROOT\."),
    (KALDI, {"k/wav.scp": "r1 sox ROOT/a.wav -t wav - |\n"}, "k", r"wav\.scp:1: command, a command instead of a file"),
    ("ESPnet", {"k/wav.scp": "r1 data/a.ark:17\n"}, "k", r"wav\.scp:1: 'data/a\.ark:17' is in a Kaldi archive"),
    (WAV2VEC, {"train.tsv": "/moved/root\na.wav\t8000\n"}, "train.tsv",
     r"/moved/root/a\.wav does not exist; .* the folder on line 1, /moved/root, which does not exist; write there"),
]  # fmt: skip


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current and the home directory, with audio."""
    names = ("a", "b", "x_{0..3}", "y[0..1]/a", "wavs/c", "cv/clips/d", "cv/clips/e", "cv/audios/f")
    for number, name in enumerate(names):
        write_audio(tmp_path / f"{name}.wav", hiss(8000, 0 if name[0] in "axy" else number))
    write_audio(tmp_path / "wide.wav", hiss(44100, 50), 44100)
    write_audio(tmp_path / "st.wav", np.stack([hiss(8000, 60), hiss(8000, 61)], axis=1))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        content = text.replace("ROOT", str(root)).encode()
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)


@pytest.mark.parametrize(("source", "files", "given", "cuts", "reasons"), READ)
def test_a_documented_form_is_read(
    root: Path, source: str, files: dict[str, str], given: str, cuts: dict[str, Span], reasons: list[str]
) -> None:
    write(root, files)
    found, rejects = prepared(root / given, report_samples=0, min_seconds=0.01)
    expected = {name.replace("ROOT", str(root)).replace("BARE", str(root)[1:]): span for name, span in cuts.items()}
    assert (source, [reject["reason"] for reject in rejects]) == (source, reasons)
    assert sorted(found) == sorted(expected)
    corpus = Corpus.open(root / f"{given}.corpus")
    for index in range(len(corpus)):
        row, (name, samples) = corpus.line(index), corpus.load(index)
        file, start, stop, channel = expected[name]
        assert row["recording"]["sources"][0]["source"] == str(root / file) or name[0] in "xy"
        if file == "wide.wav":  # resampled
            assert (row["start"], row["duration"], len(samples)) == (0.5, 0.25, 4000)
        else:
            audio = read_audio(root / file).reshape(8000, -1)
            np.testing.assert_array_equal(samples, audio[start:stop, channel])


@pytest.mark.parametrize(("source", "files", "given", "message"), REFUSED)
def test_another_form_is_refused_with_what_to_do(
    root: Path, source: str, files: dict[str, str], given: str, message: str
) -> None:
    write(root, files)
    with pytest.raises(ManifestError) as caught:
        prepared(root / given, report_samples=0)
    assert re.search(message.replace("ROOT", re.escape(str(root))), str(caught.value)), (source, str(caught.value))
