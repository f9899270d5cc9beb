import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lhotse import Recording

from nestdata import Corpus, PrepareConfig, prepare_corpus
from tests.nestdata.prepare.inputs.reading import prepared
from tests.nestdata.prepare.inputs.shards import write_tar
from tests.synthesis import Samples, hiss, read_audio, write_audio, write_jsonl

RATE = 16000


def ids_in(path: Path) -> list[str]:
    corpus = Corpus.open(path)
    return sorted(corpus.line(index)["id"] for index in range(len(corpus)))


def check_that_every_recording_is_a_cut(corpus: Corpus, recordings: list[Samples]) -> None:
    """Compares cuts and recordings in any order; ids have to differ."""
    found = sorted(corpus.load(index)[1].tobytes() for index in range(len(corpus)))
    assert found == sorted(recording.tobytes() for recording in recordings)
    assert len({corpus.line(index)["id"] for index in range(len(corpus))}) == len(corpus)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["folder", "manifest", "tars", "corpora", "lhotse"])
def test_equal_names_in_several_inputs_are_distinct_cuts(tmp_path: Path, kind: str, seed: int) -> None:
    chosen = random.Random(seed)
    recordings, inputs = list[Samples](), list[Path]()
    for number in range(chosen.randrange(2, 5)):
        # Names of folders may be equal as well.
        folder = tmp_path / f"{number}" / chosen.choice(["wavs", f"wavs{number}"])
        for name in chosen.sample(["a", "b", "c"], chosen.randrange(1, 4)):
            samples = hiss(2000 + 10 * len(recordings), len(recordings))
            recordings.append(read_audio(write_audio(folder / f"{name}.wav", samples)))
        files = sorted(folder.iterdir())
        if kind == "folder":
            inputs.append(folder)
        elif kind == "manifest":
            inputs.append(write_jsonl(folder / "m.json", [{"audio_filepath": file.name} for file in files]))
        elif kind == "tars":
            inputs.append(write_tar(folder.parent / "000.tar", [(file.name, file.read_bytes()) for file in files]))
        elif kind == "corpora":
            prepare_corpus(folder, folder.parent / "speech.corpus")
            inputs.append(folder.parent / "speech.corpus")
        else:
            cuts = [Recording.from_file(file).to_cut().with_id(file.stem).to_dict() for file in files]
            inputs.append(write_jsonl(folder / "cuts.jsonl", cuts))
    report = prepare_corpus(inputs, tmp_path / "all.corpus")
    assert report.rejected == {}
    check_that_every_recording_is_a_cut(Corpus.open(tmp_path / "all.corpus"), recordings)
    again = prepare_corpus([*inputs, *inputs], tmp_path / "again.corpus")
    assert again.rejected == {"duplicate_id": len(recordings)}
    assert ids_in(tmp_path / "again.corpus") == ids_in(tmp_path / "all.corpus")


def test_keys_that_begin_again_in_each_tar_of_a_data_set_get_its_name(tmp_path: Path) -> None:
    audio = [read_audio(write_audio(tmp_path / f"{i}.wav", hiss(2000 + i, i))) for i in range(6)]
    for shard in range(3):
        members = [(f"{k:06d}.wav", (tmp_path / f"{2 * shard + k}.wav").read_bytes()) for k in range(2)]
        (tmp_path / "data").mkdir(exist_ok=True)
        write_tar(tmp_path / "data" / f"train.{shard}.tar", members)
    report = prepare_corpus(tmp_path / "data", tmp_path / "c.corpus")
    assert report.rejected == {}
    check_that_every_recording_is_a_cut(Corpus.open(tmp_path / "c.corpus"), audio)
    assert ids_in(tmp_path / "c.corpus") == [
        *("000000", "000001"), *(f"train.{shard}/00000{k}" for shard in (1, 2) for k in (0, 1)),
    ]  # fmt: skip


