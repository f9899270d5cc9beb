"""Runs `nestmodel` so that rank 1 of `features` kills itself before its third batch.

python -m tests.cli.dying_rank features MODEL INPUT -o OUTPUT ...

The module is also imported by the ranks that `--devices` starts.
"""

import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

from nestcli.nestmodel import main
from nestmodel.evaluate import extract
from nestmodel.evaluate.encode import encode_batch

NUM_BATCHES = 2
_begun: list[int] = []


def _encode_batch(*arguments: Any) -> Iterator[Any]:
    _begun.append(1)
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID")) == "1" and len(_begun) > NUM_BATCHES:
        os.kill(os.getpid(), signal.SIGKILL)
    return encode_batch(*arguments)


if __name__ in ("__main__", "__mp_main__"):  # a test imports the number only
    extract.encode_batch = _encode_batch

if __name__ == "__main__":
    sys.exit(main())
