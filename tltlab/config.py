"""The models that settings and files are read into, and what is wrong with a value that they refuse, in one line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from .errors import ConfigError

MOST_CHARS = 60
_SAID = ("missing", "extra_forbidden", "value_error", "union_tag_invalid", "union_tag_not_found")
"""Faults whose message or place says all: what was got is not shown again."""

Place = tuple[int | str, ...]


class FrozenModel(BaseModel):
    """A value that is checked once, when it is made: immutable, and a name that it does not know is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class FiniteModel(FrozenModel):
    """A `FrozenModel` whose numbers are neither infinite nor NaN, so that JSON can hold them."""

    model_config = ConfigDict(allow_inf_nan=False)


def json_or_text(text: str) -> Any:
    """The value that somebody typed: JSON where it is JSON (numbers, lists, true), else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


@contextmanager
def faults_in(where: object, place: Callable[[Place], str] | None = None) -> Iterator[None]:
    """Within, what pydantic refuses is a ConfigError with all its faults that begins with `where`."""
    try:
        yield
    except ValidationError as error:
        raise ConfigError(f"{where}: {faults(error, place or dotted)}") from error


def dotted(place: Place) -> str:
    """A place in nested data: its names and numbers with dots between them."""
    return ".".join(map(str, place))


def faults(error: ValidationError, place: Callable[[Place], str] = dotted) -> str:
    """All faults, each with its place, which `place` writes; an empty one is left out. What was got is cut short.

    A fault in `base_s` reads "base_s: Input should be a valid number, unable to parse string as a number (got 'fast')".
    """
    return "; ".join(_fault(each, place(each["loc"])) for each in error.errors(include_url=False))


def shown(value: object) -> str:
    """A value's repr, cut to 60 characters.

    >>> shown("x" * 100)
    "'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx..."
    """
    text = repr(value)
    return text if len(text) <= MOST_CHARS else text[: MOST_CHARS - 3] + "..."


def _fault(fault: Any, place: str) -> str:
    message = str(fault["msg"]).removeprefix("Value error, ")
    if fault["type"] == "union_tag_invalid":
        context = fault["ctx"]
        name = str(context["discriminator"]).strip("'")
        message = f"{name} is {shown(context['tag'])}, there are {context['expected_tags']}"
    elif fault["type"] == "union_tag_not_found":
        message = f"it does not say its {fault['ctx']['discriminator']}"
    if fault["type"] not in _SAID:
        message += f" (got {shown(fault['input'])})"
    return f"{place}: {message}" if place else message
