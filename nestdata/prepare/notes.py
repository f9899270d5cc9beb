"""What a person should know about a corpus that was prepared, in lines: on the terminal and in the HTML report."""

from collections.abc import Mapping

from nestdata.prepare.config import PrepareConfig
from nestdata.prepare.equal_files import EqualFiles
from nestdata.prepare.writing.corpus_writer import CorpusStats
from nestdata.redaction import redacted

_MAX_KINDS = 10
_FOUND_BY_DECODING = "files cut off behind their headers, damage, all-zero audio and byte-equal files"


def notes_of(
    config: PrepareConfig, stats: CorpusStats, other_files: Mapping[str, int], equal: EqualFiles | None
) -> list[str]:
    """Returns the lines about a corpus.

    Args:
        config: Its settings.
        stats: Size and content of the corpus.
        other_files: Number of files in folders that were not read, by suffix.
        equal: Files with equal bytes; None if they were not looked for.
    """
    notes = [_checked(config)]
    if stats.num_long and not (config.pcm or config.window_seconds or config.segment):
        hours = stats.long_samples / config.sampling_rate / 3600
        notes.append(
            f"longer than a minute: {_number_of(stats.num_long, 'cut')}, {hours:,.2f} h; --window-seconds 30 divides "
            "them, --segment vad cuts them at pauses"
        )
    if other_files:
        kinds = [f"{number:,} {kind}" for kind, number in other_files.items()]
        more = f", {len(kinds) - _MAX_KINDS} more kinds" if len(kinds) > _MAX_KINDS else ""
        number = sum(other_files.values())
        what = "file of another kind" if number == 1 else "files of other kinds"
        notes.append(f"not read: {number:,} {what} ({', '.join(kinds[:_MAX_KINDS])}{more})")
    if equal and equal.example:
        first, second = (name if name.isprintable() else repr(name) for name in map(redacted, equal.example))
        number_of_files = _number_of(equal.number, "file")
        notes.append(f"byte-equal to another file: {number_of_files}, such as {second}, a copy of {first}")
    return notes


def _number_of(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _checked(config: PrepareConfig) -> str:
    if config.probe == "decode":
        return "checked: all audio was decoded"
    if config.finds_speech:
        return "checked: all audio was searched for speech; --probe decode also finds byte-equal files"
    what = "headers" if config.probe == "all" else "headers of files whose duration the manifest does not give"
    return f"checked: {what} only; --probe decode also finds {_FOUND_BY_DECODING}"
