"""The report of a measurement, as Markdown: what failed, what is wrong, and the tables."""

from collections.abc import Callable, Iterable, Sequence

from benchmarks.gpu.results import Row
from benchmarks.harness.report import table_text

CHECK_COLUMNS = ("preset", "form", "", "worst, share of its limit", "", "median error over plain")
STEP_COLUMNS = (
    "preset",
    "cuts",
    "form",
    "ms",
    "spread",
    "audio-s/s",
    "% of peak",
    "busy, ms",
    "host, ms",
    "launches",
    "GB",
    "first, s",
)
NEMO_COLUMNS = ("preset", "NeMo's attention", "form", "cuts", "ms", "NeMo, ms", "NeMo / ours", "spread")


def report(rows: Sequence[Row], parts: Iterable[str], failed_tests: Sequence[str] = ()) -> tuple[str, bool]:
    """Returns the report, and whether all parts ended well, nothing failed, and every form is right.

    Args:
        rows: All rows of the results.
        parts: Names of the planned parts.
        failed_tests: A line for each.
    """
    ends = {row["ended"]: row["code"] for row in rows if "ended" in row}
    failed = [f"!! {part}: {_ending(ends.get(part))}" for part in parts if ends.get(part) != 0]
    failed += [f"!! {_name(row)}: {row['error']}" for row in rows if "error" in row]
    failed += [f"!! {line}" for line in failed_tests]
    warned = [f"!! {_name(row)}: {text}" for row in rows for text in row.get("warnings", [])]
    checks = [row for row in rows if "is_right" in row]
    rates = [row for row in rows if row.get("part") == "machine"]
    restarts = [row for row in rows if row.get("part") == "restart" and "seconds" in row]
    sections = [
        "# Results on a GPU\n",
        f"{rows[0]['device']}, commit {rows[0]['commit']}\n",
        *(f"{line}\n" for line in failed + warned),
        *(f"- {row['what']}: {row['value']:.4g}" for row in rates if "what" in row),
        _table("Forms against float32", CHECK_COLUMNS, checks, _check_cells),
        _table("Steps", STEP_COLUMNS, [row for row in rows if _is_of(row, "steps")], _step_cells),
        _table("From SIGKILL to the next step", ("preset", "compiled code", "s"), restarts, _restart_cells),
        _table("Beside NeMo 3.0.0", NEMO_COLUMNS, [row for row in rows if _is_of(row, "nemo")], _nemo_cells),
    ]
    return "\n".join(filter(None, sections)), not failed and all(row["is_right"] for row in checks)


def _is_of(row: Row, part: str) -> bool:
    return row.get("part") == part and "ms" in row


def _ending(code: int | str | None) -> str:
    if code is None:
        return "not measured, because the time was over"
    return "ended at its limit" if code == "limit" else f"ended with exit code {code}"


def _name(row: Row) -> str:
    return " ".join(str(row[key]) for key in ("part", "preset", "cuts", "attention", "form") if key in row)


def _table(title: str, columns: Sequence[str], rows: Sequence[Row], cells: Callable[[Row], list[object]]) -> str:
    return f"\n## {title}\n\n{table_text(columns, map(cells, rows))}\n" if rows else ""


def _check_cells(row: Row) -> list[object]:
    is_right = "right" if row["is_right"] else "**WRONG**"
    shares = [f"{row['share_of_limit']:.2f}", row["worst"], f"{row['median_over_plain']:.2f}"]
    return [row["preset"], row["form"], is_right, *shares]


def _step_cells(row: Row) -> list[object]:
    share = row["share_of_peak"]
    return [
        row["preset"],
        row["cuts"],
        row["form"],
        f"{row['ms']:.1f}",
        f"{row['spread']:.2f}",
        f"{row['audio_s_per_s']:,.0f}",
        "" if share is None else f"{100 * share:.1f}",
        f"{row['busy_ms']:.1f}",
        f"{row['host_ms']:.1f}",
        row["launches"],
        f"{row['reserved_gb']:.1f}" if "reserved_gb" in row else "",
        f"{row['first_s']:.0f}",
    ]


def _nemo_cells(row: Row) -> list[object]:
    times = [f"{row['ms']:.1f}", f"{row['nemo_ms']:.1f}", f"{row['nemo_over_ours']:.2f}", f"{row['spread']:.2f}"]
    return [row["preset"], row["attention"], row["form"], row["cuts"], *times]


def _restart_cells(row: Row) -> list[object]:
    return [row["preset"], row["caches"], f"{row['seconds']:.1f}"]
