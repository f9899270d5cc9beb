import pickle

from nestmodel.errors import ConfigError, NestModelError


def test_all_errors_derive_from_one_root() -> None:
    assert issubclass(ConfigError, NestModelError)
    assert issubclass(NestModelError, Exception)


def test_an_error_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(ConfigError("encoder.d_model is 3: expected an even number.")))
    assert type(error) is ConfigError
    assert str(error) == "encoder.d_model is 3: expected an even number."
