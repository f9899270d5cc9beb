import gzip
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lhotse import CutSet

from nestdata import ConfigError, Corpus, CorpusError, ManifestError, PrepareConfig, prepare
from nestdata.audio import load_samples
from tests.conftest import MessyCorpora
from tests.synthesis import hiss, read_audio, tone, write_audio, write_jsonl


def tree(directory: Path) -> dict[str, bytes | None]:
    """Everything below a directory, by relative path; None stands for a folder."""
    return {
        str(path.relative_to(directory)): None if path.is_dir() else path.read_bytes()
        for path in sorted(directory.rglob("*"))
    }


def rejects_of(corpus: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (corpus / "rejected.jsonl").read_text().splitlines()]


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    """Three lines of NeMo, with paths relative to a folder of their own."""
    rows = []
    for i in range(3):
        write_audio(tmp_path / "data" / "wavs" / f"{i}.flac", hiss(8000 + 1000 * i, i))
        rows.append({"audio_filepath": f"wavs/{i}.flac", "duration": (8000 + 1000 * i) / 16000, "text": f"wort ü{i}"})
    return write_jsonl(tmp_path / "data" / "speech.json", rows)


@contextmanager
def paused_prepare(manifest: Path, output: Path, *, after: int = 1) -> Iterator["subprocess.Popen[str]"]:
    """Runs `prepare` in a process of its own, which stands still once it has looked at some entries."""
    program = """
import sys
from nestdata import prepare
def stand_still(done, total):
    if done == int(sys.argv[3]):
        print("in the middle", flush=True)
        sys.stdin.read()
prepare([sys.argv[1]], sys.argv[2], overwrite=True, on_progress=stand_still)
"""
    command = [sys.executable, "-c", program, str(manifest), str(output), str(after)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "in the middle\n"
            yield process
        finally:
            process.kill()


def test_a_nemo_manifest_is_prepared_with_its_relative_paths_and_labels(manifest: Path, tmp_path: Path) -> None:
    report = prepare([manifest], tmp_path / "speech.corpus")
    corpus = Corpus.open(tmp_path / "speech.corpus")
    assert [corpus[row].id for row in range(3)] == ["wavs/0", "wavs/1", "wavs/2"]
    assert [corpus[row].supervisions[0].text for row in range(3)] == ["wort ü0", "wort ü1", "wort ü2"]
    np.testing.assert_array_equal(corpus.num_samples, [8000, 9000, 10000])
    np.testing.assert_array_equal(load_samples(corpus[0]), read_audio(tmp_path / "data" / "wavs" / "0.flac"))
    assert (report.path, report.num_cuts, report.num_resampled, report.rejected) == (corpus.path, 3, 0, {})
    assert report.hours == corpus.hours == 27000 / 16000 / 3600
    assert (report.shortest_s, report.longest_s) == (0.5, 0.625)


def test_audio_filename_offset_and_duration_are_understood(tmp_path: Path) -> None:
    write_audio(tmp_path / "a.wav", hiss(32000, 1))
    rows = [{"audio_filename": "a.wav", "offset": start, "duration": 0.5} for start in (0.0, 0.5, 1.25)]
    prepare([write_jsonl(tmp_path / "m.json", rows)], tmp_path / "speech.corpus")
    corpus = Corpus.open(tmp_path / "speech.corpus")
    assert [corpus[row].id for row in range(3)] == ["a@0.000+0.500", "a@0.500+0.500", "a@1.250+0.500"]
    whole = read_audio(tmp_path / "a.wav")
    for row, start in enumerate((0, 8000, 20000)):
        np.testing.assert_array_equal(load_samples(corpus[row]), whole[start : start + 8000])


def test_several_inputs_of_different_kinds_make_one_corpus(
    manifest: Path, messy_corpora: MessyCorpora, tmp_path: Path
) -> None:
    write_audio(tmp_path / "folder" / "deep" / "x.ogg", hiss(16000, 7))
    cuts = write_jsonl(tmp_path / "cuts.jsonl", _cuts_as_json(messy_corpora.speech, "speech-1"))
    packed = tmp_path / "packed.jsonl.gz"
    packed.write_bytes(gzip.compress("".join(map(_line, _cuts_as_json(messy_corpora.speech, "stereo"))).encode()))
    seen: list[tuple[int, int]] = []
    report = prepare(
        [manifest, tmp_path / "folder", cuts, packed],
        tmp_path / "speech.corpus",
        on_progress=lambda done, total: seen.append((done, total)),
    )
    ids = {cut.id for cut in CutSet.from_file(tmp_path / "speech.corpus" / "cuts.jsonl")}
    assert ids == {"data/wavs/0", "data/wavs/1", "data/wavs/2", "folder/deep/x"} | {
        f"speech-1{i}" for i in range(10)
    } | {f"stereo-{i}" for i in range(4)}
    assert report.num_cuts == len(ids) == 18
    assert seen == [(done, 18) for done in range(1, 19)]


def test_manifests_of_the_same_layout_in_sibling_folders_do_not_collide(tmp_path: Path) -> None:
    manifests = []
    for language in ("en", "fr"):
        write_audio(tmp_path / language / "wavs" / "0.wav", hiss(16000, len(manifests)))
        manifests.append(write_jsonl(tmp_path / language / "train.json", [{"audio_filepath": "wavs/0.wav"}]))
    report = prepare(manifests, tmp_path / "speech.corpus")
    assert report.rejected == {}
    assert {cut.id for cut in CutSet.from_file(tmp_path / "speech.corpus" / "cuts.jsonl")} == {"en/wavs/0", "fr/wavs/0"}


def _cuts_as_json(corpus: Path, prefix: str) -> list[dict[str, Any]]:
    rows = map(json.loads, (corpus / "cuts.jsonl").read_text().splitlines())
    return [row for row in rows if row["id"].startswith(prefix)]


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row) + "\n"


