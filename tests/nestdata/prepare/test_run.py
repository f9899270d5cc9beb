import gzip
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lhotse import CutSet

from nestdata import (
    Corpus,
    ManifestError,
    PrepareConfig,
    prepare_corpus,
)
from tests.conftest import MessyCorpora
from tests.nestdata.bad_files import BAD_FILES_CONFIG, bad_files
from tests.nestdata.prepare.corpora import CORPUS_FILES, names_in, tree
from tests.synthesis import hiss, read_audio, read_jsonl, write_audio, write_jsonl


def test_a_nemo_manifest_is_prepared_with_its_relative_paths_and_labels(manifest: Path, tmp_path: Path) -> None:
    report = prepare_corpus([manifest], tmp_path / "speech.corpus")
    corpus = Corpus.open(tmp_path / "speech.corpus")
    assert [corpus[row].id for row in range(3)] == ["wavs/0", "wavs/1", "wavs/2"]
    assert [corpus[row].supervisions[0].text for row in range(3)] == ["wort ü0", "wort ü1", "wort ü2"]
    np.testing.assert_array_equal(corpus.num_samples, [8000, 9000, 10000])
    np.testing.assert_array_equal(corpus.load(0)[1], read_audio(tmp_path / "data" / "wavs" / "0.flac"))
    assert (report.path, report.num_cuts, report.num_resampled, report.rejected) == (corpus.path, 3, 0, {})
    assert report.hours == corpus.hours == 27000 / 16000 / 3600
    assert (report.shortest_s, report.longest_s) == (0.5, 0.625)


def test_several_inputs_of_different_formats_make_one_corpus(
    manifest: Path, messy_corpora: MessyCorpora, tmp_path: Path
) -> None:
    write_audio(tmp_path / "folder" / "deep" / "x.ogg", hiss(16000, 7))
    cuts = write_jsonl(tmp_path / "cuts.jsonl", _cuts_as_json(messy_corpora.speech, "speech-1"))
    packed = write_jsonl(tmp_path / "packed.jsonl.gz", _cuts_as_json(messy_corpora.speech, "stereo"))
    packed.write_bytes(gzip.compress(packed.read_bytes()))
    seen: list[tuple[int, int | None]] = []
    report = prepare_corpus(
        [manifest, tmp_path / "folder", cuts, packed],
        tmp_path / "speech.corpus",
        on_progress=lambda found: seen.append(found[:2]),
    )
    ids = {cut.id for cut in CutSet.from_file(tmp_path / "speech.corpus" / "cuts.jsonl")}
    assert ids == {"data/wavs/0", "data/wavs/1", "data/wavs/2", "folder/deep/x"} | {
        f"speech-1{i}" for i in range(10)
    } | {f"stereo-{i}" for i in range(4)}
    assert report.num_cuts == len(ids) == 18
    assert seen == [(number, 18) for number in (*range(17), 18)]


def _cuts_as_json(corpus: Path, prefix: str) -> list[dict[str, Any]]:
    return [row for row in read_jsonl(corpus / "cuts.jsonl") if row["id"].startswith(prefix)]


def test_rejects_are_listed_with_position_reason_and_detail(tmp_path: Path) -> None:
    reasons = bad_files(tmp_path / "bad")
    manifest = tmp_path / "bad" / "speech.json"
    report = prepare_corpus([manifest], tmp_path / "speech.corpus", BAD_FILES_CONFIG)
    rejects = read_jsonl(report.path / "rejected.jsonl")
    assert {reject["cut_id"]: reject["reason"] for reject in rejects} == reasons
    names = [Path(row["audio_filepath"]).stem for row in read_jsonl(manifest)]
    for reject in rejects:
        path, number = reject["where"].rsplit(":", 1)
        assert (path, names[int(number) - 1]) == (str(manifest), reject["cut_id"])
        assert " " in reject["detail"]
    assert rejects[-1]["where"] == f"{manifest}:{len(names)}"  # the second good-1, found after all cuts were added
    assert report.num_cuts == 2
    assert sum(report.rejected.values()) == len(reasons)
    assert report.rejected == Corpus.open(tmp_path / "speech.corpus").meta["rejected"]
    assert list(report.rejected.values()) == sorted(report.rejected.values(), reverse=True)


def test_headers_are_read_by_default_and_samples_with_probe_decode(tmp_path: Path) -> None:
    reasons = bad_files(tmp_path / "bad")
    config = replace(BAD_FILES_CONFIG, probe="all")
    report = prepare_corpus([tmp_path / "bad" / "speech.json"], tmp_path / "all.corpus", config)
    found = {reject["cut_id"] for reject in read_jsonl(report.path / "rejected.jsonl")}
    assert set(reasons) - found == {"not_finite-nan", "not_finite-inf", "silent"}


