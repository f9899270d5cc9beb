"""No name, URL, transform or corpus starts a process, unless commands are allowed."""

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nestdata import (
    AudioError,
    Corpus,
    CorpusError,
    ManifestError,
    PrepareConfig,
    pack_corpora,
    prepare_corpus,
    verify_corpus,
)
from nestdata.audio.encoded import EncodedAudio
from nestdata.audio.torchcodec_audio import TorchcodecAudio
from tests.nestdata.prepare.inputs.reading import lhotse_cut, lhotse_recording
from tests.synthesis import folder_corpus, hiss, read_audio, read_jsonl, write_audio, write_jsonl

REPOSITORY = Path(__file__).parents[2]
# A SPHERE file with shorten, which libsndfile does not read.
SHORTEN = (
    b"NIST_1A\n   1024\nsample_count -i 8000\nsample_rate -i 16000\nchannel_count -i 1\nsample_n_bytes -i 2\n"
    b"sample_coding -s26 pcm,embedded-shorten-v2.00\nend_head\n"
).ljust(1024) + b"ajkg\x02\xfb\xb1"
HOSTILE_NAMES = (
    "$(touch PWNED).sph",
    "a;touch PWNED;.sph",
    "a';touch PWNED;'.opus",
    "pipe:touch PWNED;.wav",
)
HOSTILE_URLS = (
    "pipe:touch PWNED",
    "-",
    "a.wav",
    "file:///etc/passwd",
    "ftp://host/a.wav",
)

_started: list[str] = []


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("subprocess.Popen", "os.system", "os.posix_spawn", "os.exec", "os.fork", "os.forkpty"):
        _started.append(f"{event} {arguments[:2]}")


sys.addaudithook(_note)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Puts programs that decode audio on the path, which write their arguments to the file that is returned."""
    log = tmp_path / "programs.log"
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sph2pipe", "ffmpeg", "avconv", "sox", "wget"):
        (folder / name).write_text(f'#!/bin/sh\necho "$0 $*" >> {log}\n')
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return log


@pytest.fixture(autouse=True)
def nothing_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, programs: Path) -> Iterator[None]:
    """Checks that a test starts no process, and that no command of a hostile name has run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LHOTSE_LEGACY_OPUS_LOADING", "1")
    _started.clear()
    yield
    assert _started == []
    assert not programs.exists()
    assert not list(tmp_path.rglob("PWNED"))


def rejects_of(corpus: Path) -> dict[str, tuple[str, str]]:
    return {row["cut_id"]: (row["reason"], row["detail"]) for row in read_jsonl(corpus / "rejected.jsonl")}


def corpus_with(directory: Path, source: dict[str, Any], transforms: list[dict[str, Any]] | None = None) -> Path:
    """Returns a corpus of one cut that somebody has changed by hand."""
    path = folder_corpus(directory / "audio", {"a.wav": hiss(8000, 1)}).path
    line = json.loads((path / "cuts.jsonl").read_text())
    line["recording"]["sources"][0] |= source
    if transforms:
        line["recording"]["transforms"] = transforms
    content = json.dumps(line) + "\n"
    (path / "cuts.jsonl").write_text(content)
    meta = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps(meta | {"num_bytes": len(content)}))
    return path


