"""`nestmodel`: train a NEST model (LightningCLI: YAML, overrides by field path, --print_config)."""

import sys
from collections.abc import Sequence

from nestdata import NestDataError
from nestmodel import NestModelError

from .fit import UsageError, run


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line: 0 is success, 1 a problem that the message explains, 2 wrong usage."""
    try:
        run(list(sys.argv[1:] if argv is None else argv))
    except (NestDataError, NestModelError) as error:
        print(f"error: {_one_line(error)}", file=sys.stderr)
        return 1
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130
    return 0


def _one_line(error: Exception) -> str:
    """An error of a loader worker arrives with the worker's traceback, which ends with the message."""
    last = str(error).splitlines()[-1]
    return last.removeprefix(f"{type(error).__module__}.{type(error).__name__}: ")
