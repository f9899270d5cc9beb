import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.extras import needs

pytestmark = needs("probe", "jiwer")
MAINS = ("big", "small")


@pytest.fixture
def bench() -> ModuleType:
    return importlib.import_module("benchmarks.learning.where")


def lines(side: str, **seconds: float) -> list[dict[str, Any]]:
    """Returns ten lines of each voice with the given length each, in two scenes."""
    return [
        {"audio_filepath": f"/{side}/{voice}{i}.flac", "speaker": voice, "scene": f"{side}{i % 2}", "duration": each}
        for voice, each in seconds.items()
        for i in range(10)
    ]


def test_training_sets_of_different_voices_last_equally_long(bench: ModuleType) -> None:
    train = lines("train", big=36, small=30, parrot=3)
    assert bench.main_voices(train) == MAINS
    hours = bench.length(bench.of_voices(train, {"small"}))
    sets = {
        name: bench.draw(bench.of_voices(train, voices), hours) for name, voices in bench.training_sets(train, MAINS)
    }
    assert {name: {line["speaker"] for line in drawn} for name, drawn in sets.items()} == {
        "all": {"big", "small", "parrot"},
        "two": {"big", "small"},
        "one-0": {"big"},
        "one-1": {"small"},
    }
    for drawn in sets.values():  # the last line that is drawn may be cut off by no more than its length
        assert hours <= bench.length(drawn) < hours + 36 / 3600


def test_conditions_are_those_for_which_there_are_voices(bench: ModuleType) -> None:
    train, test = lines("train", big=36, small=30, parrot=3), lines("test", big=1, small=1, parrot=1, crab=1)
    found = {(row.training, row.test): row.parts for row in bench.conditions(train, test, MAINS)}
    assert len(found) == 8
    assert found["all voices", "voices of no training line"] == [("all", {"crab"})]
    assert found["two voices", "the other voices"] == [("two", {"parrot", "crab"})]
    assert found["one voice", "the other of the two"] == [("one-0", {"small"}), ("one-1", {"big"})]
    rows = bench.conditions(lines("train", big=2, small=1), lines("test", big=1, small=1), MAINS)
    assert [(row.training, row.test) for row in rows] == [
        *(("two voices", "the same two"), ("one voice", "the same"), ("one voice", "the other of the two"))
    ]


def test_errors_are_counted_for_the_voices_of_a_condition_only(bench: ModuleType, tmp_path: Path) -> None:
    test = lines("test", big=1, small=1)
    (tmp_path / "Czech-test-characters.json").write_text("".join(json.dumps(line) + "\n" for line in test))

    def write(part: str, letter: str, trained: dict[str, str], **others: str) -> None:
        """Writes transcripts of the text `abcd`: those of the trained encoder by voice."""
        (tmp_path / f"Czech-{part}-characters-{letter}").mkdir()
        written = [
            {
                "id": Path(line["audio_filepath"]).stem,
                "group": f"group {line['scene']}",
                "text": "abcd",
                "trained": {"0": trained[line["speaker"]]},
                **{features: {"0": text} for features, text in others.items()},
            }
            for line in test
        ]
        path = tmp_path / f"Czech-{part}-characters-{letter}" / "hypotheses.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in written))

    baselines = {"untrained": "ab", "log_mel": "a"}
    write("one-0", "A", {"big": "abcd", "small": "abc"}, **baselines)
    write("one-1", "A", {"big": "abx", "small": "abcd"}, **baselines)
    write("one-0", "B", {"big": "xbcd", "small": "abc"})
    write("one-1", "B", {"big": "abc", "small": "abcd"})
    rows = bench.conditions(lines("train", big=2, small=1), test, MAINS)
    same, other = rows[1:]
    found = bench.counts_of(tmp_path, "Czech", same, "characters", ["A", "B"])
    assert [each.errors.tolist() for each in found] == [[5, 5], [40, 40], [60, 60]]  # by scene
    assert found.trained.num_reference.tolist() == [80, 80] == found.untrained.num_reference.tolist()
    found = bench.counts_of(tmp_path, "Czech", other, "characters", ["A"])
    assert found.trained.errors.tolist() == [15, 15]
    (row,) = bench.gain_rows(tmp_path, {"Czech": [same, other]}, {"a": ["A"]})
    assert row[:4] == ["Czech", "one voice to the other of the two", "one voice to the same", "a"]
    # the gain is 20 of 40 characters less with the other voice: 15 - 20 errors instead of 0 - 20
    assert row[4].startswith("37.5 (37.5 to")


def test_phones_become_one_character_each(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for espeak-ng, which need not be installed: its output of two Czech texts."""
    spoken = {"džbán ryb": "dʒ_b_ˈaː_n r_ˈi_b\n", "rybáb": "r_ˈi_(en)_b\n aː_b\n"}  # noqa: RUF001, which takes IPA for typing errors
    monkeypatch.setattr(bench.phones, "run_peer", lambda command: spoken[command[-1]])
    sides, num_phones = bench.phones.in_phones([[{"text": "Džbán, ryb!"}], [{"text": "Rybáb"}]], "cs")
    (one,), (other,) = sides
    assert num_phones == 6
    assert [len(one["text"]), len(other["text"])] == [7, 5]
    assert one["text"][1] == one["text"][6] == other["text"][2]  # b
