import gzip
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np
import pytest
from lhotse import CutSet

from nestdata import (
    ConfigError,
    Corpus,
    CorpusError,
    ManifestError,
    OutputError,
    PrepareConfig,
    PrepareProgress,
    prepare_corpus,
)
from nestdata.prepare import run
from nestdata.prepare.inputs import Entry
from nestdata.prepare.inputs.audio import File, Unusable
from tests.conftest import MessyCorpora
from tests.nestdata.bad_files import BAD_FILES_CONFIG, bad_files
from tests.nestdata.full_disk import files_up_to
from tests.synthesis import hiss, read_audio, write_audio, write_jsonl

REPOSITORY = Path(__file__).parents[3]
CORPUS_FILES = {"addresses.npy", "cuts.jsonl", "index.npy", "meta.json", "rejected.jsonl"}


def tree(directory: Path) -> dict[str, bytes | None]:
    """Returns the content of all files in a directory except reports, by relative path; None for a folder."""
    return {
        str(path.relative_to(directory)): None if path.is_dir() else path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.name != "report.html"
    }


def names_in(directory: Path) -> set[str]:
    """Returns the names of the files of a corpus, without the report and its audio."""
    return {path.name for path in directory.iterdir() if path.stem != "report"}


def rejects_of(corpus: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (corpus / "rejected.jsonl").read_text().splitlines()]


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    """A NeMo manifest of three lines, in a folder with its audio."""
    rows = []
    for i in range(3):
        write_audio(tmp_path / "data" / "wavs" / f"{i}.flac", hiss(8000 + 1000 * i, i))
        rows.append({"audio_filepath": f"wavs/{i}.flac", "duration": (8000 + 1000 * i) / 16000, "text": f"wort ü{i}"})
    return write_jsonl(tmp_path / "data" / "speech.json", rows)