def test_a_corpus_made_of_the_cuts_of_another_gives_the_same_audio(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    prepare([messy_corpora.speech / "cuts.jsonl"], tmp_path / "again.corpus")
    first, again = Corpus.open(messy_corpora.speech), Corpus.open(tmp_path / "again.corpus")
    assert again.fingerprint == first.fingerprint
    for row in range(len(first)):
        np.testing.assert_array_equal(load_samples(again[row]), load_samples(first[row]))


def test_a_corpus_opens_in_lhotse_and_holds_the_same_cuts(messy_corpora: MessyCorpora) -> None:
    corpus = Corpus.open(messy_corpora.speech)
    cuts = {cut.id: cut for cut in CutSet.from_file(messy_corpora.speech / "cuts.jsonl")}
    assert len(cuts) == len(corpus)
    for row in range(len(corpus)):
        cut = corpus[row]
        assert cuts[cut.id] == cut
        audio = cuts[cut.id].load_audio()
        np.testing.assert_allclose(audio[0, : cut.num_samples], load_samples(cut)[: audio.shape[1]], atol=1e-5)


@pytest.mark.parametrize("channel", [0, 1])
def test_the_channel_asked_for_is_prepared(tmp_path: Path, channel: int) -> None:
    stereo = np.stack([tone(300, 1.0), tone(900, 1.0)], axis=1)
    write_audio(tmp_path / "audio" / "a.flac", stereo)
    prepare([tmp_path / "audio"], tmp_path / "speech.corpus", PrepareConfig(channel=channel))
    (cut,) = CutSet.from_file(tmp_path / "speech.corpus" / "cuts.jsonl")
    assert cut.channel == channel
    np.testing.assert_allclose(load_samples(cut), stereo[:, channel], atol=1e-4)


def test_what_is_left_out_is_listed_with_place_reason_and_detail(tmp_path: Path) -> None:
    write_audio(tmp_path / "good.wav", hiss(16000, 1))
    write_audio(tmp_path / "short.wav", hiss(800, 1))
    write_audio(tmp_path / "long.wav", hiss(50000, 1))
    (tmp_path / "garbage.wav").write_bytes(b"garbage" * 99)
    (tmp_path / "empty.wav").touch()
    names = ["good", "short", "long", "garbage", "empty", "gone", "good"]
    rows: list[dict[str, Any]] = [{"audio_filepath": f"{name}.wav"} for name in names]
    rows.append({"audio_filepath": "good.wav", "offset": 0.5, "duration": 0.75})
    manifest = write_jsonl(tmp_path / "m.json", rows)
    report = prepare([manifest], tmp_path / "speech.corpus", PrepareConfig(max_seconds=3.0))
    rejects = rejects_of(tmp_path / "speech.corpus")
    assert [(reject["where"], reject["cut_id"], reject["reason"]) for reject in rejects] == [
        (f"{manifest}:2", "short", "too_short"),
        (f"{manifest}:3", "long", "too_long"),
        (f"{manifest}:4", "garbage", "unreadable"),
        (f"{manifest}:5", "empty", "empty"),
        (f"{manifest}:6", "gone", "missing"),
        (f"{manifest}:7", "good", "duplicate_id"),
        (f"{manifest}:8", "good@0.500+0.750", "beyond_end"),
    ]
    assert all(reject["detail"] for reject in rejects)
    assert report.num_cuts == 1
    assert report.rejected == {reject["reason"]: 1 for reject in rejects}
    assert Corpus.open(tmp_path / "speech.corpus").meta["rejected"] == report.rejected


def test_names_that_are_not_unicode_are_left_out_and_listed(tmp_path: Path) -> None:
    audio = tmp_path / "audio"
    write_audio(audio / "good.wav", hiss(16000, 1))
    os.rename(write_audio(audio / "bad.wav", hiss(16000, 2)), os.fsencode(audio) + b"/caf\xe9.wav")
    report = prepare([audio], tmp_path / "speech.corpus")
    assert (report.num_cuts, report.rejected) == (1, {"unreadable": 1})
    (reject,) = rejects_of(tmp_path / "speech.corpus")
    assert os.fsencode(reject["where"]) == os.fsencode(audio) + b"/caf\xe9.wav"


def test_labels_that_are_not_unicode_are_left_out_and_listed(tmp_path: Path) -> None:
    write_audio(tmp_path / "a.wav", hiss(16000, 1))
    write_audio(tmp_path / "b.wav", hiss(16000, 1))
    rows = [{"audio_filepath": "a.wav", "text": "half of a \ud83d"}, {"audio_filepath": "b.wav"}]
    (tmp_path / "m.json").write_text("".join(map(_line, rows)))
    report = prepare([tmp_path / "m.json"], tmp_path / "speech.corpus")
    assert (report.num_cuts, report.rejected) == (1, {"unreadable": 1})


def test_a_corpus_made_twice_is_the_same_byte_for_byte(manifest: Path, tmp_path: Path) -> None:
    prepare([manifest], tmp_path / "speech.corpus")
    first = tree(tmp_path / "speech.corpus")
    prepare([manifest], tmp_path / "speech.corpus", overwrite=True)
    assert tree(tmp_path / "speech.corpus") == first
    prepare([manifest], tmp_path / "other.corpus")
    assert tree(tmp_path / "other.corpus") == first
    assert set(first) == {"cuts.jsonl", "index.npy", "meta.json", "rejected.jsonl"}


def test_the_description_holds_the_settings(manifest: Path, tmp_path: Path) -> None:
    config = PrepareConfig(sampling_rate=8000, min_seconds=0.2, max_seconds=5.0)
    report = prepare([manifest], tmp_path / "speech.corpus", config)
    meta = Corpus.open(tmp_path / "speech.corpus").meta
    assert meta["settings"] == {"sampling_rate": 8000, "channel": 0, "min_seconds": 0.2, "max_seconds": 5.0}
    assert meta["manifests"] == [str(manifest)]
    assert report.num_resampled == 3


def test_cuts_of_equal_length_keep_the_order_of_the_input(tmp_path: Path) -> None:
    rows = []
    for name in "dbacfe":
        write_audio(tmp_path / f"{name}.wav", hiss(8000, 1))
        rows.append({"audio_filepath": f"{name}.wav"})
    prepare([write_jsonl(tmp_path / "m.json", rows)], tmp_path / "speech.corpus")
    corpus = Corpus.open(tmp_path / "speech.corpus")
    assert [corpus[row].id for row in range(6)] == list("dbacfe")


def test_an_existing_corpus_is_left_alone(manifest: Path, tmp_path: Path) -> None:
    prepare([manifest], tmp_path / "speech.corpus")
    before = tree(tmp_path)
    with pytest.raises(CorpusError, match=r"speech\.corpus: exists already\. .*--overwrite"):
        prepare([manifest], tmp_path / "speech.corpus")
    assert tree(tmp_path) == before


def test_an_existing_corpus_is_replaced_on_request(manifest: Path, tmp_path: Path) -> None:
    write_audio(tmp_path / "other" / "x.wav", hiss(16000, 1))
    prepare([tmp_path / "other"], tmp_path / "speech.corpus")
    opened_before = Corpus.open(tmp_path / "speech.corpus")
    prepare([manifest], tmp_path / "speech.corpus", overwrite=True)
    assert len(Corpus.open(tmp_path / "speech.corpus")) == 3
    assert opened_before[0].id == "x"  # what was opened before is still whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "other", "speech.corpus"]


def test_a_corpus_behind_a_link_is_replaced_where_it_lies(manifest: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    prepare([manifest], tmp_path / "disk" / "speech.corpus", PrepareConfig(sampling_rate=8000))
    (tmp_path / "speech.corpus").symlink_to(tmp_path / "disk" / "speech.corpus")
    prepare([manifest], tmp_path / "speech.corpus", overwrite=True)
    assert (tmp_path / "speech.corpus").is_symlink()
    assert Corpus.open(tmp_path / "disk" / "speech.corpus").sampling_rate == 16000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "disk", "speech.corpus"]
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["speech.corpus"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_no_corpus_is_never_replaced(manifest: Path, tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "diary.txt").write_text("dear diary")
    (tmp_path / "file").write_text("a file")
    before = tree(tmp_path)
    for name in ("notes", "file"):
        with pytest.raises(CorpusError, match="exists already"):
            prepare([manifest], tmp_path / name, overwrite=overwrite)
    assert tree(tmp_path) == before


def test_a_corpus_that_another_run_finishes_meanwhile_is_not_replaced_unasked(manifest: Path, tmp_path: Path) -> None:
    prepare([manifest], tmp_path / "ready.corpus", PrepareConfig(sampling_rate=8000))

    def finish_another(done: int, total: int) -> None:
        if done == total:
            (tmp_path / "ready.corpus").rename(tmp_path / "speech.corpus")

    with pytest.raises(CorpusError, match="exists already"):
        prepare([manifest], tmp_path / "speech.corpus", on_progress=finish_another)
    assert Corpus.open(tmp_path / "speech.corpus").sampling_rate == 8000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "speech.corpus"]


def test_a_target_that_cannot_be_written_is_an_error(manifest: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file")
    with pytest.raises(CorpusError, match=r"speech\.corpus: cannot be written"):
        prepare([manifest], tmp_path / "file" / "speech.corpus")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"audio_filepath": "wavs/0.flac"}'] * 6 + ["{"], r"bad\.json:7: not JSON"),
        (['{"audio_filepath": "wavs/0.flac"}', '{"text": "a"}'], r"bad\.json:2: the key audio_filepath is missing"),
        (["[1, 2]"], r"bad\.json:1: list where a JSON object was expected"),
        (
            ['{"audio_filepath": "wavs/0.flac"}', '{"audio_filepath": "wavs/1.flac", "duration": -3}'],
            r"bad\.json:2: duration is -3",
        ),
        (
            ['{"audio_filepath": "wavs/gone.flac"}', '{"audio_filepath": "gone.flac"}'],
            r"bad\.json: no usable cut among 2 entries; the first: .*bad\.json:1: missing, .*wavs/gone\.flac does not",
        ),
        ([], r"bad\.json: the manifest is empty"),
    ],
)
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_bad_manifest_is_an_error_that_names_the_place_and_leaves_nothing_behind(
    manifest: Path, tmp_path: Path, lines: list[str], message: str, overwrite: bool
) -> None:
    bad = manifest.with_name("bad.json")
    bad.write_text("".join(f"{line}\n" for line in lines))
    if overwrite:
        prepare([manifest], tmp_path / "speech.corpus")
    before = tree(tmp_path)
    with pytest.raises(ManifestError, match=message):
        prepare([bad], tmp_path / "speech.corpus", overwrite=overwrite)
    assert tree(tmp_path) == before


