import subprocess
import sys
from types import ModuleType

import nestguard


def test_public_names_are_deliberate() -> None:
    own = {
        name
        for name, value in vars(nestguard).items()
        if not name.startswith("_")
        and not isinstance(value, ModuleType)  # submodules are attributes of the package as well
    }
    assert own == set(nestguard.__all__)
    assert list(nestguard.__all__) == sorted(nestguard.__all__)


def test_every_public_name_has_a_docstring() -> None:
    for name in set(nestguard.__all__) - {"EXIT_STALLED"}:
        value = getattr(nestguard, name)
        assert value.__module__.startswith("nestguard.")
        assert value.__doc__
        assert not value.__doc__.startswith(f"{name}("), f"{name} has only the docstring that dataclass generates"


def test_nestguard_does_not_import_torch_numpy_or_lhotse() -> None:
    program = """
import sys
import nestguard, nestguard.monitor
assert not {"torch", "numpy", "lhotse"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
