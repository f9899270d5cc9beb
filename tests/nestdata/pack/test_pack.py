import json
import shutil
import signal
import subprocess
import sys
import tarfile
import zlib
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from nestcli.nestdata import main
from nestdata import (
    ConfigError,
    Corpora,
    Corpus,
    CorpusError,
    OutputError,
    PackConfig,
    PrepareConfig,
    pack_corpora,
    prepare_corpus,
)
from nestdata.corpus.packed_set import PackedSet, read_members
from nestdata.pack.order import PackingOrder
from nestdata.storage import storage
from tests.conftest import MessyCorpora
from tests.nestdata.full_disk import files_up_to
from tests.nestdata.pack.packing import DEMO, digests, pack, samples_by_id, shar_of
from tests.synthesis import chirp, folder_corpus, hiss, tone, write_audio, write_jsonl


def test_lhotse_reads_the_same_samples_ids_and_labels(speech: Path, packed: Path) -> None:
    corpus, found = Corpus.open(speech), shar_of(packed)
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


@pytest.mark.parametrize("codec", ["flac", "pcm"])
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


def test_24_bits_keep_24_bit_audio_and_leave_16_bit_audio_as_it_is(tmp_path: Path) -> None:
    fine = (np.round(2**23 * chirp(100, 900, 1.0).astype(np.float64)) / 2**23).astype(np.float32)
    write_audio(tmp_path / "in/fine.flac", fine, subtype="PCM_24")
    write_audio(tmp_path / "in/coarse.flac", chirp(200, 700, 1.0))
    prepare_corpus([tmp_path / "in"], tmp_path / "in.corpus")
    for bits, num_rounded in ((16, 1), (24, 0)):
        output = tmp_path / f"packed-{bits}"
        assert pack(tmp_path / "in.corpus", output, bits=bits).num_rounded == num_rounded
        loaded = {cut_id: cut.load_audio()[0] for cut_id, cut in shar_of(output).items()}
        expected = samples_by_id(tmp_path / "in.corpus")
        assert np.array_equal(loaded["coarse"], expected["coarse"])
        assert np.array_equal(loaded["fine"], expected["fine"]) == (bits == 24)
        with tarfile.open(output / "recording.000000.tar") as tar:
            subtypes = {name: soundfile.info(tar.extractfile(name)).subtype for name in ("fine.flac", "coarse.flac")}
        assert subtypes == {"fine.flac": f"PCM_{bits}", "coarse.flac": "PCM_16"}


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
    record = json.loads((tmp_path / "packed/cuts.pack/000000.json").read_text())
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
    assert [row["number"] for row in rows] == sorted(row["number"] for row in rows)


def test_noise_with_a_sample_bank_is_packed_from_the_bank(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    report = pack(messy_corpora.banked, tmp_path / "packed")
    expected, found = samples_by_id(messy_corpora.banked), shar_of(tmp_path / "packed")
    assert report.left_out == {}
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name].load_audio()[0], samples) for name, samples in expected.items())


def test_the_manifest_gives_the_bytes_of_every_member(packed: Path) -> None:
    opened = PackedSet.open(str(packed), storage())
    assert len(opened.shards) == 3
    numbers: list[int] = []
    for shard in opened.shards:
        content = (packed / shard.recording.name).read_bytes()
        assert (len(content), len((packed / shard.cuts.name).read_bytes())) == (shard.recording.size, shard.cuts.size)
        members = read_members(str(packed), shard, storage())
        with tarfile.open(packed / shard.recording.name) as tar:
            files = [member for member in tar if member.name.endswith(".flac")]
        assert members.offsets.tolist() == [member.offset_data for member in files]
        assert members.lengths.tolist() == [member.size for member in files]
        spans = zip(members.offsets.tolist(), members.lengths.tolist(), strict=True)
        assert members.checksums.tolist() == [zlib.crc32(content[start : start + size]) for start, size in spans]
        numbers += members.numbers.tolist()
    assert sorted(numbers) == list(range(40))
    assert numbers != sorted(numbers)


def test_indexes_are_those_of_lhotse_2(packed: Path) -> None:
    # The format is that of `lhotse.indexing` in Lhotse 2: where each sample starts, and the size of the file.
    for number in range(3):
        tar_path, cuts_path = packed / f"recording.{number:06d}.tar", packed / f"cuts.{number:06d}.jsonl"
        with tarfile.open(tar_path) as tar:
            pairs = [member.offset for member in tar][::2]
        index = np.fromfile(packed / f"cuts.pack/{tar_path.name}.idx", "<u8").tolist()
        assert index == [*pairs, tar_path.stat().st_size]
        lines = cuts_path.read_bytes().splitlines(keepends=True)
        index = np.fromfile(packed / f"cuts.pack/{cuts_path.name}.idx", "<u8").tolist()
        assert index == np.cumsum([0, *map(len, lines)]).tolist()