@pytest.fixture
def long_manifest(manifest: Path) -> Path:
    """A NeMo manifest of 1200 spans of the same files, which takes several tasks."""
    rows = [{"audio_filepath": f"wavs/{i % 3}.flac", "offset": i // 3 / 1000, "duration": 0.1} for i in range(1200)]
    return write_jsonl(manifest.parent / "long.json", rows)


@contextmanager
def paused_prepare(manifest: Path, output: Path, *, after: int = 1) -> Iterator["subprocess.Popen[str]"]:
    """Runs `prepare` in another process, which waits after it has probed `after` entries."""
    program = """
import sys
from nestdata import prepare_corpus
def wait(found):
    if found.entries >= int(sys.argv[3]):
        print("waiting", flush=True)
        sys.stdin.read()
prepare_corpus([sys.argv[1]], sys.argv[2], overwrite=True, on_progress=wait)
"""
    command = [sys.executable, "-c", program, str(manifest), str(output), str(after)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "waiting\n"
            yield process
        finally:
            process.kill()


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


def test_spans_of_a_nemo_manifest_are_prepared_and_loaded(tmp_path: Path) -> None:
    write_audio(tmp_path / "a.wav", hiss(32000, 1))
    rows = [{"audio_filename": "a.wav", "offset": start, "duration": 0.5} for start in (0.0, 0.5, 1.25)]
    prepare_corpus([write_jsonl(tmp_path / "m.json", rows)], tmp_path / "speech.corpus")
    corpus = Corpus.open(tmp_path / "speech.corpus")
    assert [corpus[row].id for row in range(3)] == ["a@0.000+0.500", "a@0.500+0.500", "a@1.250+0.500"]
    whole = read_audio(tmp_path / "a.wav")
    for row, start in enumerate((0, 8000, 20000)):
        np.testing.assert_array_equal(corpus.load(row)[1], whole[start : start + 8000])


def test_several_inputs_of_different_formats_make_one_corpus(
    manifest: Path, messy_corpora: MessyCorpora, tmp_path: Path
) -> None:
    write_audio(tmp_path / "folder" / "deep" / "x.ogg", hiss(16000, 7))
    cuts = write_jsonl(tmp_path / "cuts.jsonl", _cuts_as_json(messy_corpora.speech, "speech-1"))
    packed = tmp_path / "packed.jsonl.gz"
    packed.write_bytes(gzip.compress("".join(map(_line, _cuts_as_json(messy_corpora.speech, "stereo"))).encode()))
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


def test_progress_is_reported_early_and_then_at_least_at_every_500_entries(
    manifest: Path, long_manifest: Path, tmp_path: Path
) -> None:
    seen: list[tuple[int, int | None]] = []
    manifests = [manifest, long_manifest]
    prepare_corpus(manifests, tmp_path / "speech.corpus", on_progress=lambda found: seen.append(found[:2]))
    entries, totals = zip(*seen, strict=True)
    assert set(totals) == {1203}
    assert entries[:17] == tuple(range(17))
    assert entries[-1] == 1203
    assert all(0 < after - before <= max(1, before / 8) for before, after in pairwise(entries))


def test_ids_of_manifests_with_the_same_layout_in_sibling_folders_do_not_collide(tmp_path: Path) -> None:
    manifests = []
    for language in ("en", "fr"):
        write_audio(tmp_path / language / "wavs" / "0.wav", hiss(16000, len(manifests)))
        manifests.append(write_jsonl(tmp_path / language / "train.json", [{"audio_filepath": "wavs/0.wav"}]))
    report = prepare_corpus(manifests, tmp_path / "speech.corpus")
    assert report.rejected == {}
    assert {cut.id for cut in CutSet.from_file(tmp_path / "speech.corpus" / "cuts.jsonl")} == {"en/wavs/0", "fr/wavs/0"}


def _cuts_as_json(corpus: Path, prefix: str) -> list[dict[str, Any]]:
    rows = map(json.loads, (corpus / "cuts.jsonl").read_text().splitlines())
    return [row for row in rows if row["id"].startswith(prefix)]


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row) + "\n"


def test_a_corpus_prepared_from_the_cuts_of_another_gives_the_same_audio(
    messy_corpora: MessyCorpora, tmp_path: Path
) -> None:
    prepare_corpus([messy_corpora.speech / "cuts.jsonl"], tmp_path / "again.corpus")
    first, again = Corpus.open(messy_corpora.speech), Corpus.open(tmp_path / "again.corpus")
    assert again.fingerprint == first.fingerprint
    for row in range(len(first)):
        np.testing.assert_array_equal(again.load(row)[1], first.load(row)[1])


def test_rejects_are_listed_with_position_reason_and_detail(tmp_path: Path) -> None:
    reasons = bad_files(tmp_path / "bad")
    manifest = tmp_path / "bad" / "speech.json"
    report = prepare_corpus([manifest], tmp_path / "speech.corpus", BAD_FILES_CONFIG)
    rejects = rejects_of(tmp_path / "speech.corpus")
    assert {reject["cut_id"]: reject["reason"] for reject in rejects} == reasons
    names = [Path(row["audio_filepath"]).stem for row in map(json.loads, manifest.read_text().splitlines())]
    for reject in rejects:
        path, number = reject["where"].rsplit(":", 1)
        assert (path, names[int(number) - 1]) == (str(manifest), reject["cut_id"])
        assert " " in reject["detail"]
    assert rejects[-1]["where"] == f"{manifest}:{len(names)}"  # the second good-1, found after all cuts were added
    assert report.num_cuts == 2
    assert sum(report.rejected.values()) == len(reasons)
    assert report.rejected == Corpus.open(tmp_path / "speech.corpus").meta["rejected"]
    assert list(report.rejected.values()) == sorted(report.rejected.values(), reverse=True)


@dataclass(frozen=True)
class ThreeEntries:
    """A source whose items hold three entries each, of which the last one is known to be bad."""

    path: Path
    items_per_task: ClassVar[int] = 1

    def items(self) -> Iterator[str]:
        """Yields the path of each file in the folder."""
        yield from sorted(map(str, self.path.iterdir()))

    def entries(self, number: int, item: str) -> Iterator[Entry]:
        """Yields the same file twice, and a problem."""
        for i in range(3):
            audio = Unusable("no_such_member", "it is not there") if i == 2 else File(item)
            cut_id = f"{Path(item).stem}-{i // number}"
            yield Entry(self.where(10 * number + i), cut_id, audio, number=10 * number + i)

    def where(self, number: int) -> str:
        """Returns the number."""
        return f"entry {number}"

    def count(self) -> int:
        """Returns the number of files."""
        return 2


def test_an_item_may_hold_several_entries_with_positions_and_problems_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        write_audio(tmp_path / "audio" / f"{name}.wav", hiss(8000, 1))
    monkeypatch.setattr(run, "open_sources", lambda *_: [ThreeEntries(tmp_path / "audio")])
    report = prepare_corpus([tmp_path / "audio"], tmp_path / "speech.corpus")
    assert (report.num_cuts, report.rejected) == (3, {"no_such_member": 2, "duplicate_id": 1})
    assert [
        (reject["where"], reject["reason"], reject["cut_id"]) for reject in rejects_of(tmp_path / "speech.corpus")
    ] == [
        ("entry 12", "no_such_member", "a-2"),
        ("entry 22", "no_such_member", "b-1"),
        ("entry 21", "duplicate_id", "b-0"),
    ]


def test_headers_are_read_by_default_and_samples_with_probe_decode(tmp_path: Path) -> None:
    reasons = bad_files(tmp_path / "bad")
    prepare_corpus([tmp_path / "bad" / "speech.json"], tmp_path / "all.corpus", replace(BAD_FILES_CONFIG, probe="all"))
    found = {reject["cut_id"] for reject in rejects_of(tmp_path / "all.corpus")}
    decoded = {"not_finite-nan", "not_finite-inf", "silent", "truncated-flac"}
    assert set(reasons) - found == decoded


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.multiprocess)])
def test_durations_in_the_manifest_are_trusted_with_probe_missing(tmp_path: Path, jobs: int) -> None:
    rows = [{"audio_filepath": f"gone/{i}.flac", "duration": 1 + i / 1000, "lang": "de"} for i in range(1200)]
    write_audio(tmp_path / "there.wav", hiss(8000, 1))
    rows += [{"audio_filepath": "there.wav"}, {"audio_filepath": "gone.wav"}]
    manifest = write_jsonl(tmp_path / "m.json", rows)
    report = prepare_corpus([manifest], tmp_path / "speech.corpus", PrepareConfig(probe="missing"), jobs=jobs)
    assert (report.num_cuts, report.rejected) == (1201, {"missing": 1})
    assert report.hours_by_language == {"de": pytest.approx(sum(1 + i / 1000 for i in range(1200)) / 3600)}
    corpus = Corpus.open(tmp_path / "speech.corpus")
    assert corpus.num_samples.tolist() == [8000, *(16000 + 16 * i for i in range(1200))]
    assert corpus[-1].recording.sources[0].source == str(tmp_path / "gone" / "1199.flac")


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
    assert tree(tmp_path) == before


