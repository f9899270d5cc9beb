import pickle

import nestdata
from nestmodel import ConfigError, ExtractError, ProbeError, TrainingError, WeightsError


def test_all_errors_derive_from_one_root() -> None:
    assert ConfigError is nestdata.ConfigError
    for error in (ExtractError, ProbeError, TrainingError, WeightsError):
        assert issubclass(error, nestdata.NestError)


def test_an_error_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(ConfigError("encoder.d_model is 3: expected an even number.")))
    assert type(error) is ConfigError
    assert str(error) == "encoder.d_model is 3: expected an even number."
