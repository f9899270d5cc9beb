"""Excludes all objects that exist now from garbage collection; the fork server imports this module last.

A collection writes to every object that it looks at. In a worker, that would copy the memory which the worker shares
with the fork server: 0.1 s of processor time for torch and the decoders.
"""

import gc

gc.collect()
gc.freeze()
