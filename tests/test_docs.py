"""Checks the documentation: the API pages against the public names, and relative links."""

import ast
import re
from collections import Counter
from collections.abc import Iterator

import pytest

import nestguard
from nestcli.nestdata import main as nestdata
from nestcli.nestmodel import main as nestmodel
from nestdata.prepare.inputs.entry import ADVICE
from tests.scripts import REPOSITORY

PAGES = [
    *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "RELEASING.md", "SECURITY.md")),
    *sorted((REPOSITORY / "docs").rglob("*.md")),
    *sorted((REPOSITORY / "recipes").rglob("*.md")),
]
# Made by docs/make_pictures.py after a training run.
GENERATED = {"docs/pictures/preview.png", "docs/pictures/curve.png"}


def public_names(package: str) -> list[str]:
    """Returns `__all__` of a package, from its stub if its names are imported lazily."""
    if package == "nestguard":
        return list(nestguard.__all__)
    stub = ast.parse((REPOSITORY / package / "__init__.pyi").read_text(encoding="utf-8"))
    lists = [
        node.value for node in stub.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    return list(ast.literal_eval(lists[0]))


def prose(text: str) -> str:
    """Returns a page without its code, in which brackets are no links."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^    .*$", "", text, flags=re.MULTILINE)
    return re.sub(r"`[^`]*`", "", text)


def link_targets(text: str) -> list[str]:
    """Returns the targets of the links and pictures of a page that are not on the web, without anchors."""
    targets = re.findall(r"\]\(([^)\s]+)\)", prose(text))
    return [path for target in targets if "://" not in target and (path := target.partition("#")[0])]


@pytest.mark.parametrize("package", ["nestdata", "nestmodel", "nestguard"])
def test_api_pages_list_every_public_name_once(package: str) -> None:
    api = REPOSITORY / "docs" / "api"
    pages = [api / f"{package}.md", *sorted((api / package).glob("*.md"))]
    page = "".join(path.read_text(encoding="utf-8") for path in pages)
    listed = re.findall(r"^::: (\S+)$", page, re.MULTILINE)
    assert Counter(listed) == Counter(f"{package}.{name}" for name in public_names(package))


def test_a_paragraph_after_a_list_has_an_empty_line_before() -> None:
    """Without one, it belongs to the last item; a heading after a table would be a row of it."""
    for path in PAGES:
        text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        assert not re.findall(
            r"^(?:[-*] |  \S).*\n(?![-*] |\d+\. |\s|\||<|$).*|^[|].*\n[^|\n].*", text, re.MULTILINE
        ), path


def test_the_table_of_rejects_has_every_reason_once() -> None:
    text = (REPOSITORY / "docs" / "formats.md").read_text(encoding="utf-8")
    table = text.partition("## Reasons for rejects")[2].partition("\nIf no audio")[0]
    listed = [
        reason for cell in re.findall(r"^\|([^|]*)\|", table, re.MULTILINE) for reason in re.findall("`(.+?)`", cell)
    ]
    assert sorted(listed) == sorted(ADVICE)


def test_relative_links_lead_to_files() -> None:
    missing = []
    for page in PAGES:
        for target in link_targets(page.read_text(encoding="utf-8")):
            path = (page.parent / target).resolve()
            if not path.exists() and path.relative_to(REPOSITORY).as_posix() not in GENERATED:
                missing.append((page, target))
    assert missing == []


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yields the programs of this project in the code of a page, with their arguments."""
    code = re.findall(r"^```sh$(.*?)^```$|`([^`\n]+)`", text.replace("\\\n", " "), re.MULTILINE | re.DOTALL)
    for line in "\n".join(block or span for block, span in code).splitlines():
        for program, arguments in re.findall(r"(?<![\w./-])(nestdata|nestmodel) ([a-z][^#|;]*)", line):
            yield program, arguments.split()


@pytest.mark.slow
def test_every_command_and_option_of_the_pages_exists(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    known: dict[tuple[str, ...], set[str]] = {}
    unknown, num_commands = [], 0
    for page in PAGES:
        for program, (name, *arguments) in commands(page.read_text(encoding="utf-8")):
            path = (name, *arguments[: name in ("sample-batch", "probe")])
            if (program, *path) not in known:
                status = {"nestdata": nestdata, "nestmodel": nestmodel}[program]([*path, "--help-all"])
                options = re.findall(r"--[\w.-]+", capsys.readouterr().out) if status == 0 else []
                known[program, *path] = {*options, "--help", "--help-all"}
            unknown += [
                (page.name, program, *path, word)
                for word in arguments
                if word.startswith("--") and word.partition("=")[0] not in known[program, *path]
            ]
            unknown += [(page.name, program, *path)] if len(known[program, *path]) == 2 else []
            num_commands += 1
    assert unknown == []
    assert num_commands > 50
