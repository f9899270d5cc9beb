import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lhotse import MonoCut, Recording

from nestcli.nestdata import main
from nestdata import ConfigError, Corpus, OutputError, PackConfig, PrepareConfig, pack_corpora, prepare_corpus
from tests.conftest import MessyCorpora
from tests.nestdata.full_disk import files_up_to
from tests.nestdata.pack.packing import DEMO, digests, pack, samples_by_id, shar_of
from tests.synthesis import chirp, hiss, write_audio, write_jsonl


def assert_holds(shar: Path, corpus: Path) -> None:
    """Asserts that a corpus of the Shar has the cuts and the samples of another corpus, in the same order."""
    target = shar.parent / f"{shar.name}.again"
    prepare_corpus([shar], target, overwrite=True)
    assert Corpus.open(target).fingerprint == Corpus.open(corpus).fingerprint
    expected, found = samples_by_id(corpus), samples_by_id(target)
    assert all(np.array_equal(found[name], samples) for name, samples in expected.items())


def test_lhotse_reads_the_same_samples_ids_and_labels(demo_speech: Path, demo_packed: Path) -> None:
    corpus, found = Corpus.open(demo_speech), shar_of(demo_packed)
    assert len(found) == len(corpus) == 40
    for index in range(len(corpus)):
        cut = corpus[index]
        other = found[cut.id]
        assert np.array_equal(other.load_audio()[0], corpus.load(index)[1])
        assert (other.start, other.duration, other.num_samples) == (0.0, cut.duration, cut.num_samples)
        assert other.supervisions == cut.supervisions
        assert other.supervisions[0].text
        custom = {name: value for name, value in (other.custom or {}).items() if not name.startswith("shar")}
        assert custom == (cut.custom or {})


def test_custom_fields_come_back(tmp_path: Path) -> None:
    write_audio(tmp_path / "a.wav", chirp(100, 900, 1.0))
    row = {"audio_filepath": "a.wav", "text": "one", "mood": "glad", "take": 3, "tags": {"x": [1, 2.5, None]}}
    prepare_corpus([write_jsonl(tmp_path / "a.json", [row])], tmp_path / "a.corpus")
    pack(tmp_path / "a.corpus", tmp_path / "packed")
    (cut,) = shar_of(tmp_path / "packed").values()
    assert (cut.mood, cut.take, cut.tags) == ("glad", 3, {"x": [1, 2.5, None]})


@pytest.mark.parametrize("codec", ["flac", "wav"])
def test_every_kind_of_cut_is_packed_as_the_corpus_loads_it(
    messy_corpora: MessyCorpora, tmp_path: Path, codec: Any
) -> None:
    report = pack(messy_corpora.speech, tmp_path / "packed", codec=codec)
    expected, found = samples_by_id(messy_corpora.speech), shar_of(tmp_path / "packed")
    assert found.keys() == expected.keys()
    exact = 0
    for cut_id, samples in expected.items():
        loaded = found[cut_id].load_audio()[0]
        assert loaded.shape == samples.shape
        assert found[cut_id].channel == (1 if cut_id.startswith("stereo") else 0)
        if np.array_equal(loaded, samples):
            exact += 1
        else:  # half a step of 16 bits
            assert np.abs(loaded.astype(np.float64) - samples).max() <= 2.0**-16
    assert report.num_rounded == len(expected) - exact
    # Files of 16 bits at the rate of the corpus.
    assert exact >= 8
    assert report.num_scaled == 0


@pytest.mark.parametrize(("peak", "scale"), [(2.5, 0.4), (1.0, 1.0)])
def test_audio_beyond_full_scale_is_made_quieter_and_counted(tmp_path: Path, peak: float, scale: float) -> None:
    loud = chirp(100, 900, 1.0, level=1.0)
    loud *= np.float32(peak / np.abs(loud).max())
    write_audio(tmp_path / "in/loud.wav", loud, subtype="FLOAT")
    prepare_corpus([tmp_path / "in"], tmp_path / "in.corpus")
    report = pack(tmp_path / "in.corpus", tmp_path / "packed")
    (cut,) = shar_of(tmp_path / "packed").values()
    # One step where the largest amplitude itself does not fit, half a step elsewhere.
    assert np.abs(cut.load_audio()[0] - scale * loud).max() <= 2.0**-15
    assert report.num_scaled == (peak > 1.0)
    record = json.loads((tmp_path / "packed/cuts.pack/000000.json").read_bytes())
    assert record["scaled"] == ({"loud": pytest.approx(scale)} if peak > 1.0 else {})


