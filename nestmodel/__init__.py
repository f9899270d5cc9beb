"""The NEST network, its training with Lightning, and the tools around a trained encoder.

Public names are listed in `__init__.pyi`. They are imported at first use, which makes importing the package fast.
"""

import os
import pwd

from lazy_loader import attach_stub

try:
    pwd.getpwuid(os.getuid())
except KeyError:  # a user without a name, as in a container; torch and others ask for one when they are imported
    os.environ.setdefault("USER", f"user-{os.getuid()}")

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
