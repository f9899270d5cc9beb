"""Lets every process that imports it repeat a request after half a second without an answer, instead of after 15 s.

A fork server that imports it passes this on to the loader workers that it forks.
"""

import inspect

from nestdata import StorageConfig

DEFAULTS = inspect.unwrap(StorageConfig.__init__).__kwdefaults__
"""The default settings of storages; unwrapped, because tests check the types of arguments."""

DEFAULTS["stall_timeout_s"] = 0.5
