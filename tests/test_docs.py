"""Checks the documentation: the API pages against the public names, and relative links."""

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import nestguard
from nestcli.nestdata import main as nestdata
from nestcli.nestmodel import main as nestmodel

REPOSITORY = Path(__file__).parents[1]
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
def test_api_page_lists_every_public_name_once(package: str) -> None:
    page = (REPOSITORY / "docs" / "api" / f"{package}.md").read_text(encoding="utf-8")
    listed = re.findall(r"^::: (\S+)$", page, re.MULTILINE)
    assert Counter(listed) == Counter(f"{package}.{name}" for name in public_names(package))


def test_the_readme_lists_every_extra() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    table = (REPOSITORY / "README.md").read_text(encoding="utf-8").partition("| extra | for |")[2].partition("\n\n")[0]
    listed = [extra for row in table.splitlines() for extra in re.findall(r"`([\w-]+)`", row.partition(" | ")[0])]
    assert sorted(listed) == sorted(project["optional-dependencies"])


def test_relative_links_lead_to_files() -> None:
    missing = []
    for page in PAGES:
        for target in link_targets(page.read_text(encoding="utf-8")):
            path = (page.parent / target).resolve()
            if not path.exists() and path.relative_to(REPOSITORY).as_posix() not in GENERATED:
                missing.append((page, target))
    assert missing == []


def test_the_index_of_decisions_lists_every_record_by_its_title() -> None:
    folder = REPOSITORY / "docs" / "decisions"
    listed = re.findall(r"^- \[(.+)\]\((.+)\)$", (folder / "index.md").read_text(encoding="utf-8"), re.MULTILINE)
    titles = {
        path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        for path in folder.glob("*/*.md")
    }
    assert sorted(listed) == sorted((title, path) for path, title in titles.items())


def test_every_test_that_a_page_names_exists() -> None:
    named = {
        match
        for page in PAGES
        for match in re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", page.read_text(encoding="utf-8"))
    }
    assert named
    assert [(path, name) for path, name in sorted(named) if f"def {name}(" not in (REPOSITORY / path).read_text()] == []


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
        if page.name == "CHANGELOG.md":  # also tells of what is gone
            continue
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


def test_links_are_found_in_prose_only() -> None:
    text = "[a](b.md#c) ![d](e.png) [web](https://f) `[g](h)`\n\n    [i](j)\n\n```\n[k](l)\n```\n[m](#n)\n"
    assert link_targets(text) == ["b.md", "e.png"]


@pytest.mark.parametrize(
    ("link", "is_dead"),
    [
        ("[a](other.md#part)", False),
        ("[a link\nthat wraps](other.md#part)", False),
        ("[a](gone.md)", True),
        ("[a link\nthat wraps](gone.md)", True),
        ("[a link\nthat wraps](other.md#gone)", True),
        ("[a link\nthat wraps](../README.md#gone)", True),
    ],
)
def test_a_dead_link_fails_the_build_of_the_site(tmp_path: Path, link: str, is_dead: bool) -> None:
    mkdocs = pytest.importorskip("mkdocs.__main__", reason="mkdocs is not installed (the extra `docs`)")
    settings = (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8")
    validation = settings[settings.index("validation:") : settings.index("nav:\n")]
    hooks = REPOSITORY / "docs" / "site_hooks.py"
    (tmp_path / "theme").mkdir()
    (tmp_path / "theme" / "main.html").write_text("{{ page.content }}")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text(f"# Page\n\nSee {link}.\n")
    (tmp_path / "docs" / "other.md").write_text("# Other\n\n## Part\n")
    (tmp_path / "README.md").write_text("# Home\n")
    (tmp_path / "mkdocs.yml").write_text(
        "site_name: test\nstrict: true\nuse_directory_urls: false\nplugins: []\n"
        f"theme: {{name: null, custom_dir: theme}}\nhooks: ['{hooks}']\n{validation}"
    )
    runner = pytest.importorskip("click.testing").CliRunner()
    build = [line for line in (REPOSITORY / "Makefile").read_text().splitlines() if "-m mkdocs" in line]
    arguments = build[0].partition("-m mkdocs ")[2].split()
    done = runner.invoke(mkdocs.cli, [*arguments, "--config-file", str(tmp_path / "mkdocs.yml")])
    assert (done.exit_code != 0) == is_dead, done.output
