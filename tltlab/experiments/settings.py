"""Settings of an experiment: a frozen dataclass, its fields set by key=value, and back to JSON for the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar, get_origin, get_type_hints

from pydantic import TypeAdapter

from tltlab.config import faults_in
from tltlab.errors import ConfigError

S = TypeVar("S")


def read_settings(kind: type[S], changes: Mapping[str, Any] | None = None, overrides: Sequence[str] = ()) -> S:
    """The defaults of the dataclass `kind`, with `changes` (those of --fast), then with key=value `overrides`.

    Values are checked against the field's type and its pydantic constraints; those of a tuple are separated by commas.
    ConfigError for an unknown key, which lists the known ones with their values, and for a value that is none.

    >>> read_settings(Settings, overrides=["rounds=3", "depths=2,4"]).depths
    (2, 4)
    """
    hints = get_type_hints(kind)
    given: dict[str, Any] = dict(changes or {})
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise ConfigError(f"{override!r} is not key=value; settings: {_known(kind)}")
        if key not in hints:
            raise ConfigError(f"no setting named {key!r}; settings: {_known(kind)}")
        given[key] = value.split(",") if get_origin(hints[key]) is tuple else value
    with faults_in("settings"):
        return TypeAdapter(kind).validate_python(given)


def as_json(settings: Any, **more: Any) -> dict[str, Any]:
    """The settings as JSON values, with `more` of them behind."""
    adapter: TypeAdapter[Any] = TypeAdapter(type(settings))
    return {**adapter.dump_python(settings, mode="json"), **more}


def describe(settings: Any) -> str:
    """Settings as the command line takes them, one after the other."""
    return " ".join(f"{field.name}={_written(getattr(settings, field.name))}" for field in fields(settings))


def _known(kind: type[Any]) -> str:
    return describe(read_settings(kind))


def _written(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