def test_shards_have_about_the_size_asked_for_and_the_order_depends_on_the_seed(speech: Path, tmp_path: Path) -> None:
    orders = []
    for seed in (0, 1):
        pack(speech, tmp_path / str(seed), seed=seed, shard_bytes=320_000)
        sizes = [path.stat().st_size for path in sorted((tmp_path / str(seed)).glob("recording.*.tar"))]
        assert 5 <= len(sizes) <= 7
        assert all(0.5 < size / 320_000 < 1.6 for size in sizes)
        orders.append(list(shar_of(tmp_path / str(seed))))
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1]


@pytest.mark.multiprocess
def test_the_bytes_do_not_depend_on_the_number_of_processes(speech: Path, packed: Path, tmp_path: Path) -> None:
    done: list[tuple[int, int | None]] = []
    pack(speech, tmp_path / "three", jobs=3, on_progress=lambda *counts: done.append(counts))
    assert digests(tmp_path / "three") == digests(packed)
    assert done == [(1, 3), (2, 3), (3, 3)]


KILLED = """
import os, signal, sys
from pathlib import Path
import nestdata.pack.shard as shard
from tests.nestdata.pack.packing import pack
encode, left = shard.encode, int(sys.argv[3])
def encode_some(*arguments):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return encode(*arguments)
shard.encode = encode_some
pack(Path(sys.argv[1]), Path(sys.argv[2]))
"""


def killed_pack(speech: Path, output: Path, num_cuts: int) -> None:
    """Packs in a process that is killed after some cuts, and so within a shard."""
    command = [sys.executable, "-c", KILLED, str(speech), str(output), str(num_cuts)]
    done = subprocess.run(command, cwd=DEMO.parents[1], timeout=300, check=False)
    assert done.returncode == -signal.SIGKILL


def test_a_killed_run_is_incomplete_and_goes_on_to_the_same_bytes(speech: Path, packed: Path, tmp_path: Path) -> None:
    output = tmp_path / "packed"
    killed_pack(speech, output, 20)
    finished = output / "recording.000000.tar"
    before = finished.stat()
    assert (output / "cuts.pack/recording.000001.tar.partial").is_file()
    with pytest.raises(
        CorpusError, match=r"not a complete packed set: it has no cuts.pack/pack.json. If it was interrupted, run"
    ):
        PackedSet.open(str(output), storage())
    report = pack(speech, output)
    assert report.num_kept_shards == 1
    assert digests(output) == digests(packed)
    after = finished.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.parametrize("left", ["cuts.pack/.settings.json", "cuts.pack/.000001.json", ".cuts.000001.jsonl"])
def test_files_that_a_killed_run_was_writing_do_not_stop_the_next(
    speech: Path, packed: Path, tmp_path: Path, left: str
) -> None:
    output = tmp_path / "packed"
    if "settings" not in left:
        shutil.copytree(packed, output)
        (output / "cuts.pack/pack.json").unlink()
        (output / "cuts.pack/000001.json").unlink()
    # A name that `Storage.write` gives to a local file until it is complete.
    unfinished = output / f"{left}.0123456789ab.partial"
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    unfinished.write_text("{")
    report = pack(speech, output)
    assert report.num_kept_shards == (0 if "settings" in left else 2)
    assert digests(output) == digests(packed)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"seed": 5}, "seed"),
        ({"codec": "pcm"}, "codec"),
        ({"shard_bytes": 10**6}, "shard_bytes"),
        ({"bits": 24}, "bits"),
    ],
)
def test_a_run_with_other_settings_does_not_go_on(speech: Path, begun: Path, options: Any, named: str) -> None:
    before = digests(begun)
    with pytest.raises(OutputError, match=rf"holds a part of a set that was begun with other {named}. Run the command"):
        pack(speech, begun, **options)
    assert digests(begun) == before


def test_a_run_with_another_corpus_does_not_go_on(begun: Path, messy_corpora: MessyCorpora) -> None:
    with pytest.raises(OutputError, match=r"begun with other corpora"):
        pack(messy_corpora.speech, begun)


@pytest.fixture
def begun(packed: Path, tmp_path: Path) -> Path:
    """A set of which the last shard and the manifest are missing."""
    output = Path(shutil.copytree(packed, tmp_path / "begun"))
    for name in ("cuts.pack/pack.json", "cuts.pack/000002.json", "recording.000002.tar"):
        (output / name).unlink()
    return output


def test_shards_whose_files_are_incomplete_are_written_again(speech: Path, begun: Path, packed: Path) -> None:
    with (begun / "recording.000001.tar").open("r+b") as file:
        file.truncate(5000)
    (begun / "cuts.pack/000000.json").write_text("{")
    assert pack(speech, begun).num_kept_shards == 0
    assert digests(begun) == digests(packed)


