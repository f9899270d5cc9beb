from pathlib import Path
from typing import Any

import pytest

from nestdata import ManifestError
from nestdata.prepare.inputs.entry import Entry, File
from tests.nestdata.prepare.inputs.reading import entries_of, prepared, some_audio


def kaldi(directory: Path, **files: str | bytes) -> Path:
    """Writes a data directory; `wav` is the content of wav.scp."""
    directory.mkdir(exist_ok=True)
    for name, content in files.items():
        content = content if isinstance(content, bytes) else content.encode()
        (directory / {"wav": "wav.scp"}.get(name, name)).write_bytes(content)
    return directory


def spans_of(directory: Path) -> list[tuple[str, float, float | None]]:
    return [(entry.cut_id, entry.offset, entry.duration) for entry in entries_of(directory)]


def test_without_segments_recordings_are_utterances(tmp_path: Path) -> None:
    directory = kaldi(
        tmp_path / "data",
        wav="u1 /audio/a.wav\nu2 /audio/b c.wav\n",
        text="u1 hello  there\n",
        utt2spk="u2 s2\nu1 s1\n",
        utt2lang="u1 en\nu9 fr\n",
    )
    labels = {"text": "hello  there", "speaker": "s1", "language": "en"}
    assert entries_of(directory) == [
        Entry(where=f"{directory}/wav.scp:1", cut_id="u1", audio=File("/audio/a.wav"), labels=labels),
        Entry(where=f"{directory}/wav.scp:2", cut_id="u2", audio=File("/audio/b c.wav"), labels={"speaker": "s2"}),
    ]


@pytest.mark.parametrize(
    ("files", "span"),
    [
        ({"segments": "u r 1 -1"}, ("u", 1.0, None)),
        ({"segments": "u r 1 -1", "utt2dur": "u 2.5\n"}, ("u", 1.0, 2.5)),
        ({"segments": "u r 1 -1", "reco2dur": "r 3\n"}, ("u", 1.0, 2.0)),
        ({"segments": "u r 1 2.5", "utt2dur": "u 9\n", "reco2dur": "r 9\n"}, ("u", 1.0, 1.5)),
        ({"utt2dur": "r 2.5\n", "reco2dur": "r 3\n"}, ("r", 0.0, 2.5)),
    ],
)
def test_durations_come_from_the_most_specific_file_that_has_them(
    tmp_path: Path, files: dict[str, Any], span: tuple[str, float, float | None]
) -> None:
    assert spans_of(kaldi(tmp_path / "data", wav="r /a.wav\n", **files)) == [span]


@pytest.mark.parametrize(
    ("value", "channel"),
    [
        ("cat /a.wav |", None),
        ("flac -c -d -s /a.wav |", None),
        ("sph2pipe -f wav -p -c 1 /a.wav |", 0),
        ("/tools/sph2pipe_v2.5/sph2pipe -c 2 -p -f wav /a.wav |", 1),
    ],
)
def test_a_pipe_that_only_passes_on_a_file_is_that_file(tmp_path: Path, value: str, channel: int | None) -> None:
    (entry,) = entries_of(kaldi(tmp_path / "data", wav=f"u1 {value}\n"))
    assert (entry.audio, entry.channel) == (File("/a.wav"), channel)


@pytest.mark.parametrize(
    "value",
    [
        *("cat -n /a.wav |", "cat /a.wav | cat |", "cat $(touch ran) |", "cat `touch ran` |", "cat /a.wav > ran |"),
        *("cat /a.wav; touch ran |", "cat '/a.wav |", "flac -c -d -s --skip=9 /a.wav |", "touch ran |"),
        *("sph2pipe -f wav -c 3 /a.wav |", "sox /a.wav -t wav - |"),
    ],
)
def test_any_other_command_is_a_reject_and_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.chdir(tmp_path)
    some_audio(tmp_path / "a.wav")
    directory = kaldi(tmp_path / "data", wav=f"u0 {tmp_path}/a.wav\nu1 {value}\n")
    cuts, (reject,) = prepared(directory, probe="decode")
    assert (list(cuts), reject["cut_id"], reject["reason"]) == (["u0"], "u1", "command")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"wav": "u0 /a.wav\nu1\n"}, r"wav\.scp:2: not a recording and its file or command: b'u1"),
        ({"segments": "u1 r1 0 1\n\nu2 r2 0 1\n"}, r"segments:3: recording 'r2' is not in wav\.scp\. Add it there"),
        ({"segments": "u1 r1 0 1 -1\n"}, r"segments:1: .* 'u1 r1 0 1 -1'"),
        ({"segments": "u1 r1 zero 1\n"}, r"segments:1: 'zero' is not a number of seconds"),
        ({"segments": "u1 r1 2 1.5\n"}, r"segments:1: a segment from 2 s to 1\.5 s"),
        ({"utt2dur": "r1 1.5\nr2 long\n"}, r"utt2dur, r2: 'long' is not a number of seconds"),
    ],
)
def test_a_bad_line_is_an_error_that_names_the_line(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    directory = kaldi(tmp_path / "data", **{"wav": "r1 /a.wav\n", **files})
    with pytest.raises(ManifestError, match=message):
        entries_of(directory)