def test_a_missing_manifest_is_an_error_before_any_work(manifest: Path, tmp_path: Path) -> None:
    before = tree(tmp_path)
    seen: list[int] = []
    with pytest.raises(ManifestError, match=r"gone\.json: no such manifest"):
        prepare(
            [manifest, tmp_path / "gone.json"],
            tmp_path / "speech.corpus",
            on_progress=lambda done, total: seen.append(done + total),
        )
    assert seen == []
    assert tree(tmp_path) == before


def test_an_error_from_outside_leaves_nothing_behind(manifest: Path, tmp_path: Path) -> None:
    before = tree(tmp_path)

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt(f"{done} of {total}")

    with pytest.raises(KeyboardInterrupt, match="1 of 3"):
        prepare([manifest], tmp_path / "speech.corpus", on_progress=interrupt)
    assert tree(tmp_path) == before


@pytest.mark.multiprocess
@pytest.mark.parametrize("after", [1, 3])
def test_a_prepare_that_is_killed_leaves_nothing_that_opens_and_the_next_run_works(
    manifest: Path, tmp_path: Path, after: int
) -> None:
    output = tmp_path / "speech.corpus"
    with paused_prepare(manifest, output, after=after) as process:
        partial = tmp_path / "speech.corpus.partial"
        assert partial.is_dir()
        process.send_signal(signal.SIGKILL)
        assert process.wait(timeout=30) == -signal.SIGKILL
    for path in (output, partial):
        with pytest.raises(CorpusError):
            Corpus.open(path)
    report = prepare([manifest], output)
    assert report.num_cuts == len(Corpus.open(output)) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "speech.corpus"]


