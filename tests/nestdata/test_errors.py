import pickle

import pytest

from nestdata import AudioError, ConfigError, CorpusError, ManifestError, NestDataError, PlanError, errors

ALL = [AudioError, ConfigError, CorpusError, ManifestError, NestDataError, PlanError]


@pytest.mark.parametrize("error", ALL)
def test_every_error_is_rebuilt_from_its_text_and_caught_by_the_root(error: type[NestDataError]) -> None:
    again = pickle.loads(pickle.dumps(error("cut 'a': what was wrong")))
    assert (type(again), str(again)) == (error, "cut 'a': what was wrong")
    assert isinstance(again, NestDataError)


def test_no_error_is_left_out_here() -> None:
    assert {value for value in vars(errors).values() if isinstance(value, type)} == set(ALL)
