"""Trains for some minutes under a strict stall guard, which must not report anything.

python -m tests.distributed.soak [--minutes 20]
"""

import argparse
import sys
import tempfile
from pathlib import Path

from tests.conftest import MessyCorpora
from tests.distributed.runs import LIMITS, Run
from tests.synthesis import messy_noise, messy_speech


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    minutes = parser.parse_args().minutes
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        corpora = MessyCorpora(messy_speech(directory).path, messy_noise(directory).path, Path(), Path())
        run = Run(
            corpora=corpora,
            directory=directory / "run",
            max_steps=10**9,
            max_minutes=minutes,
            world_size=2,
            num_workers=1,
            every_n_steps=500,
            limits=LIMITS,
            limit_val_batches=1,
            val_check_interval=200,
        )
        codes = run.start()
        alarms = list((run.directory / "stalls").glob("*"))
        print(f"{minutes:g} minutes, {run.steps()[0].step} steps, exit codes {codes}, {len(alarms)} alarms")
        if codes != [0, 0] or alarms:
            print(run.log(0) + run.log(1), file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