def test_hours_count_only_cuts_that_are_kept(tmp_path: Path) -> None:
    labels = [
        ("a", 5, "de", "s1"),
        ("b", 7, "en", "s2"),
        ("a", 11, "de", "s1"),
        ("c", 13, "de", "s2"),
        ("a", 1, "fr", "s3"),
    ]
    rows = [{"audio_filepath": f"{n}.wav", "duration": d, "lang": lang, "speaker": s} for n, d, lang, s in labels]
    manifest = write_jsonl(tmp_path / "m.json", [*rows, {"audio_filepath": "d.wav", "duration": 3}])
    report = prepare_corpus([manifest], tmp_path / "speech.corpus", PrepareConfig(probe="missing"))
    assert (report.num_cuts, report.rejected) == (4, {"duplicate_id": 2})
    assert report.hours * 3600 == pytest.approx(28)
    seconds = {name: round(hours * 3600) for name, hours in report.hours_by_language.items()}
    assert list(seconds.items()) == [("de", 18), ("en", 7)]
    assert {name: round(hours * 3600) for name, hours in report.hours_by_speaker.items()} == {"s2": 20, "s1": 5}


def test_files_with_names_that_are_not_unicode_are_rejected_and_listed(tmp_path: Path) -> None:
    audio = tmp_path / "audio"
    write_audio(audio / "good.wav", hiss(16000, 1))
    os.rename(write_audio(audio / "bad.wav", hiss(16000, 2)), os.fsencode(audio) + b"/caf\xe9.wav")
    report = prepare_corpus([audio], tmp_path / "speech.corpus")
    assert (report.num_cuts, report.rejected) == (1, {"unreadable": 1})
    (reject,) = rejects_of(tmp_path / "speech.corpus")
    assert os.fsencode(reject["where"]) == os.fsencode(audio) + b"/caf\xe9.wav"


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
    reports = [
        prepare_corpus(varied_inputs, tmp_path / f"{jobs}.corpus", VARIED_CONFIG, jobs=jobs) for jobs in (1, 2, 3)
    ]
    assert len(reports[0].rejected) >= 7
    for jobs in (2, 3):
        assert tree(tmp_path / f"{jobs}.corpus") == tree(tmp_path / "1.corpus")
        assert replace(reports[jobs - 1], path=reports[0].path) == reports[0]
    assert names_in(tmp_path / "1.corpus") == CORPUS_FILES | {"bank.npy", "bank.pcm"}


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


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_dask_worker_that_is_killed_with_its_tasks_does_not_change_the_corpus(
    varied_inputs: list[Path], tmp_path: Path
) -> None:
    distributed = pytest.importorskip("distributed")
    prepare_corpus(varied_inputs, tmp_path / "here.corpus", VARIED_CONFIG)
    settings = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None}
    with distributed.LocalCluster(protocol="tcp", **settings) as cluster, distributed.Client(cluster) as client:
        address, pid = next(iter(client.run(os.getpid).items()))
        os.kill(pid, signal.SIGSTOP)  # it receives tasks, and the run cannot end without their results

        def kill_when_it_has_tasks() -> None:
            while not client.processing().get(address):
                time.sleep(0.05)
            os.kill(pid, signal.SIGKILL)

        killing = threading.Thread(target=kill_when_it_has_tasks, daemon=True)
        killing.start()
        prepare_corpus(varied_inputs, tmp_path / "dask.corpus", VARIED_CONFIG, dask=cluster.scheduler_address)
        killing.join(timeout=60)
        assert not killing.is_alive()
    assert tree(tmp_path / "dask.corpus") == tree(tmp_path / "here.corpus")