def test_windows_become_recordings_of_their_own(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    report = pack(messy_corpora.windows, tmp_path / "packed")
    corpus, found = Corpus.open(messy_corpora.windows), shar_of(tmp_path / "packed")
    # One of the four recordings was damaged after the corpus was prepared.
    num_damaged = sum(corpus[index].recording.id == "2" for index in range(len(corpus)))
    assert report.left_out == {"changed": num_damaged}
    assert len(found) == len(corpus) - num_damaged == report.num_cuts
    for cut in found.values():
        assert (cut.start, cut.duration) == (0.0, cut.recording.duration)
        assert cut.recording.num_samples == cut.num_samples
    rows = [json.loads(line) for line in Path(report.left_out_file).read_text().splitlines()]
    assert {row["reason"] for row in rows} == {"changed"}
    assert {row["cut_id"] for row in rows}.isdisjoint(found)


def test_noise_with_a_sample_bank_is_packed_from_the_bank(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    report = pack(messy_corpora.banked, tmp_path / "packed")
    expected, found = samples_by_id(messy_corpora.banked), shar_of(tmp_path / "packed")
    assert report.left_out == {}
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name].load_audio()[0], samples) for name, samples in expected.items())


KILLED = """
import os, signal, sys
from pathlib import Path
import nestdata.pack.shard as shard
from tests.nestdata.pack.packing import pack
convert, left = shard._as_integers, 20
def convert_some(*arguments):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return convert(*arguments)
shard._as_integers = convert_some
pack(Path(sys.argv[1]), Path(sys.argv[2]))
"""


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_shards_that_are_missing(demo_speech: Path, tmp_path: Path) -> None:
    output = tmp_path / "100% packed"
    command = [sys.executable, "-c", KILLED, str(demo_speech), str(output)]
    done = subprocess.run(command, cwd=DEMO.parents[1], timeout=300, check=False)
    assert done.returncode == -signal.SIGKILL
    assert [path.name for path in output.glob("recording.*")] == ["recording.000000.tar"]
    assert (output / "cuts.pack/000001.json.partial/recording.000001.tar").is_file()
    before = (output / "recording.000000.tar").stat()
    report = pack(demo_speech, output)
    assert (report.num_kept_shards, report.num_cuts) == (1, 40)
    after = (output / "recording.000000.tar").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert not list(output.rglob("*.partial"))
    assert_holds(output, demo_speech)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_several_processes_write_the_same_shar(demo_speech: Path, tmp_path: Path) -> None:
    done: list[tuple[int, int | None]] = []
    pack(demo_speech, tmp_path / "three", jobs=3, on_progress=lambda *counts: done.append(counts))
    assert done == [(1, 3), (2, 3), (3, 3)]
    assert_holds(tmp_path / "three", demo_speech)


def test_shards_of_which_files_are_gone_or_incomplete_are_written_again(
    demo_speech: Path, demo_packed: Path, tmp_path: Path
) -> None:
    output = Path(shutil.copytree(demo_packed, tmp_path / "packed"))
    (output / "recording.000000.tar").unlink()
    with (output / "cuts.000001.jsonl.gz").open("r+b") as file:
        file.truncate(100)
    assert pack(demo_speech, output).num_kept_shards == 1
    assert_holds(output, demo_speech)
    assert pack(demo_speech, output).num_kept_shards == 3


def test_other_settings_or_corpora_replace_shards_only_if_asked(
    demo_speech: Path, demo_packed: Path, messy_corpora: MessyCorpora, tmp_path: Path
) -> None:
    output = Path(shutil.copytree(demo_packed, tmp_path / "packed"))
    (output / "notes.txt").write_text("mine")
    before = digests(output)
    for corpus, options, named in (
        (demo_speech, {"codec": "wav"}, "codec"),
        (demo_speech, {"shard_hours": 1.0}, "shard_hours"),
        (messy_corpora.speech, {}, "corpora"),
    ):
        with pytest.raises(OutputError, match=rf"holds shards of other {named}. Choose another path, or pass"):
            pack(corpus, output, **options)
    assert digests(output) == before
    report = pack(demo_speech, output, shard_hours=1.0, overwrite=True)
    assert (report.num_shards, report.num_kept_shards) == (1, 0)
    assert (output / "notes.txt").read_text() == "mine"
    (output / "notes.txt").unlink()
    assert_holds(output, demo_speech)


