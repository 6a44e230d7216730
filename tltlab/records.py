"""Records: the frozen values that most of tltlab passes around, and what they are in files."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar, dataclass_transform

Json = dict[str, Any]
"""A JSON object: what is read from files, stored as state, or printed for `--json`."""
Fields = Mapping[str, Any]
"""Values by name, which are not changed: a JSON object that is read, settings, columns of a row."""

_Class = TypeVar("_Class")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def frozen(cls: type[_Class]) -> type[_Class]:
    """Make a class a dataclass whose fields are immutable, given by keyword and held in slots.

    A class with cached properties has no slots, which would leave no place for them.

    >>> @frozen
    ... class Pair:
    ...     first: int
    ...     second: int = 0
    >>> Pair(first=1)
    Pair(first=1, second=0)
    """
    caches = any(isinstance(member, cached_property) for member in vars(cls).values())
    return dataclass(frozen=True, slots=not caches, kw_only=True)(cls)