def test_preparing_a_corpus_twice_gives_the_same_bytes(manifest: Path, tmp_path: Path) -> None:
    prepare_corpus([manifest], tmp_path / "speech.corpus")
    first = tree(tmp_path / "speech.corpus")
    prepare_corpus([manifest], tmp_path / "speech.corpus", overwrite=True)
    assert tree(tmp_path / "speech.corpus") == first
    prepare_corpus([manifest], tmp_path / "other.corpus")
    assert tree(tmp_path / "other.corpus") == first
    assert names_in(tmp_path / "speech.corpus") == CORPUS_FILES


def test_the_description_holds_the_settings(manifest: Path, tmp_path: Path) -> None:
    config = PrepareConfig(sampling_rate=8000, min_seconds=0.2, max_seconds=5.0)
    report = prepare_corpus([manifest], tmp_path / "speech.corpus", config)
    meta = Corpus.open(tmp_path / "speech.corpus").meta
    assert meta["settings"] == json.loads(json.dumps(asdict(config)))
    assert (meta["format_version"], meta["sampling_rate"], meta["num_cuts"]) == (3, 8000, 3)
    assert meta["manifests"] == [str(manifest)]
    assert report.num_resampled == 3


def test_an_existing_corpus_is_left_alone(manifest: Path, tmp_path: Path) -> None:
    prepare_corpus([manifest], tmp_path / "speech.corpus")
    before = tree(tmp_path)
    with pytest.raises(OutputError, match=r"speech\.corpus: exists already\. .*--overwrite"):
        prepare_corpus([manifest], tmp_path / "speech.corpus")
    assert tree(tmp_path) == before


