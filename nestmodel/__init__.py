"""The NEST network, its training with Lightning, and the tools around a trained encoder.

Public names are listed in `__init__.pyi`. They are imported at first use, which makes importing the package fast.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
