"""The report of a measurement, as Markdown: what failed, what is wrong, and the tables."""

from collections.abc import Iterable, Mapping, Sequence

from benchmarks.gpu.results import Row
from benchmarks.harness.report import table_text

CHECKS = {
    "preset": "{preset}",
    "backend": "{backend}",
    "": "{outcome}",
    "worst, share of its limit": "{share_of_limit:.2f} {worst}",
    "median error over plain": "{median_over_plain:.2f}",
}
STEPS = {
    "preset": "{preset}",
    "cuts": "{cuts}",
    "backend": "{backend}",
    "ms": "{ms:.1f}",
    "spread": "{spread:.2f}",
    "audio-s/s": "{audio_s_per_s:,.0f}",
    "% of peak": "{percent}",
    "busy, ms": "{busy_ms:.1f}",
    "host, ms": "{host_ms:.1f}",
    "launches": "{launches}",
    "GB": "{reserved_gb:.1f}",
    "first, s": "{first_s:.0f}",
}
NEMO = {
    **{name: STEPS[name] for name in ("preset", "backend", "cuts", "ms")},
    "NeMo, ms": "{nemo_ms:.1f}",
    "NeMo / ours": "{nemo_over_ours:.2f}",
    "spread": "{spread:.2f}",
}
RESTARTS = {"preset": "{preset}", "compiled code": "{caches}", "s": "{seconds:.1f}"}
"""Columns of the tables, and the text of their cells."""


def report(rows: Sequence[Row], parts: Iterable[str], failed_tests: Sequence[str] = ()) -> tuple[str, bool]:
    """Returns the report, and whether all parts ended well, nothing failed, and every backend is right.

    Args:
        rows: All rows of the results.
        parts: Names of the planned parts.
        failed_tests: A line for each failed test.
    """
    ends = {row["ended"]: row["code"] for row in rows if "ended" in row}
    failed = [f"!! {part}: {_ending(ends.get(part))}" for part in parts if ends.get(part) != 0]
    failed += [f"!! {_name(row)}: {row['error']}" for row in rows if "error" in row]
    failed += [f"!! {line}" for line in failed_tests]
    warned = [f"!! {_name(row)}: {text}" for row in rows for text in row.get("warnings", [])]
    checks = [{**row, "outcome": "right" if row["is_right"] else "**WRONG**"} for row in rows if "is_right" in row]
    timed = [{**row, "percent": _percent(row.get("share_of_peak"))} for row in rows if "ms" in row]
    restarts = [row for row in rows if row.get("part") == "restart" and "seconds" in row]
    sections = [
        "# Results on a GPU\n",
        *(f"{line}\n" for line in failed + warned),
        *(f"- {row['what']}: {row['value']}" for row in rows if "what" in row),
        _table("Backends against float32", CHECKS, checks),
        _table("Steps", STEPS, [row for row in timed if row["part"] == "steps"]),
        _table("Beside NeMo 3.0.0", NEMO, [row for row in timed if row["part"] == "nemo"]),
        _table("From SIGKILL to the next step", RESTARTS, restarts),
    ]
    return "\n".join(filter(None, sections)), not failed and all(row["is_right"] for row in checks)


def _ending(code: int | str | None) -> str:
    if code is None:
        return "not measured, because no time was left"
    return "ended at its limit" if code == "limit" else f"ended with exit code {code}"


def _name(row: Row) -> str:
    return " ".join(str(row[key]) for key in ("part", "preset", "cuts", "backend") if key in row)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}"


def _table(title: str, columns: Mapping[str, str], rows: Sequence[Row]) -> str:
    cells = [[text.format(**row) for text in columns.values()] for row in rows]
    return f"\n## {title}\n\n{table_text(list(columns), cells)}\n" if rows else ""