def test_an_existing_corpus_is_replaced_on_request(manifest: Path, tmp_path: Path) -> None:
    write_audio(tmp_path / "other" / "x.wav", hiss(16000, 1))
    prepare_corpus([tmp_path / "other"], tmp_path / "speech.corpus")
    opened_before = Corpus.open(tmp_path / "speech.corpus")
    prepare_corpus([manifest], tmp_path / "speech.corpus", overwrite=True)
    assert len(Corpus.open(tmp_path / "speech.corpus")) == 3
    assert opened_before[0].id == "x"  # what was opened before is still whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "other", "speech.corpus"]


def test_a_corpus_behind_a_symbolic_link_is_replaced_at_its_own_path(manifest: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    prepare_corpus([manifest], tmp_path / "disk" / "speech.corpus", PrepareConfig(sampling_rate=8000))
    (tmp_path / "speech.corpus").symlink_to(tmp_path / "disk" / "speech.corpus")
    prepare_corpus([manifest], tmp_path / "speech.corpus", overwrite=True)
    assert (tmp_path / "speech.corpus").is_symlink()
    assert Corpus.open(tmp_path / "disk" / "speech.corpus").sampling_rate == 16000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "disk", "speech.corpus"]
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["speech.corpus"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_path_that_is_not_a_corpus_is_never_replaced(manifest: Path, tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "diary.txt").write_text("dear diary")
    (tmp_path / "file").write_text("a file")
    before = tree(tmp_path)
    for name in ("notes", "file"):
        with pytest.raises(OutputError, match="exists already"):
            prepare_corpus([manifest], tmp_path / name, overwrite=overwrite)
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    "change",
    [
        lambda path: (path / "index.npy").unlink(),
        lambda path: (path / "meta.json").unlink(),
        lambda path: (path / "meta.json").write_text("{"),
        lambda path: (path / "meta.json").write_text("[]"),
        lambda path: (path / "meta.json").write_text('{"kind": "features", "num_cuts": 3}'),
        lambda path: (path / "meta.json").write_text('{"kind": "features", "format_version": 2}'),
    ],
    ids=["no index", "no meta.json", "damaged", "not an object", "no version", "no number of cuts"],
)
def test_a_directory_that_is_not_recognized_as_a_corpus_is_never_replaced(
    manifest: Path, tmp_path: Path, change: Callable[[Path], object]
) -> None:
    prepare_corpus([manifest], tmp_path / "other")
    change(tmp_path / "other")
    before = tree(tmp_path)
    with pytest.raises(OutputError, match="exists already and is not a corpus"):
        prepare_corpus([manifest], tmp_path / "other", overwrite=True)
    assert tree(tmp_path) == before


def test_a_corpus_of_an_older_format_is_replaced_on_request(manifest: Path, tmp_path: Path) -> None:
    prepare_corpus([manifest], tmp_path / "speech.corpus")
    meta = tmp_path / "speech.corpus" / "meta.json"
    meta.write_text(json.dumps({**json.loads(meta.read_text()), "format_version": 1}))
    prepare_corpus([manifest], tmp_path / "speech.corpus", overwrite=True)
    assert len(Corpus.open(tmp_path / "speech.corpus")) == 3


def test_a_corpus_that_another_run_finishes_in_the_meantime_is_not_replaced(manifest: Path, tmp_path: Path) -> None:
    prepare_corpus([manifest], tmp_path / "ready.corpus", PrepareConfig(sampling_rate=8000))

    def finish_another(found: PrepareProgress) -> None:
        if found.entries == found.total_entries:
            (tmp_path / "ready.corpus").rename(tmp_path / "speech.corpus")

    with pytest.raises(OutputError, match="exists already"):
        prepare_corpus([manifest], tmp_path / "speech.corpus", on_progress=finish_another)
    assert Corpus.open(tmp_path / "speech.corpus").sampling_rate == 8000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "speech.corpus"]


