"""The results file: sections of rows, as Markdown and as JSON, written after each row and read again by a later start.

A second start with the same file continues: complete sections and finished rows are kept. Rows of another device,
other versions or other code are never mixed.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

Row = dict[str, Any]
"""Values by column; the first column is `row`, the name that docs/gpu.md refers to."""


@dataclass
class Section:
    """Results of one section."""

    name: str
    decides: str = ""
    """The question that its rows answer."""

    seconds: float = 0.0
    """Time of all starts."""

    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    error: str | None = None
    """Why the section ended early; its rows up to then are kept."""

    is_cut: bool = False
    """Whether the time was over before the last row."""

    is_complete: bool = False
    """Whether a later start has nothing to add."""

    save: Callable[[], None] | None = field(default=None, repr=False, compare=False)
    """Writes the report."""

    def begin(self, save: Callable[[], None]) -> None:
        """Prepares a start: keeps the rows, and forgets how an earlier start ended."""
        self.notes, self.error, self.is_cut, self.save = [], None, False, save

    def has(self, row: str) -> bool:
        """Returns whether a row is finished."""
        return any(each["row"] == row for each in self.rows)

    def add(self, *rows: Row) -> None:
        """Adds rows that are finished together, and writes the report."""
        self.rows += rows
        if self.save is not None:
            self.save()

    def cut(self, row: str) -> None:
        """Notes that the time was over before a row."""
        self.is_cut = True
        self.notes.append(f"`{row}` and later rows were not measured: the time was over.")

    def as_json(self) -> dict[str, Any]:
        """Returns all but `save`."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "save"}


@dataclass
class Report:
    """All sections, in the order in which they ran."""

    command: str
    identity: dict[str, str] = field(default_factory=dict)
    """Device, versions and code; rows of another identity are not kept."""

    sections: dict[str, Section] = field(default_factory=dict)

    @classmethod
    def resume(cls, path: Path, command: str, identity: dict[str, str]) -> "Report":
        """Returns a report with the sections of an earlier start, if there was one.

        Raises:
            SystemExit: The file holds results of another device, version or code.
        """
        file = path.with_suffix(".json")
        if not file.exists():
            return cls(command, identity)
        stored = json.loads(file.read_text(encoding="utf-8"))
        different = [key for key in identity if stored.get("identity", {}).get(key) != identity[key]]
        if different:
            raise SystemExit(
                f"{file}: holds results of another start, with other values of: {', '.join(different)}. Give another "
                "file with -o, or --fresh to overwrite it."
            )
        return cls(command, identity, {each["name"]: Section(**each) for each in stored["sections"]})

    @property
    def has_failed(self) -> bool:
        """Whether a section ended with an error."""
        return any(section.error for section in self.sections.values())

    def write(self, path: Path) -> None:
        """Writes the Markdown file, and the JSON file beside it; each is whole at any time."""
        path.parent.mkdir(parents=True, exist_ok=True)
        sections = [section.as_json() for section in self.sections.values()]
        content = {"command": self.command, "identity": self.identity, "sections": sections}
        _replace(path.with_suffix(".json"), json.dumps(content, indent=1, default=str) + "\n")
        _replace(path, self.markdown())

    def markdown(self) -> str:
        """Returns the report as Markdown."""
        parts = [f"# Results on a GPU\n\nWritten by `{self.command}`.\n"]
        parts += [f"Commit {self.identity['commit']}.\n"] if "commit" in self.identity else []
        for section in self.sections.values():
            parts.append(f"## {section.name}\n")
            parts += [f"Decides: {section.decides}\n"] if section.decides else []
            parts += [_table(section.rows)] if section.rows else []
            parts += [f"{note}\n" for note in section.notes]
            if section.error:
                parts.append(f"**Error:** `{section.error}`\n")
            parts.append(f"Took {section.seconds:.1f} s.\n")
        return "\n".join(parts)


def _replace(path: Path, text: str) -> None:
    """Writes a file under another name first, so that a process that is killed leaves the old one or the new one."""
    draft = path.with_name(path.name + ".part")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)


def _table(rows: list[Row]) -> str:
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