def test_windows_of_an_entry_with_another_id_have_that_id(tmp_path: Path) -> None:
    for folder in ("x", "y"):
        write_audio(tmp_path / folder / "a.wav", hiss(2 * RATE, ord(folder)))
        prepare_corpus(tmp_path / folder, tmp_path / f"{folder}.corpus")
    corpora = [tmp_path / "x.corpus", tmp_path / "y.corpus"]
    prepare_corpus(corpora, tmp_path / "all.corpus", PrepareConfig(window_seconds=1.0))
    corpus = Corpus.open(tmp_path / "all.corpus")
    spans = ("@0.000+1.000", "@1.000+1.000")
    assert ids_in(corpus.path) == [*(f"a{span}" for span in spans), *(f"y/a{span}" for span in spans)]
    cut = next(corpus.line(i) for i in range(4) if corpus.line(i)["id"] == "y/a@1.000+1.000")
    assert cut["recording"]["id"] == "y/a"


@pytest.mark.parametrize("form", ["m.json", "m.csv"])
def test_a_row_that_names_the_audio_again_says_which_columns_differ(tmp_path: Path, form: str) -> None:
    write_audio(tmp_path / "a.wav", hiss(4 * RATE, 1))
    rows = [{"path": "a.wav", "von": von, "Datum": 7, "text": str(von)} for von in (1, 2)]
    lines = ["path,von,Datum,text", *(",".join(map(str, row.values())) for row in rows)]
    (tmp_path / "m.csv").write_text("\n".join(lines))
    write_jsonl(tmp_path / "m.json", rows)
    _, (reject,) = prepared(tmp_path / form)
    assert "they differ in von: " in reject["detail"]


@pytest.mark.parametrize("given", [0, 1, "mix", "left", "right"])
def test_a_channel_that_is_asked_for_is_that_of_every_input(tmp_path: Path, given: Any) -> None:
    tracks = np.stack([hiss(RATE, 1), hiss(RATE, 2)], axis=1)
    stereo = read_audio(write_audio(tmp_path / "a" / "call.wav", tracks))
    expected = {0: stereo[:, 0], "left": stereo[:, 0], 1: stereo[:, 1], "right": stereo[:, 1]}.get(given)
    if expected is None:
        expected = (stereo[:, 0] + stereo[:, 1]) / np.float32(2)
    prepare_corpus(tmp_path / "a", tmp_path / "first.corpus")
    prepare_corpus(tmp_path / "a", tmp_path / "second.corpus", PrepareConfig(channel=1))
    shutil.copyfile(tmp_path / "a" / "call.wav", tmp_path / "b.wav")
    row = {"audio_filepath": "b.wav", "channel": 1}
    inputs = [write_jsonl(tmp_path / "m.json", [row]), write_jsonl(tmp_path / "n.json", [{**row, "channel": 0}])]
    inputs += [tmp_path / "first.corpus", tmp_path / "second.corpus", tmp_path / "a"]
    for number, path in enumerate(inputs):
        prepare_corpus(path, tmp_path / f"{number}.corpus", PrepareConfig(channel=given))
        ((_, samples),) = [Corpus.open(tmp_path / f"{number}.corpus").load(0)]
        np.testing.assert_array_equal(samples, expected)


def test_both_channels_of_a_corpus_are_joined_with_distinct_ids(tmp_path: Path) -> None:
    tracks = np.stack([hiss(RATE, 1), hiss(RATE, 2)], axis=1)
    stereo = read_audio(write_audio(tmp_path / "a" / "call.wav", tracks))
    prepare_corpus(tmp_path / "a", tmp_path / "0.corpus")
    prepare_corpus(tmp_path / "0.corpus", tmp_path / "1.corpus", PrepareConfig(channel=1))
    assert ids_in(tmp_path / "1.corpus") == ["call@ch1"]
    prepare_corpus(tmp_path / "a", tmp_path / "2.corpus", PrepareConfig(channel=1))
    prepare_corpus([tmp_path / "0.corpus", tmp_path / "2.corpus"], tmp_path / "both.corpus")
    assert ids_in(tmp_path / "both.corpus") == ["call", "call@ch1"]
    check_that_every_recording_is_a_cut(
        Corpus.open(tmp_path / "both.corpus"), [stereo[:, 0].copy(), stereo[:, 1].copy()]
    )