def test_an_unwritable_target_is_an_error(manifest: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file")
    with pytest.raises(OutputError, match=r"speech\.corpus: cannot be written"):
        prepare_corpus([manifest], tmp_path / "file" / "speech.corpus")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"audio_filepath": "wavs/0.flac"}'] * 6 + ["{"], r"bad\.json:7: not JSON"),
        (['{"audio_filepath": "wavs/0.flac"}', '{"text": "a"}'], r"bad\.json:2: the key audio_filepath is missing"),
        (["[1, 2]"], r"bad\.json, object 1: int where a JSON object was expected"),
        (
            ['{"audio_filepath": "wavs/0.flac"}', '{"audio_filepath": "wavs/1.flac", "duration": -3}'],
            r"bad\.json:2: duration is -3",
        ),
        (['{"audio_filepath": "wavs/0.flac"}'] * 700 + ["{"], r"bad\.json:701: not JSON"),
        (
            ['{"audio_filepath": "wavs/gone.flac"}', '{"audio_filepath": "gone.flac"}'],
            r"bad\.json: no usable cut among 2 entries \(2 missing\); the first: .*bad\.json:1: missing, .*gone\.flac",
        ),
        ([], r"bad\.json: the manifest is empty"),
    ],
)
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_bad_manifest_is_an_error_that_names_the_line_and_leaves_nothing_behind(
    manifest: Path, tmp_path: Path, lines: list[str], message: str, overwrite: bool
) -> None:
    bad = manifest.with_name("bad.json")
    bad.write_text("".join(f"{line}\n" for line in lines))
    if overwrite:
        prepare_corpus([manifest], tmp_path / "speech.corpus")
    before = tree(tmp_path)
    with pytest.raises(ManifestError, match=message):
        prepare_corpus([bad], tmp_path / "speech.corpus", overwrite=overwrite)
    assert tree(tmp_path) == before


def test_a_missing_manifest_is_an_error_before_any_work(manifest: Path, tmp_path: Path) -> None:
    before = tree(tmp_path)
    seen: list[int] = []
    with pytest.raises(ManifestError, match=r"gone\.json: no such file or folder"):
        prepare_corpus(
            [manifest, tmp_path / "gone.json"],
            tmp_path / "speech.corpus",
            on_progress=lambda found: seen.append(found.entries + (found.total_entries or 0)),
        )
    assert seen == []
    assert tree(tmp_path) == before


def test_an_interruption_leaves_nothing_behind(manifest: Path, tmp_path: Path) -> None:
    before = tree(tmp_path)

    def interrupt(found: PrepareProgress) -> None:
        raise KeyboardInterrupt(f"{found.entries} of {found.total_entries}")

    with pytest.raises(KeyboardInterrupt, match="0 of 3"):
        prepare_corpus([manifest], tmp_path / "speech.corpus", on_progress=interrupt)
    assert tree(tmp_path) == before


@pytest.mark.multiprocess
@pytest.mark.parametrize("after", [500, 1200])
def test_a_killed_prepare_leaves_nothing_that_opens_and_the_next_run_works(
    long_manifest: Path, tmp_path: Path, after: int
) -> None:
    output = tmp_path / "speech.corpus"
    with paused_prepare(long_manifest, output, after=after) as process:
        partial = tmp_path / "speech.corpus.partial"
        assert partial.is_dir()
        process.send_signal(signal.SIGKILL)
        assert process.wait(timeout=300) == -signal.SIGKILL
    for path in (output, partial):
        with pytest.raises(CorpusError):
            Corpus.open(path)
    report = prepare_corpus([long_manifest], output)
    assert report.num_cuts == len(Corpus.open(output)) == 1200
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "speech.corpus"]


@contextmanager
def busy_prepare(manifest: Path, output: Path) -> Iterator[tuple["subprocess.Popen[bytes]", BinaryIO]]:
    """Runs `prepare` with two jobs in a new session; its worker reads from a pipe, which never ends.

    Yields:
        The process, and the writing end of the pipe.
    """
    pipe = manifest.parent / "pipe"
    os.mkfifo(pipe)
    program = """
import sys
from nestdata import prepare_corpus
from nestdata.prepare import run
from tests.nestdata.prepare.endless_task import read_pipe
run.run_task = read_pipe
prepare_corpus([sys.argv[1]], sys.argv[2], jobs=2)
"""
    command = [sys.executable, "-c", program, str(manifest), str(output)]
    environment = {**os.environ, "ENDLESS_TASK_PIPE": str(pipe)}
    with ExitStack() as stack:
        process = stack.enter_context(
            subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True, cwd=REPOSITORY, env=environment)
        )
        stack.callback(process.kill)
        yield process, stack.enter_context(pipe.open("wb"))  # returns once a worker has opened the pipe


