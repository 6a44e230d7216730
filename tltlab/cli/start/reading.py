"""Options of the commands that read files of other programs: facts that the file does not contain."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast, get_args

import typer

from tltlab.errors import ConfigError
from tltlab.importers.rows import Lists, Reading, TimeUnit
from tltlab.importers.sources import FORMATS, Format
from tltlab.importers.token_counts import token_counter

Form = Annotated[str | None, typer.Option("--format", help=f"{', '.join(FORMATS)}. [default: by the content]")]
Column = Annotated[str | None, typer.Option(help="Field of the lengths, where its name is unusual; a.b is b within a.")]
StepColumn = Annotated[str | None, typer.Option(help="Field of the RL step, likewise.")]
GroupColumn = Annotated[str | None, typer.Option(help="Field that is the same for all samples of a prompt, likewise.")]
ListsOption = Annotated[
    str | None, typer.Option("--lists", help="What lists of numbers are: lengths, of a response each, or token ids.")
]
TimeUnitOption = Annotated[
    str | None, typer.Option("--time-unit", help="Unit of times without one in their names: s, ms, us, ns.")
]
Tokenizer = Annotated[
    Path | None, typer.Option(help="The model's folder (tokenizer.json), to count the tokens of text.")
]
CharsPerToken = Annotated[
    float | None, typer.Option(help="Approximate tokens of text by so many characters each, such as 3.6.")
]
GroupSize = Annotated[
    int | None, typer.Option(min=1, help="Samples per prompt, so many in a row, where nothing names the prompt.")
]
Cap = Annotated[
    int | None,
    typer.Option("--cap", "--max-response-tokens", min=1, help="The run's cap: responses of this length count as cut."),
]
Responses = Annotated[
    int | None, typer.Option(min=1, help="metrics: responses of an RL step, where the log has no number.")
]


def reading(
    *, column: str | None, step_column: str | None, group_column: str | None, lists: str | None, time_unit: str | None,
    tokenizer: Path | None, chars_per_token: float | None, group_size: int | None, cap: int | None,
    responses: int | None, reward: list[str] | None = None,
) -> Reading:  # fmt: skip
    """Return the `Reading` that these options set. Raises ConfigError for a word that an option does not know."""
    for option, got, words in (("--lists", lists, get_args(Lists)), ("--time-unit", time_unit, get_args(TimeUnit))):
        if got is not None and got not in words:
            raise ConfigError(f"{option} is {got!r}; there are: {', '.join(words)}")
    return Reading(
        column=column, step_column=step_column, group_column=group_column, lists=cast(Lists | None, lists),
        time_unit=cast(TimeUnit | None, time_unit), tokens=token_counter(tokenizer, chars_per_token),
        group_size=group_size, max_response_tokens=cap, responses=responses, reward_columns=tuple(reward or ()),
    )  # fmt: skip


def known_format(name: str | None) -> Format | None:
    """Return the format of this name. Raises ConfigError where there is none."""
    if name is not None and name not in FORMATS:
        raise ConfigError(f"--format is {name!r}; there are: {', '.join(FORMATS)}")
    return name
