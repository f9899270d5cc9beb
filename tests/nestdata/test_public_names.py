import subprocess
import sys
from types import ModuleType

import nestdata


def test_public_names_are_deliberate() -> None:
    own = {
        name
        for name, value in vars(nestdata).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)  # its modules are found there, too
    }
    assert own == set(nestdata.__all__)
    assert list(nestdata.__all__) == sorted(nestdata.__all__)


def test_every_public_name_says_what_it_is() -> None:
    for name in set(nestdata.__all__) - {
        "InputFormat",
        "ProbeMode",
        "ShortAudio",
    }:  # aliases of types have no text of its own
        value = getattr(nestdata, name)
        assert value.__module__.startswith("nestdata.")
        assert value.__doc__
        assert not value.__doc__.startswith(f"{name}("), f"{name} has the docstring that dataclass makes up"


def test_importing_the_package_changes_no_global_random_state_and_starts_no_trainer() -> None:
    program = """
import random, sys
import numpy, torch
states = random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist()
import nestdata
assert (random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist()) == states
assert "pytorch_lightning" not in sys.modules and "nestmodel" not in sys.modules and "nestcli" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
