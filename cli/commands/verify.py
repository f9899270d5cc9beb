"""`nestdata verify`: checks that the audio of a corpus is complete and unchanged."""

from dataclasses import asdict
from typing import Annotated

from ..options import AsJson
from ..output import console, print_json
from ..parsing import Positionals, option
from ..progress import progress


def verify_command(
    corpus: Annotated[str, Positionals, option(metavar="CORPUS", help="A corpus directory.")],
    *,
    decode: Annotated[
        bool, option(help="Read and decode all audio. Without it, only sizes, times and ETags are compared.")
    ] = False,
    root: Annotated[
        str | None, option(metavar="DIR|URL", help="Where the audio is now, if its folder or bucket was moved.")
    ] = None,
    set_root: Annotated[
        bool, option(help="Use the corpus with --root from now on, if no problem is found there.")
    ] = False,
    accept_changed: Annotated[
        bool,
        option(
            help="From now on, use local files whose size or time has changed as they are, if their length, sampling "
            "rate and channels have not changed."
        ),
    ] = False,
    jobs: Annotated[int, option("-j", help="Number of shards or files that are checked at a time.")] = 8,
    as_json: AsJson = False,
) -> int:
    """Check that the audio of a corpus is there, and unchanged since it was prepared.

    Each problem is one line; the exit code is 1 if there is any.
    """
    from nestdata import ConfigError, verify_corpus

    if set_root and root is None:
        raise ConfigError("--set-root needs --root: give the folder or bucket where the audio is now.")
    with progress("verifying") as on_progress:
        report = verify_corpus(
            corpus,
            decode=decode,
            root=root,
            set_root=set_root,
            accept_changed=accept_changed,
            jobs=jobs,
            on_progress=on_progress,
        )
    if as_json:
        print_json(asdict(report))
    else:
        out = console()
        for problem in report.problems:
            out.print(str(problem))
        out.print(report.summary())
        if report.new_root is not None:
            out.print(f"  its audio is read from {report.new_root} from now on")
        elif set_root:
            out.print("  the root was not set, because of the problems")
    return 1 if report.problems else 0
