import pickle

from nestmodel.errors import ConfigError, NestModelError


def test_catching_the_root_catches_every_error() -> None:
    assert issubclass(ConfigError, NestModelError)
    assert issubclass(NestModelError, Exception)


def test_an_error_survives_the_way_to_another_process() -> None:
    error = pickle.loads(pickle.dumps(ConfigError("encoder.d_model is 3: expected an even number.")))
    assert type(error) is ConfigError
    assert str(error) == "encoder.d_model is 3: expected an even number."
