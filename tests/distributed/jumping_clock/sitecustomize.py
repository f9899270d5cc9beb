"""Sets the wall clock one hour ahead once a file exists. Python imports this module at startup if it is on the path."""

import os
import time

_path = os.environ["CLOCK_JUMPS_WITH"]
_time, _time_ns = time.time, time.time_ns
time.time = lambda: _time() + 3600 * os.path.exists(_path)
time.time_ns = lambda: _time_ns() + 3600 * 10**9 * os.path.exists(_path)