def has_no_reader(pipe: BinaryIO, timeout_s: float = 30) -> bool:
    """Waits until no process has the reading end of a pipe open, and returns whether that happened in time."""
    poll = select.poll()
    poll.register(pipe, 0)
    return bool(poll.poll(1000 * timeout_s))


@pytest.mark.multiprocess
def test_the_worker_processes_of_a_killed_prepare_end_by_themselves(manifest: Path, tmp_path: Path) -> None:
    output = tmp_path / "speech.corpus"
    with busy_prepare(manifest, output) as (process, pipe):
        assert not has_no_reader(pipe, 0)
        process.kill()
        assert process.wait(timeout=300) == -signal.SIGKILL
        assert has_no_reader(pipe)
    for path in (output, tmp_path / "speech.corpus.partial"):
        with pytest.raises(CorpusError):
            Corpus.open(path)
    assert prepare_corpus([manifest], output).rejected == {}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "speech.corpus"]


@pytest.mark.multiprocess
def test_ctrl_c_while_worker_processes_start_ends_them_with_one_traceback(manifest: Path, tmp_path: Path) -> None:
    program = """
import sys
from nestdata import fork_server, prepare_corpus
def start_and_print(preload, start=fork_server.start):
    start(preload)
    print("starting", flush=True)
fork_server.start = start_and_print
prepare_corpus([sys.argv[1]], sys.argv[2], jobs=2)
"""
    command = [sys.executable, "-c", program, str(manifest), str(tmp_path / "speech.corpus")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "starting\n"
        os.killpg(process.pid, signal.SIGINT)
        errors = process.communicate(timeout=300)[1]
    assert process.returncode == -signal.SIGINT
    assert_one_interruption(errors)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def assert_one_interruption(errors: str) -> None:
    assert [line for line in errors.splitlines() if line[:1].isalpha()] == [
        "Traceback (most recent call last):",
        "KeyboardInterrupt",
    ]


@pytest.mark.multiprocess
def test_ctrl_c_ends_all_processes_with_one_traceback_and_leaves_nothing_behind(manifest: Path, tmp_path: Path) -> None:
    with busy_prepare(manifest, tmp_path / "speech.corpus") as (process, pipe):
        os.killpg(process.pid, signal.SIGINT)  # a terminal signals the whole process group
        assert process.stderr is not None
        errors = process.stderr.read().decode()
        assert process.wait(timeout=300) == -signal.SIGINT
        assert has_no_reader(pipe)
    assert_one_interruption(errors)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_files_of_a_killed_run_do_not_get_into_the_corpus(manifest: Path, tmp_path: Path) -> None:
    write_audio(tmp_path / "speech.corpus.partial" / "folder" / "a.wav", hiss(100, 1))
    (tmp_path / "speech.corpus.partial" / "report.html").write_text("of the killed run")
    prepare_corpus([manifest], tmp_path / "speech.corpus")
    assert names_in(tmp_path / "speech.corpus") == CORPUS_FILES
    assert "of the killed run" not in "".join(path.read_text() for path in (tmp_path / "speech.corpus").glob("*.html"))


@pytest.mark.multiprocess
def test_a_killed_replacement_leaves_the_old_corpus(manifest: Path, tmp_path: Path) -> None:
    output = tmp_path / "speech.corpus"
    prepare_corpus([manifest], output)
    before = tree(output)
    with paused_prepare(manifest, output) as process:
        process.kill()
        process.wait(timeout=300)
    assert (tmp_path / "speech.corpus.partial").is_dir()
    assert tree(output) == before
    prepare_corpus([manifest], output, PrepareConfig(sampling_rate=8000), overwrite=True)
    assert Corpus.open(output).sampling_rate == 8000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "speech.corpus"]