def test_shar_is_not_replaced_by_packing_its_own_audio(demo_packed: Path, tmp_path: Path) -> None:
    output, link = Path(shutil.copytree(demo_packed, tmp_path / "packed")), tmp_path / "link"
    prepare_corpus([output], tmp_path / "packed.corpus")
    link.symlink_to(output)
    before = digests(output)
    for target in (output, link):
        with pytest.raises(ConfigError, match=r"packed: holds the audio of .*packed.corpus, so it cannot be replaced"):
            pack(tmp_path / "packed.corpus", target, codec="wav", overwrite=True)
    assert digests(output) == before


def test_other_files_are_never_replaced(demo_speech: Path, tmp_path: Path) -> None:
    (tmp_path / "cuts.000000.jsonl").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(OutputError, match=r"is not empty, and not from `nestdata pack`"):
            pack(demo_speech, tmp_path, overwrite=overwrite)
    assert digests(tmp_path).keys() == {"cuts.000000.jsonl"}


# Lhotse leaves the tar that could not be written to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_full_disk_is_one_error_and_the_next_run_goes_on(demo_speech: Path, tmp_path: Path) -> None:
    with files_up_to(500_000), pytest.raises(OutputError, match=r"cannot be written .* Complete shards are kept: free"):
        pack(demo_speech, tmp_path / "packed")
    assert list((tmp_path / "packed").rglob("*.partial")) == []
    pack(demo_speech, tmp_path / "packed")
    assert_holds(tmp_path / "packed", demo_speech)


def test_corpora_with_a_common_id_are_refused_and_others_are_packed_together(demo_speech: Path, tmp_path: Path) -> None:
    noise = tmp_path / "noise.corpus"
    prepare_corpus([DEMO / "noise.json"], noise)
    report = pack_corpora([demo_speech, noise], tmp_path / "both", PackConfig())
    found = shar_of(tmp_path / "both")
    assert report.num_cuts == len(found) == 40 + len(Corpus.open(noise))
    with pytest.raises(ConfigError, match=r"several corpora have a cut with the id 'speech/"):
        pack_corpora([demo_speech, noise, demo_speech], tmp_path / "twice")


def test_absolute_ids_lose_their_slash_and_unusable_ones_are_left_out(tmp_path: Path) -> None:
    rows = []
    for name, cut_id in (("a", "/data/a"), ("b", "x/../b"), ("c", "c//d"), ("d", "ä ö/ü 1.5"), ("e", "e" * 300)):
        path = write_audio(tmp_path / f"{name}.wav", chirp(100, 900, 1.0))
        rows.append(MonoCut(cut_id, 0.0, 1.0, 0, recording=Recording.from_file(path)).to_dict())
    prepare_corpus([write_jsonl(tmp_path / "a.jsonl", rows)], tmp_path / "a.corpus")
    report = pack(tmp_path / "a.corpus", tmp_path / "packed")
    assert report.left_out == {"unusable_id": 2}
    assert sorted(shar_of(tmp_path / "packed")) == sorted(["data/a", "ä ö/ü 1.5", "e" * 300])
    assert all(cut.load_audio().shape == (1, 16000) for cut in shar_of(tmp_path / "packed").values())


def test_the_command_that_it_prints_accepts_every_cut(tmp_path: Path) -> None:
    corpus = tmp_path / "in.corpus"
    write_audio(tmp_path / "in/a.wav", hiss(400, 1), 8000)
    prepare_corpus([tmp_path / "in"], corpus, PrepareConfig(sampling_rate=8000, min_seconds=0.0))
    report = pack(corpus, tmp_path / "my set")
    assert report.prepare_command == (
        f"nestdata prepare '{tmp_path}/my set' -o 'my set.corpus' --sampling-rate 8000 --min-seconds 0"
    )


def test_the_command_packs_and_prints_what_it_did(
    messy_corpora: MessyCorpora, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "packed"
    arguments = ["pack", str(messy_corpora.windows), str(messy_corpora.speech), "-o", str(output), "--codec", "wav"]
    assert main([*arguments, "--json", "--shard-hours", "0.005"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["num_shards"] == len(list(output.glob("recording.*.tar"))) > 1
    assert summary["num_rounded"] > 0
    assert main(arguments) == 1
    assert f"error: {output}: holds shards of other shard_hours" in capsys.readouterr().err
    assert main([*arguments, "--overwrite"]) == 0
    found = capsys.readouterr().out.splitlines()
    assert found[0].startswith(f"{output}: {summary['num_cuts']} cuts, 0.02 h, 1 shards, ")
    assert found[-1].endswith(f"nestdata prepare {output} -o packed.corpus")