@pytest.mark.parametrize("content", [SHORTEN, b"OggS"])
def test_names_of_files_in_a_folder_reach_no_shell(tmp_path: Path, content: bytes) -> None:
    folder = tmp_path / "audio"
    write_audio(folder / "good.wav", hiss(8000, 1))
    for name in HOSTILE_NAMES:
        (folder / name).write_bytes(content)
    report = prepare_corpus([folder], tmp_path / "out", PrepareConfig(probe="decode", pcm=True))
    assert (report.num_cuts, report.rejected) == (1, {"unreadable": len(HOSTILE_NAMES)})


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_names_of_files_in_manifests_reach_no_shell(tmp_path: Path, name: str) -> None:
    write_audio(tmp_path / "a.wav", hiss(8000, 1))
    (tmp_path / name).write_bytes(SHORTEN)
    good = {"audio_filepath": "a.wav", "duration": 0.5}
    nemo = write_jsonl(tmp_path / "nemo.json", [good, {"audio_filepath": name, "duration": 0.5}])
    lhotse = write_jsonl(tmp_path / "cuts.jsonl", [lhotse_cut("c0", "a.wav"), lhotse_cut("c1", name)])
    for manifest in (nemo, lhotse):
        prepare_corpus([manifest], tmp_path / "decoded", PrepareConfig(probe="decode"), overwrite=True)
        assert [reason for reason, _ in rejects_of(tmp_path / "decoded").values()] == ["unreadable"]
        # With trusted durations, the name is in the corpus, and is read when the corpus is.
        prepare_corpus([manifest], tmp_path / "trusted", PrepareConfig(probe="missing"), overwrite=True)
        corpus = Corpus.open(tmp_path / "trusted")
        bad = next(i for i in range(2) if corpus.line(i)["recording"]["sources"][0]["source"].endswith(name))
        with pytest.raises(AudioError) as caught:
            corpus.load(bad)
        assert caught.value.reason == "unreadable"


def test_sphere_with_shorten_is_rejected_with_advice_and_plain_sphere_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import soundfile

    monkeypatch.setattr("nestdata.audio.torchcodec_audio.problem", lambda: "install torchcodec")

    samples = hiss(8000, 1)
    (tmp_path / "audio").mkdir()
    soundfile.write(tmp_path / "audio" / "plain.sph", samples, 16000, format="NIST", subtype="PCM_16")
    (tmp_path / "audio" / "shorten.sph").write_bytes(SHORTEN)
    (tmp_path / "audio" / "a.m4a").write_bytes(b"\0\0\0\x20ftypM4A " + bytes(64))
    prepare_corpus([tmp_path / "audio"], tmp_path / "out", PrepareConfig(probe="decode"))
    np.testing.assert_array_equal(
        Corpus.open(tmp_path / "out").load(0)[1], read_audio(tmp_path / "audio" / "plain.sph")
    )
    rejects = rejects_of(tmp_path / "out")
    assert "convert this one, for example with sph2pipe" in rejects["shorten"][1]
    assert "install torchcodec, or convert the file to FLAC (M4A)" in rejects["a"][1]


def test_torchcodec_is_given_absolute_paths_or_bytes_and_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import soundfile

    given: list[str | bytes] = []

    class Noting(TorchcodecAudio):
        def __init__(self, source: str | bytes, min_seconds: float) -> None:
            assert min_seconds == 0
            given.append(source)

        def close(self) -> None:
            pass

    monkeypatch.setattr("nestdata.audio.encoded.TorchcodecAudio", Noting)
    monkeypatch.setattr("nestdata.audio.torchcodec_audio.problem", lambda: "")
    monkeypatch.chdir(tmp_path)
    content = b"\0\0\0\x20ftypM4A " + bytes(64)
    Path("http:a.m4a").write_bytes(content)
    for audio in (EncodedAudio("http:a.m4a"), EncodedAudio("concat:a|b", content)):
        with audio.open():
            pass
    for text in (b"#EXTM3U\n#EXTINF:1\nhttp://localhost/a.ts\n", b"ffconcat version 1.0\nfile /etc/passwd\n", b"v=0\n"):
        with pytest.raises(soundfile.LibsndfileError), EncodedAudio("a.m4a", text).open():
            pass
    assert given == [str(tmp_path / "http:a.m4a"), content]


