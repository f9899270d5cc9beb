import gzip
import json
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from nestdata import ManifestError, PrepareConfig, ProbeMode, prepare_corpus
from nestdata.prepare.inputs import lines as lines_module
from nestdata.prepare.inputs.lines import MAX_LINE_BYTES, Manifest
from tests.nestdata.prepare.inputs.reading import lhotse_cut, some_audio
from tests.synthesis import hiss, write_audio

LIMIT = 1000


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "MAX_LINE_BYTES", LIMIT)


@pytest.mark.parametrize("name", ["m.json", "m.json.gz"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_lines_of_plain_and_compressed_files_are_read_without_the_byte_order_mark(
    tmp_path: Path, name: str, mark: bytes
) -> None:
    content = mark + b"one\r\n\ntwo\n"
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert list(Manifest(tmp_path / name).lines()) == [b"one\r\n", b"\n", b"two\n"]


@pytest.mark.parametrize("damage", ["truncated", "not compressed"])
def test_a_damaged_compressed_file_is_an_error(tmp_path: Path, damage: str) -> None:
    lines = b"".join(b"line %d\n" % number for number in range(500))
    (tmp_path / "m.json.gz").write_bytes(gzip.compress(lines)[:-20] if damage == "truncated" else lines)
    with pytest.raises(ManifestError, match=r"m\.json\.gz: cannot be read \(.+\)\. Check the file and copy it again"):
        list(Manifest(tmp_path / "m.json.gz").lines())
    with pytest.raises(ManifestError, match=r"m\.json\.gz: cannot be read"):
        Manifest(tmp_path / "m.json.gz").count()


@pytest.mark.usefixtures("short")
def test_the_longest_line_that_is_allowed_is_read_with_its_newline_or_without(tmp_path: Path) -> None:
    for content in (b"a" * (LIMIT - 1) + b"\n" + b"b" * LIMIT, b"a" * LIMIT):
        (tmp_path / "m.json").write_bytes(content)
        assert b"".join(Manifest(tmp_path / "m.json").lines()) == content


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("content", [b"a" * LIMIT + b"\n", b"a" * (LIMIT + 1)])
def test_a_longer_line_is_an_error_that_shows_its_number_and_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("m.json").write_bytes(b"1\n2\n3\n" + content)
    lines = Manifest(Path("m.json")).lines()
    assert [next(lines), next(lines), next(lines)] == [b"1\n", b"2\n", b"3\n"]
    with pytest.raises(ManifestError, match=r"^m\.json:4: a line of more than 0 MiB, .* b'a{80}'\. Check") as caught:
        next(lines)
    assert len(str(caught.value)) < 300


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("name", ["nemo.json.gz", "first.json", "fairseq.tsv", "kaldi/text"])
def test_every_reader_of_lines_refuses_a_line_that_is_too_long(tmp_path: Path, name: str) -> None:
    some_audio(tmp_path / "a.wav")
    (tmp_path / "kaldi").mkdir()
    (tmp_path / "kaldi" / "wav.scp").write_text(f"a {tmp_path}/a.wav\n")
    long = b"b" * 2 * LIMIT
    first = {"first.json": b"", "fairseq.tsv": b"%s\n" % str(tmp_path).encode(), "kaldi/text": b"a text\n"}
    content = first.get(name, b'{"audio_filepath": "a.wav"}\n' if "nemo" in name else b"") + long
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    given = tmp_path / "kaldi" if name.startswith("kaldi") else tmp_path / name
    with pytest.raises(ManifestError, match=rf"{name}:[12]: a line of more than"):
        prepare_corpus([given], tmp_path / "speech.corpus")
    assert not list(tmp_path.glob("speech.corpus*"))


def test_a_manifest_that_is_pickled_or_printed_while_it_is_read_goes_on_with_the_next_line(tmp_path: Path) -> None:
    for name in ("list.txt", "list.txt.gz"):
        content = [b"%d.wav\n" % number for number in range(50)]
        whole = b"".join(content)
        (tmp_path / name).write_bytes(gzip.compress(whole) if name.endswith(".gz") else whole)
        manifest = Manifest(tmp_path / name)
        lines = manifest.lines()
        assert next(lines) == content[0]
        assert list(pickle.loads(pickle.dumps(manifest)).lines()) == content
        assert name in repr(manifest)
        assert list(lines) == content[1:]


def test_all_lines_of_a_list_whose_format_is_given_are_read(tmp_path: Path) -> None:
    for number in range(12):
        write_audio(tmp_path / f"{number}.wav", hiss(8000, number))
    (tmp_path / "list.txt").write_text("".join(f"{number}.wav\n" for number in range(12)))
    probes: tuple[ProbeMode, ...] = ("all", "decode")
    for probe in probes:
        config = PrepareConfig(probe=probe, format="list")
        report = prepare_corpus([tmp_path / "list.txt"], tmp_path / f"{probe}.corpus", config)
        assert (report.num_cuts, report.rejected) == (12, {})


def test_a_line_that_is_too_long_takes_bounded_memory(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "m.json.gz", "wb", 1) as file:
        for _ in range(4):
            file.write(b"a" * MAX_LINE_BYTES)
    tracemalloc.start()
    try:
        with pytest.raises(ManifestError, match="a line of more than 16 MiB"):
            list(Manifest(tmp_path / "m.json.gz").lines())
        assert tracemalloc.get_traced_memory()[1] < 3 * MAX_LINE_BYTES
    finally:
        tracemalloc.stop()


def test_members_of_gzip_and_zeros_behind_them_are_read_as_gzip_does(tmp_path: Path) -> None:
    (tmp_path / "m.json.gz").write_bytes(gzip.compress(b"1\n2") + gzip.compress(b"3\n") + bytes(100))
    assert list(Manifest(tmp_path / "m.json.gz").lines()) == [b"1\n", b"23\n"]


@pytest.mark.parametrize("form", ["nemo", "array", "lhotse", "list", "csv", "fairseq"])
def test_a_manifest_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    file = some_audio(tmp_path / "a.wav")
    row = json.dumps({"audio_filepath": "a.wav", "duration": 0.5})
    contents = {
        "nemo": row, "array": f"[{row}]", "lhotse": json.dumps(lhotse_cut(path=str(file))), "list": "a.wav",
        "csv": "path,text\na.wav,words\n", "fairseq": f"{tmp_path}\na.wav\t8000\n",
    }  # fmt: skip
    manifest = tmp_path / ("m.tsv" if form == "fairseq" else "m.any")
    manifest.write_text(contents[form])
    opened, open_path = [], Path.open

    def counted(path: Path, *args: Any, **kwargs: Any) -> Any:
        opened.append(path)
        return open_path(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", counted)
    prepare_corpus([manifest], tmp_path / "speech.corpus", on_progress=lambda _: None)
    assert opened.count(manifest) == 1


def test_more_manifests_are_read_than_stay_open(tmp_path: Path) -> None:
    for number in range(12):
        some_audio(tmp_path / f"{number}.wav")
        (tmp_path / f"{number}.json").write_text(json.dumps({"audio_filepath": f"{number}.wav"}))
    report = prepare_corpus([tmp_path / f"{number}.json" for number in range(12)], tmp_path / "speech.corpus")
    assert report.num_cuts == 12