@pytest.mark.multiprocess
def test_a_second_prepare_into_the_same_target_is_refused_while_the_first_one_runs(
    manifest: Path, tmp_path: Path
) -> None:
    output = tmp_path / "speech.corpus"
    with paused_prepare(manifest, output) as process:
        before = tree(tmp_path)
        with pytest.raises(OutputError, match=r"speech\.corpus: another run is writing it"):
            prepare_corpus([manifest], output)
        assert tree(tmp_path) == before
        prepare_corpus([manifest], tmp_path / "other.corpus")
        process.communicate(timeout=300)  # closes its standard input, which ends its wait
        assert process.returncode == 0
    assert len(Corpus.open(output)) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "other.corpus", "speech.corpus"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_full_disk_is_an_error_that_names_the_target_and_leaves_nothing_behind(
    manifest: Path, long_manifest: Path, tmp_path: Path, overwrite: bool
) -> None:
    output = tmp_path / "speech.corpus"
    if overwrite:
        prepare_corpus([manifest], output)
    before = tree(tmp_path)
    config = PrepareConfig(pcm=True, probe="missing")
    for kilobytes in (0, 1, 20, 100, 300):
        message = r"speech\.corpus: cannot be written \(File too large\)\. Choose another path\."
        with files_up_to(1000 * kilobytes), pytest.raises(OutputError, match=message):
            prepare_corpus([long_manifest], output, config, overwrite=overwrite)
        assert tree(tmp_path) == before
    assert prepare_corpus([long_manifest], output, config, overwrite=overwrite).num_cuts == 1200


@pytest.mark.multiprocess
@pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], check=False).returncode != 0,
    reason="needs to mount a file system",
)
def test_a_disk_that_fills_up_at_any_moment_is_an_error_that_leaves_nothing_behind(
    long_manifest: Path, tmp_path: Path
) -> None:
    program = """
import os, subprocess, sys
import nestdata
for kilobytes in (4, 16, 64, 200, 400, 600, 700, 1000, 3000, 20000):
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", sys.argv[2]], check=True)
    try:
        nestdata.prepare_corpus([sys.argv[1]], sys.argv[2] + "/a.corpus", nestdata.PrepareConfig(pcm=True))
        print("ok")
    except nestdata.OutputError as error:
        assert "No space left on device" in str(error), error
        assert os.listdir(sys.argv[2]) == []
        print("full")
    subprocess.run(["umount", "-l", sys.argv[2]], check=True)
"""
    (tmp_path / "disk").mkdir()
    command = ["unshare", "-rm", sys.executable, "-c", program, long_manifest, tmp_path / "disk"]
    words = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=300).stdout.split()
    assert words == sorted(words)
    assert words.count("full") > 5
    assert words.count("ok") > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling_rate": 0}, "sampling_rate is 0"),
        ({"channel": -1}, "channel is -1"),
        ({"min_seconds": -0.5}, r"min_seconds is -0\.5"),
        ({"min_seconds": 2.0, "max_seconds": 1.0}, r"max_seconds \(1\) is below min_seconds \(2\)"),
        ({"min_rate": -1}, "min_rate is -1"),
        ({"min_seconds": 2.0, "window_seconds": 1.0}, r"window_seconds \(1\) is below min_seconds \(2\)"),
        ({"min_seconds": 0.0, "window_seconds": 0.0}, r"window_seconds \(0\)"),
    ],
)
def test_settings_out_of_range_are_errors_that_name_the_setting(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PrepareConfig(**changes)


def test_cuts_of_more_than_a_minute_are_counted_with_what_divides_them(tmp_path: Path) -> None:
    rows = [{"audio_filepath": f"{i}.wav", "duration": seconds} for i, seconds in enumerate((60, 60.01, 1800, 5))]
    manifest = write_jsonl(tmp_path / "m.json", rows)
    report = prepare_corpus(manifest, tmp_path / "a.corpus", PrepareConfig(probe="missing"))
    assert report.num_long == 2
    (line,) = [note for note in report.notes if note.startswith("longer than a minute: 2 cuts, 0.52 h")]
    assert "--window-seconds" in line
    assert "--segment vad" in line
    for more in ({"window_seconds": 120.0}, {"max_seconds": 60.0}):
        config = PrepareConfig(probe="missing", **more)  # type: ignore[arg-type]
        report = prepare_corpus(manifest, tmp_path / "b.corpus", config, overwrite=True)
        assert not any(note.startswith("longer") for note in report.notes)
