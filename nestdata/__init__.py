"""From manifests to deterministic, duration-balanced batches of clean and noisy speech.

Public names are listed in `__init__.pyi` and imported at first use, so that importing the package is quick.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