@pytest.mark.parametrize("url", HOSTILE_URLS)
def test_a_url_of_a_manifest_has_the_scheme_of_a_store(tmp_path: Path, url: str) -> None:
    write_audio(tmp_path / "a.wav", hiss(8000, 1))
    cut = lhotse_cut("c1")
    cut["recording"]["sources"] = [{"type": "url", "channels": [0], "source": url}]
    manifest = write_jsonl(tmp_path / "cuts.jsonl", [cut])
    config = PrepareConfig(probe="decode")
    message = r"cuts\.jsonl:1: invalid_url, .*: is not a URL of an object store: expected one of s3://, "
    with pytest.raises(ManifestError, match=message):
        prepare_corpus([manifest], tmp_path / "out", config)


@pytest.mark.parametrize(
    "source",
    [
        *({"type": "url", "source": url} for url in HOSTILE_URLS),
        {"type": "command", "source": "touch PWNED"},
        {"type": "shar", "source": "pipe:touch PWNED"},
        {"type": "shar_ptr", "source": "pipe:touch PWNED?o=0&e=512"},
        {"type": "file", "source": "pipe:touch PWNED"},
        {"type": "file", "source": "$(touch PWNED).sph"},
    ],
)
def test_a_corpus_of_others_runs_nothing(tmp_path: Path, source: dict[str, Any]) -> None:
    corpus = Corpus.open(corpus_with(tmp_path, source))
    with pytest.raises(AudioError, match="cut 'a'"):
        corpus.load(0)


@pytest.mark.parametrize(
    "transform",
    [
        {
            "name": "ReverbWithImpulseResponse",
            "kwargs": {
                "rir": lhotse_recording("a.wav")
                | {"sources": [{"type": "command", "channels": [0], "source": "touch PWNED"}]},
            },
        },
        {"name": "NoSuchTransform", "kwargs": {}},
        {"name": "Resample", "kwargs": {"source_sampling_rate": 16000, "target_sampling_rate": 10**9}},
    ],
)
def test_a_transform_that_would_read_other_audio_or_take_much_memory_is_refused(
    tmp_path: Path, transform: dict[str, Any]
) -> None:
    volume = {"name": "Volume", "kwargs": {"factor": 1.0}}
    corpus = Corpus.open(corpus_with(tmp_path, {}, [volume, transform]))
    with pytest.raises(AudioError, match=r"transform '.*' .*is not supported"):
        corpus.load(0)
    cut = lhotse_cut("c1")
    cut["recording"]["transforms"] = [transform]
    with pytest.raises(ManifestError, match=r"cuts\.jsonl:1: "):
        prepare_corpus([write_jsonl(tmp_path / "cuts.jsonl", [cut])], tmp_path / "out")


def test_a_command_of_a_corpus_is_a_reject_wherever_audio_is_read(tmp_path: Path) -> None:
    path = corpus_with(tmp_path, {"type": "command", "source": "touch PWNED"})
    with pytest.raises(CorpusError, match=r"'a': unreadable, .*touch PWNED"):
        pack_corpora([path], tmp_path / "packed")
    assert verify_corpus(path, decode=True).problems
    for given in (path, path / "cuts.jsonl"):
        with pytest.raises(ManifestError, match=r"cuts\.jsonl:1: command, .*'touch PWNED'.*Write the audio to files"):
            prepare_corpus([given], tmp_path / "again")


def test_no_module_starts_a_shell_or_loads_audio_by_lhotse() -> None:
    shells, loads = [], []
    for folder in ("nestdata", "nestmodel", "nestguard", "cli"):
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.keyword) and node.arg == "shell":
                    shells.append(path.relative_to(REPOSITORY).as_posix())
                if isinstance(node, ast.Attribute | ast.Name | ast.alias):
                    name = getattr(node, "attr", None) or getattr(node, "id", None) or getattr(node, "name", None)
                    if name == "load_audio" and not isinstance(node, ast.Attribute):
                        continue  # our function of this name; that of Lhotse is a method
                    if name in ("load_audio", "open_best", "read_sph", "getstatusoutput", "getoutput", "popen"):
                        loads.append((path.name, name))
    assert shells == []
    assert loads == []