def test_what_a_killed_run_left_does_not_get_into_the_corpus(manifest: Path, tmp_path: Path) -> None:
    write_audio(tmp_path / "speech.corpus.partial" / "folder" / "a.wav", hiss(100, 1))
    (tmp_path / "speech.corpus.partial" / "report.html").write_text("of the killed run")
    prepare([manifest], tmp_path / "speech.corpus")
    assert set(tree(tmp_path / "speech.corpus")) == {"cuts.jsonl", "index.npy", "meta.json", "rejected.jsonl"}


@pytest.mark.multiprocess
def test_a_replacement_that_is_killed_leaves_the_old_corpus(manifest: Path, tmp_path: Path) -> None:
    output = tmp_path / "speech.corpus"
    prepare([manifest], output)
    before = tree(output)
    with paused_prepare(manifest, output) as process:
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)
    assert (tmp_path / "speech.corpus.partial").is_dir()
    assert tree(output) == before
    prepare([manifest], output, PrepareConfig(sampling_rate=8000), overwrite=True)
    assert Corpus.open(output).sampling_rate == 8000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "speech.corpus"]


@pytest.mark.multiprocess
def test_a_second_prepare_into_the_same_target_is_refused_while_the_first_one_runs(
    manifest: Path, tmp_path: Path
) -> None:
    output = tmp_path / "speech.corpus"
    with paused_prepare(manifest, output) as process:
        before = tree(tmp_path)
        with pytest.raises(CorpusError, match=r"speech\.corpus: another prepare is writing it"):
            prepare([manifest], output)
        assert tree(tmp_path) == before
        prepare([manifest], tmp_path / "other.corpus")
        process.communicate(timeout=30)  # lets the first one go on
        assert process.returncode == 0
    assert len(Corpus.open(output)) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "other.corpus", "speech.corpus"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling_rate": 0}, "sampling_rate is 0"),
        ({"channel": -1}, "channel is -1"),
        ({"min_seconds": -0.5}, r"min_seconds is -0\.5"),
        ({"min_seconds": 2.0, "max_seconds": 1.0}, r"max_seconds \(1\) is below min_seconds \(2\)"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PrepareConfig(**changes)