def test_existing_output_is_replaced_only_if_asked(speech: Path, packed: Path, tmp_path: Path) -> None:
    output = tmp_path / "packed"
    pack(speech, output, shard_bytes=300_000)
    assert len(list(output.glob("recording.*"))) > 3
    with pytest.raises(OutputError, match=r"packed: exists already. Choose another path, or pass --overwrite"):
        pack(speech, output)
    pack(speech, output, overwrite=True)
    assert digests(output) == digests(packed)


def test_a_set_is_not_replaced_by_packing_its_own_audio(packed: Path, tmp_path: Path) -> None:
    output, link = Path(shutil.copytree(packed, tmp_path / "packed")), tmp_path / "link"
    prepare_corpus([output], tmp_path / "packed.corpus")
    link.symlink_to(output)
    before = digests(output)
    for target in (output, link):
        with pytest.raises(ConfigError, match=r"packed: holds the audio of .*packed.corpus, so it cannot be replaced"):
            pack(tmp_path / "packed.corpus", target, overwrite=True)
    assert digests(output) == before


def test_a_run_killed_while_it_replaces_a_set_is_replaced_by_the_next(
    speech: Path, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "packed"
    pack(speech, output, seed=1, shard_bytes=300_000)
    delete, deleted = storage().delete, []

    def delete_some(location: str) -> None:
        if len(deleted) == 3:
            raise KeyboardInterrupt
        deleted.append(location)
        delete(location)

    monkeypatch.setattr(storage(), "delete", delete_some)
    with pytest.raises(KeyboardInterrupt):
        pack(speech, output, overwrite=True)
    monkeypatch.undo()
    assert deleted[0] == str(output / "cuts.pack/pack.json")
    with pytest.raises(OutputError, match=r"begun with other corpora, .* or pass --overwrite"):
        pack(speech, output)
    pack(speech, output, overwrite=True)
    assert digests(output) == digests(packed)


@pytest.mark.parametrize("name", ["notes.txt", "cuts.000000.jsonl"])
def test_other_files_are_never_replaced(speech: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(OutputError, match=r"is not empty and not a packed set"):
            pack(speech, tmp_path, overwrite=overwrite)
    assert digests(tmp_path).keys() == {name}


def test_a_full_disk_is_one_error_and_the_next_run_goes_on(speech: Path, packed: Path, tmp_path: Path) -> None:
    with files_up_to(500_000), pytest.raises(OutputError, match=r"cannot be written .* Complete shards are kept: free"):
        pack(speech, tmp_path / "packed")
    assert list((tmp_path / "packed").rglob("*.partial")) == []
    pack(speech, tmp_path / "packed")
    assert digests(tmp_path / "packed") == digests(packed)


def test_corpora_with_a_common_id_are_refused_and_others_are_packed_together(speech: Path, tmp_path: Path) -> None:
    noise = tmp_path / "noise.corpus"
    prepare_corpus([DEMO / "noise.json"], noise)
    report = pack_corpora([speech, noise], tmp_path / "both", PackConfig())
    found = shar_of(tmp_path / "both")
    assert report.num_cuts == len(found) == 40 + len(Corpus.open(noise))
    with pytest.raises(ConfigError, match=r"several corpora have a cut with the id 'speech/"):
        pack_corpora([speech, noise, speech], tmp_path / "twice")


def test_a_common_id_is_found_whatever_its_hash(tmp_path: Path) -> None:
    # The hash ends with a zero byte, which numpy would cut off the end of a byte string.
    name = next(
        f"{number}" for number in range(10_000) if blake2b(f"{number}".encode(), digest_size=8).digest()[-1] == 0
    )
    corpora = [folder_corpus(tmp_path / side, {f"{name}.wav": tone(300, 0.2)}).path for side in ("one", "two")]
    with pytest.raises(ConfigError, match=rf"several corpora have a cut with the id '{name}'"):
        pack_corpora(corpora, tmp_path / "packed")


def test_absolute_ids_lose_their_slash_and_unusable_ones_are_left_out(tmp_path: Path) -> None:
    rows = []
    for name, cut_id in (("a", "/data/a"), ("b", "x/../b"), ("c", "c//d"), ("d", "ä ö/ü 1.5"), ("e", "e" * 300)):
        path = write_audio(tmp_path / f"{name}.wav", chirp(100, 900, 1.0))
        recording = {
            "id": name,
            "sources": [{"type": "file", "channels": [0], "source": str(path)}],
            "sampling_rate": 16000,
            "num_samples": 16000,
            "duration": 1.0,
        }
        rows.append(
            {"id": cut_id, "start": 0.0, "duration": 1.0, "channel": 0, "recording": recording, "type": "MonoCut"}
        )
    prepare_corpus([write_jsonl(tmp_path / "a.jsonl", rows)], tmp_path / "a.corpus")
    report = pack(tmp_path / "a.corpus", tmp_path / "packed")
    assert report.left_out == {"unusable_id": 2}
    assert sorted(shar_of(tmp_path / "packed")) == sorted(["data/a", "ä ö/ü 1.5", "e" * 300])
    assert all(cut.load_audio().shape == (1, 16000) for cut in shar_of(tmp_path / "packed").values())


def test_ids_that_differ_in_a_slash_at_their_start_only_are_refused(tmp_path: Path) -> None:
    corpus = folder_corpus(tmp_path / "in", {"a.wav": tone(300, 0.5), "b.wav": tone(400, 0.5)}).path
    rows = [json.loads(line) for line in (corpus / "cuts.jsonl").read_text().splitlines()]
    rows[0]["id"], rows[1]["id"] = "/x/a", "x/a"
    prepare_corpus([write_jsonl(tmp_path / "cuts.jsonl", rows)], tmp_path / "slash.corpus", PrepareConfig())
    with pytest.raises(
        ConfigError, match=r"the cuts '/x/a' and 'x/a' would have the same name.* Change one of the ids"
    ):
        pack(tmp_path / "slash.corpus", tmp_path / "packed")


def test_a_corpus_without_usable_audio_is_an_error(tmp_path: Path) -> None:
    corpus = folder_corpus(tmp_path / "in", {"a.wav": tone(300, 1.0)})
    (tmp_path / "in/a.wav").unlink()
    with pytest.raises(CorpusError, match=r"no cut can be packed; the first: 'a': missing"):
        pack(corpus.path, tmp_path / "packed")
    assert not (tmp_path / "packed/cuts.pack/pack.json").exists()


def test_order_and_shards_do_not_depend_on_how_many_cuts_are_processed_at_a_time(
    messy_corpora: MessyCorpora, speech: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpora = Corpora.open([messy_corpora.speech, speech])
    order = PackingOrder(corpora, 7)
    bounds = order.shard_bounds(100_000, 1300)
    monkeypatch.setattr("nestdata.pack.order._BLOCK", 5)
    assert order.shard_bounds(100_000, 1300) == bounds
    assert bounds == sorted(set(bounds))
    assert (bounds[0], bounds[-1]) == (0, len(corpora))
    assert len(bounds) > 10
    found = order.cuts(0, len(corpora))
    assert sorted(found.indices.tolist()) == sorted(found.numbers.tolist()) == list(range(len(corpora)))
    # Cut 0 of the second corpus comes after all cuts of the first one.
    first = Corpus.open(messy_corpora.speech)
    line = (speech / "cuts.jsonl").read_bytes().splitlines()[0]
    index = found.indices[found.numbers.tolist().index(len(first))]
    assert corpora.line(int(index)) == json.loads(line)


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"bits is 8: expected 16 or 24"):
        PackConfig(bits=8)
    with pytest.raises(ConfigError, match=r"shard_bytes is 0"):
        PackConfig(shard_bytes=0)


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
    corpora = (str(messy_corpora.windows), str(messy_corpora.speech))
    arguments = ["pack", *corpora, "-o", str(output), "--codec", "pcm", "--bits", "24", "--seed", "3"]
    assert main([*arguments, "--json", "--shard-bytes", "500000"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["num_shards"] == len(list(output.glob("recording.*.tar"))) > 1
    assert summary["num_rounded"] > 0
    assert main(arguments) == 1
    assert f"error: {output}: exists already" in capsys.readouterr().err
    assert main([*arguments, "--overwrite"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{output}: {summary['num_cuts']} cuts, 0.02 h, 1 shards, {summary['num_bytes'] / 1e9:.3f} GB",
        f"  rounded: {summary['num_rounded']} cuts",
        f"  left out: {summary['left_out']['changed']} changed; see {output}/cuts.pack/left_out.jsonl",
        f"  prepare a corpus from it: nestdata prepare {output} -o packed.corpus",
    ]


def test_distinct_bytes_of_windows_are_counted_once(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    pack(messy_corpora.windows, tmp_path / "packed")
    prepare_corpus([tmp_path / "packed"], tmp_path / "halves.corpus", PrepareConfig(window_seconds=0.7))
    corpus = Corpus.open(tmp_path / "halves.corpus")
    addresses = [corpus.address(index) for index in range(len(corpus))]
    total = sum(address.length for address in addresses if address)
    distinct = {address[:3] for address in addresses if address}
    assert corpus.addressed_bytes() == (total, sum(length for _, _, length in distinct))
    assert len(distinct) < len(addresses)
