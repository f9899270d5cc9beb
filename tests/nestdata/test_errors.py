import pickle
import traceback

import pytest
from torch.utils.data import DataLoader

from nestdata import (
    AudioError,
    ConfigError,
    CorpusError,
    ManifestError,
    NestError,
    OutputError,
    PlanError,
    StorageError,
    errors,
    last_error_line,
)

ALL = [AudioError, ConfigError, CorpusError, ManifestError, NestError, OutputError, PlanError, StorageError]


@pytest.mark.parametrize("error", ALL)
def test_every_error_survives_pickling_and_is_caught_by_the_base_class(error: type[NestError]) -> None:
    again = pickle.loads(pickle.dumps(error("cut 'a': what was wrong")))
    assert (type(again), str(again)) == (error, "cut 'a': what was wrong")
    assert isinstance(again, NestError)


class BrokenDataset:
    """Raises an error for its only element."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        raise AudioError(f"cut 'a: {index}': 3 of 5 samples")


def test_the_last_line_of_an_error_is_that_of_its_message_or_its_type() -> None:
    assert last_error_line(AudioError("AudioError: kept, since there is no traceback")) == (
        "AudioError: kept, since there is no traceback"
    )
    assert last_error_line(RuntimeError("first\n  second: third \n\n \n")) == "second: third"
    assert last_error_line(CorpusError(" \n")) == "CorpusError"


@pytest.mark.multiprocess
def test_an_error_of_a_loader_worker_is_described_without_traceback_and_type() -> None:
    loader = DataLoader(BrokenDataset(), num_workers=1)  # type: ignore[arg-type]
    with pytest.raises(AudioError, match="Traceback") as caught:
        next(iter(loader))
    assert last_error_line(caught.value) == "cut 'a: 0': 3 of 5 samples"


@pytest.mark.parametrize("error", [ZeroDivisionError("a: b"), errors.PlanError("a: b"), KeyboardInterrupt("a: b")])
def test_the_type_is_removed_from_a_traceback_whether_built_in_or_not(error: BaseException) -> None:
    text = "Caught it in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
    rebuilt = type(error)(text + "".join(traceback.format_exception_only(error)))
    assert last_error_line(rebuilt) == "a: b"


def test_a_message_with_a_huge_name_is_shortened_in_the_middle() -> None:
    message = f"m.json:7: {'a' * 10**5!r} is not a number. Fix this line."
    shown = str(ManifestError(message))
    assert len(shown) <= 2000
    assert shown.startswith("m.json:7: 'aaaa")
    assert shown.endswith("aaaa' is not a number. Fix this line.")
    assert len(str(ManifestError("name\n" * 10**4))) <= 20_000
    assert str(pickle.loads(pickle.dumps(ManifestError(message)))) == shown


def test_messages_of_usual_length_are_not_changed() -> None:
    for message in ("", "m.json: gone", f"/{'folder/' * 250}: gone", "\n".join(["a line of a traceback"] * 500)):
        assert str(ManifestError(message)) == message
