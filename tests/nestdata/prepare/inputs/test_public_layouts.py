"""Layouts of public data sets, in small, with the lines of `docs/formats.md` that read them."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tests.nestdata.prepare.inputs.reading import prepared
from tests.nestdata.prepare.inputs.shards import write_tar
from tests.synthesis import encoded, hiss, write_audio

RATE = 16000
CLIP = hiss(4 * RATE, 1)
Found = dict[str, tuple[float | str, ...]]


def esc_50(root: Path) -> Path:
    write_audio(root / "audio" / "1-100032-A-0.wav", CLIP)
    (root / "meta").mkdir()
    header = "filename,fold,target,category,esc10,src_file,take\n"
    (root / "meta" / "esc50.csv").write_text(f"{header}1-100032-A-0.wav,1,0,dog,True,100032,A\n")
    os.chdir(root / "audio")
    return root / "meta" / "esc50.csv"


def desed(root: Path) -> Path:
    write_audio(root / "audio" / "Y00.wav", CLIP)
    rows = "Y00.wav\t0.5\t2.0\tSpeech\nY00.wav\t1.0\t3.5\tDog\n"
    (root / "validation.tsv").write_text(f"filename\tonset\toffset\tevent_label\n{rows}")
    os.chdir(root / "audio")
    return root / "validation.tsv"


def common_voice(root: Path) -> Path:
    write_audio(root / "clips" / "common_voice_en_1.mp3", CLIP)
    header = "client_id path sentence_id sentence sentence_domain up_votes down_votes age gender accents variant locale"
    row = ["c0ffee", "common_voice_en_1.mp3", "5f", 'He said "no".', "", "2", "0", "", "", "", "", "en"]
    (root / "validated.tsv").write_text("\t".join(header.split()) + "\n" + "\t".join(row) + "\n")
    return root / "validated.tsv"


def emilia(root: Path) -> Path:
    row = {"id": "EN_B00_S0_W0", "wav": "EN_B00/x.mp3", "text": "so", "duration": 4.0, "speaker": "S0", "dnsmos": 3.3}
    members = [("EN_B00_S0_W0.json", json.dumps(row).encode()), ("EN_B00_S0_W0.mp3", encoded(CLIP, "MP3"))]
    return write_tar(root / "EN-B000000.tar", members)


def rows(**row: Any) -> Callable[[Path], Path]:
    """Returns a layout of Parquet files, with a row that holds its audio."""

    def made(root: Path) -> Path:
        (root / "data").mkdir()
        audio = {"audio": {"bytes": encoded(CLIP, "FLAC"), "path": "1.flac"}}
        table = pyarrow.Table.from_pylist([audio | row])
        pyarrow.parquet.write_table(table, root / "data" / "train-00000-of-00001.parquet")
        return root / "data"

    return made


def folder(name: str) -> Callable[[Path], Path]:
    def made(root: Path) -> Path:
        write_audio(root / "data" / name, CLIP)
        (root / "data" / "README.txt").write_text("a list\n")
        return root / "data"

    return made


MLS = rows(
    original_path="http://a/b_64kb.mp3", begin_time=401.76, end_time=405.76, transcript="und", audio_duration=4.0,
    speaker_id="252", chapter_id="1", id="1",
)  # fmt: skip
GIGASPEECH = rows(
    segment_id="POD_S1", speaker="N/A", text="AS", begin_time=159.0, end_time=163.0, audio_id="POD", url="https://a",
    category=3,
)  # fmt: skip
PEOPLES_SPEECH = rows(id="a/b.flac", duration_ms=4000, text="hi")
YODAS = rows(id="0", utt_id="x-0-1", text="ja")


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (esc_50, {"1-100032-A-0": (0, 4)}),
        (desed, {"Y00@0.500+1.500": (0.5, 1.5), "Y00@1.000+2.500": (1, 2.5)}),
        (common_voice, {"common_voice_en_1": (0, 4, 'He said "no".')}),
        (emilia, {"EN_B00_S0_W0": (0, 4, "so")}),
        (MLS, {"0": (0, 4, "und")}),
        (GIGASPEECH, {"0": (0, 4, "AS")}),
        (PEOPLES_SPEECH, {"0": (0, 4, "hi")}),
        (YODAS, {"0": (0, 4, "ja")}),
        (folder("noise/free-sound/a.wav"), {"a": (0, 4)}),
        (folder("p225/p225_001_mic1.flac"), {"p225_001_mic1": (0, 4)}),
        (folder("small/100/sea_fairies/01.flac"), {"01": (0, 4)}),
    ],
)
def test_a_public_data_set_is_read_as_it_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: Callable[[Path], Path], expected: Found
) -> None:
    monkeypatch.chdir(tmp_path)
    path = layout(tmp_path)
    cuts, rejects = prepared(path)
    assert rejects == []
    found = {
        cut_id.rpartition("/")[2]: (cut["start"], round(cut["duration"], 1), *(x["text"] for x in cut["supervisions"]))
        for cut_id, cut in cuts.items()
    }
    assert found == expected
