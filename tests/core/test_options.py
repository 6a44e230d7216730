"""One set of options: a keyword in Python, an option and a key in a TOML file are the same setting."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.exceptions import TyperException
from typer.main import get_command

from tests.refused import refused
from tests.typed import typed
from tltlab.console import whole_numbers
from tltlab.costs.linear import LinearCosts
from tltlab.errors import ConfigError
from tltlab.importers.rows import Reading
from tltlab.options import Option, Without, check, command, options_of, to_json
from tltlab.sim import simulate
from tltlab.sim.config import SimulationConfig

TINY = "traces/tiny"
UNREADABLE = {"tokenizer"}
"""Fields whose value must be a file of another package."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    depths: Annotated[Sequence[int] | str, Option("Depths.", parse=lambda text: whole_numbers("--depths", text))] = (1,)
    share: Annotated[float | None, Option("A share.", min=0)] = None
    size: Annotated[int, Option("A size.", names=("--num", "-n"), min=1)] = 4
    kind: Annotated[Literal["long", "short"], Option("A kind.")] = "long"
    names: Annotated[tuple[str, ...], Option("A name; repeatable.", names=("--name",))] = ()
    ranges: Annotated[bool | None, Option("Ranges. [default: where assumed]")] = None
    is_fast: Annotated[bool, Option("Fast.", names=("--fast",))] = False
    folder: Annotated[Path | None, Option("A folder.", parse=Path, metavar="DIR")] = None
    inner: dict[str, int] | None = None

    def __post_init__(self):
        check(self)


def program(kind):
    """A command with the options of this type, and the settings that it was called with."""
    seen = []

    def show(settings: Any, workers_of: Annotated[int, typer.Option(help="Not a setting.")] = 0):
        seen.append((settings, workers_of))

    show.__annotations__["settings"] = kind
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(command(show))
    return get_command(app), seen


def parsed(kind, *args):
    run, seen = program(kind)
    run.main([str(arg) for arg in args], standalone_mode=False)
    return seen[0][0]


def outcome(make, *args, **keywords):
    try:
        return make(*args, **keywords)
    except ConfigError as error:
        return str(error)


WORD = st.text("abcXYZ019:/.=@", min_size=1, max_size=8)
VALUES = {
    int: st.integers(1, 999), float: st.floats(0, 1e6), bool: st.just(True), str: WORD,
    list[str]: st.lists(WORD, min_size=1, max_size=3), Path: WORD,
}  # fmt: skip


@st.composite
def some_settings(draw, kind):
    options = options_of(kind)
    names = draw(st.sets(st.sampled_from(sorted({*options} - UNREADABLE)), max_size=5))
    choices = {name: options[name].choices for name in names}
    return {n: draw(st.sampled_from(choices[n]) if choices[n] else VALUES[options[n].cli]) for n in sorted(names)}


@pytest.mark.parametrize("kind", [SimulationConfig, Reading, Settings])
@given(data=st.data())
def test_keywords_options_and_toml_are_equal(kind, data, tmp_path_factory):
    values = data.draw(some_settings(kind))
    words = []
    for name, value in values.items():
        option = (*options_of(kind)[name].names, "--" + name.replace("_", "-"))[0]
        each = value if isinstance(value, list) else [value]
        words += [option] if value is True else [f"{option}={item}" for item in each]
    file = tmp_path_factory.mktemp("toml") / "settings.toml"
    file.write_text("".join(f"{name.replace('_', '-')} = {json.dumps(value)}\n" for name, value in values.items()))
    expected = outcome(kind, **values)
    assert outcome(parsed, kind, *words) == expected
    assert outcome(parsed, kind, "--settings", file) == expected


def test_lists_flags_and_parsed_text_are_options():
    got = parsed(Settings, "--name", "a", "--name", "b", "--fast", "--no-ranges", "-n", 3, "--depths", "1,8")
    assert got == Settings(names=("a", "b"), is_fast=True, ranges=False, size=3, depths=[1, 8])
    assert parsed(Settings) == Settings()


