import json
import sys
from pathlib import Path

import pytest
import soundfile

from nestcli.nestdata import main
from nestdata import Corpus
from tests.cli.commands import run
from tests.conftest import MessyCorpora
from tests.nestdata.prepare.recordings import joined, needs_vad
from tests.synthesis import chirp, tone, write_audio, write_jsonl


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if not line.startswith("checking audio:")]  # on a slow machine
    assert captured.out == ""
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("error: ")
    return lines[0]


def manifest_of(directory: Path, num_cuts: int = 3) -> Path:
    for i in range(num_cuts):
        write_audio(directory / f"{i}.wav", chirp(100, 900, 1.0 + 0.2 * i))
    return write_jsonl(directory / "speech.json", [{"audio_filepath": f"{i}.wav"} for i in range(num_cuts)])


@pytest.mark.slow
def test_prepare_passes_its_options_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i in range(3):
        write_audio(tmp_path / "calls" / f"{i}.wav", chirp(100, 900, 2.5, 8000), 8000)
    write_audio(tmp_path / "calls" / "silent.wav", 0 * chirp(100, 900, 2.5))
    options = ["--format", "folder", "--probe", "decode", "--window-seconds", "1", "--sampling-rate", "8000"]
    options += ["--pcm", "-j", "2", "--channel", "mix"]
    assert main(["prepare", str(tmp_path / "calls"), "-o", str(tmp_path / "a.corpus"), *options, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["num_cuts"], summary["rejected"]) == (9, {"silent": 3})
    corpus = Corpus.open(tmp_path / "a.corpus")
    assert set(corpus.num_samples.tolist()) == {20000 // 3}
    assert (corpus.path / "bank.pcm").stat().st_size == 2 * 9 * (20000 // 3)
    assert (corpus.path / "report.html").is_file()
    assert corpus.line(0)["custom"] == {"nest_channel": "mix"}
    for refusal, message in (("--strict", "--strict allows none"), ("--min-rate=16001", "rate_too_low")):
        output = tmp_path / "b.corpus"
        assert main(["prepare", str(tmp_path / "calls"), "-o", str(output), *options, refusal]) == 1
        assert message in error_of(capsys)
        assert not output.exists()


@needs_vad
def test_prepare_prints_how_much_speech_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_audio(tmp_path / "talks" / "talk.wav", joined([0.5, 3.0]).samples)
    options = ["--segment", "vad", "--max-segment-seconds", "20", "--min-segment-seconds", "1", "--max-pause", "1.5"]
    assert main(["prepare", str(tmp_path / "talks"), "-o", str(tmp_path / "a.corpus"), *options]) == 0
    printed = capsys.readouterr().out
    assert "2 cuts" in printed
    assert "speech found by silero-vad 6" in printed
    settings = Corpus.open(tmp_path / "a.corpus").meta["settings"]["segment"]
    assert settings == {"min_seconds": 1.0, "max_seconds": 20.0, "max_pause": 1.5, "padding_seconds": 0.3}


@pytest.mark.slow
def test_preview_writes_pictures_sound_and_a_page_for_up_to_eight_cuts(
    messy_corpora: MessyCorpora, tmp_path: Path
) -> None:
    outcome = run(
        *("nestdata", "sample-batch", "preview", messy_corpora.speech, "--noise", messy_corpora.noise),
        *("--step", 2, "--max-batch-seconds", 20, "--mix-prob", 1.0, "-o", "preview"),
        *("--microbatches-per-step", 1),
        cwd=tmp_path,
    )
    assert outcome.code == 0, outcome.err
    directory = tmp_path / "preview"
    digest = json.loads((directory / "batch.json").read_text())
    assert digest["key"]["step"] == 2
    num_shown = min(8, len(digest["sample_id"]))
    assert len(list(directory.glob("*.png"))) == num_shown > 3
    for i in range(num_shown):
        signals = {name: soundfile.read(directory / f"{i:02d}_{name}.wav")[0] for name in ("clean", "noise", "noisy")}
        assert abs(signals["noisy"] - signals["clean"] - signals["noise"]).max() < 1e-6
        assert (directory / f"{i:02d}.png").read_bytes()[:4] == b"\x89PNG"
    page = (directory / "index.html").read_text()
    for cut_id in digest["sample_id"]:
        assert cut_id in page
        assert cut_id in outcome.out
    assert page.count("<img") == num_shown


@pytest.mark.parametrize(
    ("blocked", "option", "extra"),
    [
        ("distributed", "--dask=tcp://host:1", "dask"),
        ("pyarrow", "--jobs=1", "huggingface"),
        ("silero_vad", "--segment=vad", "vad"),
    ],
)
def test_a_missing_extra_is_one_line_with_the_pip_command(
    blocked: str,
    option: str,
    extra: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    saved = tmp_path / "saved"  # recognised as a Hugging Face data set by the names of its files
    saved.mkdir()
    for name in ("dataset_info.json", "state.json"):
        (saved / name).write_text("{}")
    given = saved if extra == "huggingface" else write_audio(tmp_path / "audio" / "a.wav", tone(300, 1.0)).parent
    before = sorted(tmp_path.iterdir())
    monkeypatch.setitem(sys.modules, blocked, None)
    assert main(["prepare", str(given), "-o", str(tmp_path / "a.corpus"), option]) == 2
    assert f"pip install 'nest-pretrain[{extra}]'" in error_of(capsys)
    assert sorted(tmp_path.iterdir()) == before
