import pickle

import pytest

from nestdata import AudioError, ConfigError, CorpusError, ManifestError, NestDataError, OutputError, PlanError, errors

ALL = [AudioError, ConfigError, CorpusError, ManifestError, NestDataError, OutputError, PlanError]


@pytest.mark.parametrize("error", ALL)
def test_every_error_survives_pickling_and_is_caught_by_the_base_class(error: type[NestDataError]) -> None:
    again = pickle.loads(pickle.dumps(error("cut 'a': what was wrong")))
    assert (type(again), str(again)) == (error, "cut 'a': what was wrong")
    assert isinstance(again, NestDataError)


def test_all_errors_of_the_module_are_tested() -> None:
    assert {value for value in vars(errors).values() if isinstance(value, type)} == set(ALL)
