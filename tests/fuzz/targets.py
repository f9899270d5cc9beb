"""All targets by name."""

from tests.fuzz.data_targets import DATA_TARGETS
from tests.fuzz.guard_targets import GUARD_TARGETS
from tests.fuzz.model_targets import MODEL_TARGETS
from tests.fuzz.storage_targets import STORAGE_TARGETS
from tests.fuzz.target import Target

TARGETS: dict[str, Target] = DATA_TARGETS | STORAGE_TARGETS | MODEL_TARGETS | GUARD_TARGETS
