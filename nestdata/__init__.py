"""Deterministic, duration-balanced batches of clean and noisy speech from manifests.

Public names are listed in `__init__.pyi` and imported at first use, so importing the package is fast.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