def test_help_shows_each_option_with_its_default(capsys):
    run, _ = program(Annotated[Settings, Without("share", kind=Option(default="short"), names=Option("Changed."))])
    with pytest.raises(SystemExit):
        run.main(["--help"], prog_name="show")
    text = " ".join(capsys.readouterr().out.split())
    for part in (
        "--num",
        "[default: 4; x>=1]",
        "A kind. [default: short]",
        "Changed.",
        "DIR",
        "--ranges",
        "--settings",
    ):
        assert part in text
    assert not any(part in text for part in ("--share", "Nobody", "--inner", "--no-fast", "A name", "[default: 1]"))


def test_a_command_changes_options_and_defaults(tmp_path):
    changed = Annotated[Settings, Without("share", kind=Option(default="short"))]
    assert parsed(changed) == Settings(kind="short")
    assert parsed(changed, "--kind", "long") == Settings()
    (tmp_path / "s.toml").write_text("share = 0.5")
    with refused(ConfigError, naming=("'share'", "size")):
        parsed(changed, "--settings", tmp_path / "s.toml")


def test_the_command_line_wins_over_a_file(tmp_path):
    file = tmp_path / "s.toml"
    file.write_text('size = 9\nkind = "short"\n')
    # A value that is the default wins too.
    assert parsed(Settings, "--settings", file, "--num", 4) == Settings(kind="short")


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("workrs = 2", ("'workrs'", "'workers'", "seed")),
        ('workers = "two"', ("workers", "'two'")),
        ("workers = true", ("workers", "True")),
        ("prefix-caching = 1", ("prefix_caching", "1")),
        ("seed = -1", ("seed", "-1")),
        ('mode = "exact"', ("mode", "'exact'", "fluid", "sampled")),
        ("gpus = [8]", ("gpus", "[8]")),
        ("gpus = 8xH100", ("settings.toml",)),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path, text, facts, capsys):
    file = tmp_path / "settings.toml"
    file.write_text(text)
    code, out, err = typed(capsys, "simulate", TINY, "--settings", file)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert all(fact in err for fact in facts), err


def test_a_missing_file_and_a_wrong_option_are_refused(tmp_path):
    with refused(ConfigError, naming=("nothing.toml",)):
        parsed(Settings, "--settings", tmp_path / "nothing.toml")
    for word in ("0", "two"):
        with pytest.raises(TyperException):
            parsed(Settings, "--num", word)
    with refused(ConfigError, naming=("names", "1")):
        Settings(names=(1,))  # type: ignore[arg-type]


def test_a_command_is_called_from_python_with_fields():
    seen = []

    @command
    def show(trace: str, settings: Annotated[Settings, Without("kind")], out: str = ""):
        seen.append((trace, settings, out))

    show("here", size=2, out="there")
    assert seen == [("here", Settings(size=2), "there")]
    with pytest.raises(TypeError, match="kind"):
        show("here", kind="long")


def test_json_names_objects():
    settings = SimulationConfig(
        costs=LinearCosts(base_s=0.1, per_request_s=0.0), rl_steps=range(2), placement="two_pools"
    )
    got = to_json(replace(settings, seed=3))
    assert json.loads(json.dumps(got)) == got
    assert (got["costs"], got["rl_steps"], got["placement"], got["seed"]) == ("linear", [0, 1], "two_pools", 3)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("1:3", [1, 2]), (":2", [0, 1]), ("2:", [2, 3]), ("2", [2]), ("all", [0, 1, 2, 3])],
)
def test_python_takes_rl_steps_in_words(text, numbers):
    named, counted = (simulate(TINY, "none", rl_steps=steps).to_frame() for steps in (text, numbers))
    assert named.equals(counted)
    for wrong in ("9:", "a:b", "3:1"):
        with refused(ConfigError, naming=("rl-steps", wrong)):
            simulate(TINY, "none", rl_steps=wrong)
