from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
import typer

from nestcli.arguments.field_options import with_field_options


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of a command."""

    sampling_rate: int
    """Rate in Hz.

    What only Python needs to know."""

    form: Literal["wav", "flac"] = "wav"
    """Form of
    the files."""

    max_seconds: float | None = None
    """Longest file."""

    names: tuple[str, ...] = ()
    """Names, once or more often."""

    strict: bool = False
    """Refuse rejects."""

    channel: int | Literal["mix"] = 0
    """Channel to read."""

    internal: int = 1
    """No option."""


@with_field_options(
    Settings,
    max_seconds=typer.Option(show_default="no limit"),
    channel=typer.Option(parser=lambda text: text if text == "mix" else int(text), metavar="NUMBER|mix"),
    internal=None,
)
def command(path: str, config: Settings, jobs: Annotated[int, typer.Option("--jobs", "-j")] = 1) -> int:
    """A command."""
    typer.echo(f"{path} {config} {jobs}")
    return jobs


def run(*arguments: str) -> Any:
    app = typer.Typer(rich_markup_mode=None, add_completion=False)
    app.command()(command)
    return app(args=list(arguments), standalone_mode=False)


def test_options_give_the_fields_of_a_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("a", "--sampling-rate", "8000", "-j", "2") == 2
    assert capsys.readouterr().out == f"a {Settings(sampling_rate=8000)} 2\n"
    options = ["--sampling-rate=1", "--form", "flac", "--max-seconds", "2", "--names", "x", "--names", "y"]
    run("a", *options, "--strict", "--channel", "mix")
    expected = Settings(
        sampling_rate=1, form="flac", max_seconds=2.0, names=("x", "y"), strict=True, channel="mix", internal=1
    )
    assert capsys.readouterr().out == f"a {expected} 1\n"


def test_an_option_of_a_field_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(AssertionError, match="Settings has no fields max_second"):
        with_field_options(Settings, max_second=typer.Option())


def test_help_has_the_first_paragraph_of_each_field_and_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    run("--help")
    shown = " ".join(capsys.readouterr().out.split())
    assert "--sampling-rate <int> Rate in Hz. [required]" in shown
    assert "--form <wav|flac> Form of the files. [default: wav]" in shown
    assert "--max-seconds <float> Longest file. [default: no limit]" in shown
    assert "--channel NUMBER|mix Channel to read. [default: 0]" in shown
    assert "--strict Refuse rejects. --" in shown
    assert "internal" not in shown
    assert "Python" not in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["a"], "Missing .*sampling.rate"), (["a", "--sampling-rate=1", "--internal", "2"], "No such option: --internal")],
)
def test_a_required_field_is_a_required_option_and_a_field_without_option_has_none(
    arguments: list[str], message: str
) -> None:
    with pytest.raises(Exception, match=message):
        run(*arguments)