def test_durations_in_the_manifest_are_trusted_with_probe_missing(tmp_path: Path) -> None:
    rows = [{"audio_filepath": f"gone/{i}.flac", "duration": 1 + i / 1000, "lang": "de"} for i in range(60)]
    write_audio(tmp_path / "there.wav", hiss(8000, 1))
    rows += [{"audio_filepath": "there.wav"}, {"audio_filepath": "gone.wav"}]
    manifest = write_jsonl(tmp_path / "m.json", rows)
    report = prepare_corpus([manifest], tmp_path / "speech.corpus", PrepareConfig(probe="missing"))
    assert (report.num_cuts, report.rejected) == (61, {"missing": 1})
    assert report.hours_by_language == {"de": pytest.approx(sum(1 + i / 1000 for i in range(60)) / 3600)}
    corpus = Corpus.open(tmp_path / "speech.corpus")
    assert corpus.num_samples.tolist() == [8000, *(16000 + 16 * i for i in range(60))]
    assert corpus[-1].recording.sources[0].source == str(tmp_path / "gone" / "59.flac")


def test_any_reject_is_an_error_with_strict(manifest: Path, tmp_path: Path) -> None:
    strict = PrepareConfig(strict=True)
    assert prepare_corpus([manifest], tmp_path / "good.corpus", strict).num_cuts == 3
    rows = [{"audio_filepath": f"wavs/{name}.flac"} for name in ("0", "gone", "away", "0")]
    bad = write_jsonl(manifest.parent / "bad.json", rows)
    before = tree(tmp_path)
    message = (
        r"3 of 4 entries cannot be used \(2 missing, 1 duplicate_id\).*; the first: .*bad\.json:2: missing, .*gone"
    )
    with pytest.raises(ManifestError, match=message):
        prepare_corpus([bad], tmp_path / "speech.corpus", strict)
    rejects = read_jsonl(tmp_path / "speech.corpus.rejected.jsonl")
    assert [reject["reason"] for reject in rejects] == ["missing", "missing", "duplicate_id"]
    prepare_corpus([bad], tmp_path / "speech.corpus")
    shutil.rmtree(tmp_path / "speech.corpus")
    assert tree(tmp_path) == before


@pytest.fixture
def varied_inputs(manifest: Path, long_manifest: Path, messy_corpora: MessyCorpora, tmp_path: Path) -> list[Path]:
    """Several inputs that need all steps: spans, windows, resampling, rejects, duplicates."""
    bad_files(tmp_path / "bad")
    again = tmp_path / "again.jsonl"
    shutil.copy(messy_corpora.speech / "cuts.jsonl", again)
    return [tmp_path / "bad", manifest, messy_corpora.speech / "cuts.jsonl", long_manifest, again]


VARIED_CONFIG = PrepareConfig(probe="decode", window_seconds=0.7, pcm=True)


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.smoke
def test_the_corpus_does_not_depend_on_the_number_of_jobs(varied_inputs: list[Path], tmp_path: Path) -> None:
    reports = [prepare_corpus(varied_inputs, tmp_path / f"{jobs}.corpus", VARIED_CONFIG, jobs=jobs) for jobs in (1, 2)]
    assert set(reports[0].rejected) == {"duplicate_id", "silent", "empty", "not_audio", "too_short", "unreadable"}
    assert tree(tmp_path / "2.corpus") == tree(tmp_path / "1.corpus")
    assert replace(reports[1], path=reports[0].path) == reports[0]
    assert names_in(tmp_path / "1.corpus") == CORPUS_FILES | {"bank.npy", "bank.pcm", "notes.jsonl"}


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_corpus_prepared_on_a_dask_cluster_equals_one_prepared_locally(
    varied_inputs: list[Path], tmp_path: Path
) -> None:
    distributed = pytest.importorskip("distributed")
    prepare_corpus(varied_inputs, tmp_path / "here.corpus", VARIED_CONFIG)
    settings = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None}
    # Workers are threads of this process, but they communicate through sockets as processes would.
    with distributed.LocalCluster(processes=False, protocol="tcp", **settings) as cluster:
        prepare_corpus(varied_inputs, tmp_path / "dask.corpus", VARIED_CONFIG, dask=cluster.scheduler_address)
        bad = write_jsonl(tmp_path / "bad.json", [{"audio_filepath": "gone.wav"}])
        with pytest.raises(ManifestError, match="no usable cut among 1 entries"):
            prepare_corpus([bad], tmp_path / "bad.corpus", dask=cluster.scheduler_address)
    assert tree(tmp_path / "dask.corpus") == tree(tmp_path / "here.corpus")
    assert not (tmp_path / "bad.corpus.partial").exists()


def test_cuts_of_more_than_a_minute_are_counted_with_what_divides_them(tmp_path: Path) -> None:
    rows = [{"audio_filepath": f"{i}.wav", "duration": seconds} for i, seconds in enumerate((60, 60.01, 1800, 5))]
    manifest = write_jsonl(tmp_path / "m.json", rows)
    report = prepare_corpus(manifest, tmp_path / "a.corpus", PrepareConfig(probe="missing"))
    (line,) = [note for note in report.notes if note.startswith("longer than a minute: 2 cuts, 0.52 h")]
    assert "--window-seconds" in line
    assert "--segment vad" in line
    for more in ({"window_seconds": 120.0}, {"max_seconds": 60.0}):
        config = PrepareConfig(probe="missing", **more)  # type: ignore[arg-type]
        report = prepare_corpus(manifest, tmp_path / "b.corpus", config, overwrite=True)
        assert not any(note.startswith("longer") for note in report.notes)
