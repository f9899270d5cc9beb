"""The results file: sections of rows, as Markdown and as JSON."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]
"""Values by column; the first column is `row`, the name that docs/gpu.md refers to."""


@dataclass
class Section:
    """Results of one section."""

    name: str
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    error: str | None = None
    """Why the section ended early; its rows up to then are kept."""


@dataclass
class Report:
    """All sections, in the order in which they ran."""

    command: str
    sections: list[Section] = field(default_factory=list)

    @property
    def has_failed(self) -> bool:
        """Whether a section ended with an error."""
        return any(section.error for section in self.sections)

    def write(self, path: Path) -> None:
        """Writes the Markdown file, and the JSON file beside it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.markdown(), encoding="utf-8")
        path.with_suffix(".json").write_text(json.dumps(asdict(self), indent=1, default=str) + "\n", encoding="utf-8")

    def markdown(self) -> str:
        """Returns the report as Markdown."""
        parts = [f"# Results on a GPU\n\nWritten by `{self.command}`.\n"]
        for section in self.sections:
            parts.append(f"## {section.name}\n\n{_table(section.rows)}")
            parts += [f"{note}\n" for note in section.notes]
            if section.error:
                parts.append(f"**Error:** `{section.error}`\n")
            parts.append(f"Took {section.seconds:.1f} s.\n")
        return "\n".join(parts)


def _table(rows: list[Row]) -> str:
    if not rows:
        return ""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_cell(row.get(name)) for name in columns) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")
