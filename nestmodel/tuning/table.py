"""The result of a race as text."""

from nestmodel.tuning.cache import Result
from nestmodel.tuning.race import Row

_HEADS = ("part", "form", "time", "error", "verdict")


def format_table(result: Result) -> str:
    """Returns a line for each form: its time, its error against the reference, and whether it is taken or why not."""
    rows = [_HEADS, *(_cells(row) for row in result.rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)


def _cells(row: Row) -> tuple[str, ...]:
    time = "" if row.seconds is None else f"{1000 * row.seconds:.3f} ms"
    error = "" if row.error is None else f"{row.error:.1e}"
    return _printable(row.part), _printable(row.form), time, error, _verdict(row)


def _verdict(row: Row) -> str:
    if row.reason:
        return f"{row.verdict}: {_printable(row.reason)}"
    if row.verdict == "wrong" and row.error is not None and row.allowed is not None:
        return f"wrong: error {row.error:.1e}, allowed {row.allowed:.1e}"
    return row.verdict


def _printable(text: str) -> str:
    """Returns text from an error or a file without control characters, which could change a terminal."""
    return "".join(character if character.isprintable() else " " for character in text)
