"""Entry point of the monitor process, which `start_monitor` launches. It is not meant to be called by hand.

python -m nestguard OPTIONS

OPTIONS is a JSON object: the arguments of `start_monitor`; `lock`, an open file, the locked directory; and `starter`,
the process id of the caller. With several nodes, the run token is the environment variable NESTGUARD_TOKEN, until
another token arrives as a line on standard input.
"""

import argparse
import contextlib
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from nestguard.connect.peers import TOKEN_VARIABLE, PeerConfig, SharedToken
from nestguard.diagnose.stall_limits import StallLimits
from nestguard.launch import IGNORED_SIGNALS
from nestguard.monitor import Monitor
from nestguard.observe.directory import DirectoryLock
from nestguard.observe.view import Identity


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the monitor until the ranks of the node have ended."""
    parser = argparse.ArgumentParser(prog="python -m nestguard")
    parser.add_argument("options", type=json.loads)
    options = parser.parse_args(argv).options
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)
    logging.basicConfig(format="stall guard: %(message)s", level=logging.WARNING)
    token = SharedToken(os.environ.get(TOKEN_VARIABLE, ""))
    peers = None if options["peers"] is None else PeerConfig(**options["peers"])
    if peers is not None:
        threading.Thread(target=_read_token, args=(token,), daemon=True).start()
    lock = DirectoryLock(Path(options["directory"]), options["lock"])
    identity, limits = Identity(**options["identity"]), StallLimits(**options["limits"])
    Monitor(lock, Path(options["report_dir"]), identity, limits, options["starter"], peers, token).run()
    return 0


def _read_token(token: SharedToken) -> None:
    """Reads the token from standard input, without Python's buffer, whose lock would block the exit of the process."""
    data = b""
    with contextlib.suppress(OSError):
        while not data.endswith(b"\n") and (more := os.read(0, 4096)):
            data += more
    if text := data.decode(errors="replace").strip():
        token.set(text)


if __name__ == "__main__":
    sys.exit(main())
