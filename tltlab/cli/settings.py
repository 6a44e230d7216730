"""`tltlab settings`: every setting of a recipe with its default, its type and what it does; and JSON schemas."""

from __future__ import annotations

import json
import re
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tltlab.config import shown
from tltlab.console import Json, emit, table
from tltlab.errors import ConfigError, did_you_mean, one_line
from tltlab.policies.policy import Policy

WHOLE = "recipe"


def settings(
    section: Annotated[
        str | None, typer.Argument(help="A section of recipes, such as train, or policy. [default: all of a recipe]")
    ] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print a JSON schema, of recipes or of policy files, for editors.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List every setting of a recipe, or of one section, with its default, its type and what it does.

    Example: tltlab settings rollout
    """
    from tltlab.runtime.recipe.recipe import Recipe

    if schema:
        model: type[BaseModel] = Policy if section == "policy" else Recipe
        if section not in (None, WHOLE, "policy"):
            raise ConfigError(f"a schema is of a recipe or of a policy, not of {section!r}")
        print(json.dumps(model.model_json_schema(), indent=2))
        return
    rows = rows_of(Policy, "policy") if section == "policy" else rows_of(Recipe)
    sections = [*dict.fromkeys(str(row["section"]) for row in rows), "policy"]
    if section not in (None, "policy"):
        rows = [row for row in rows if row["section"] == section or row["section"].startswith(f"{section}.")]
    if not rows:
        nearest = did_you_mean(str(section), sections)
        raise ConfigError(f"recipes have no section {section!r}{nearest}; there are {', '.join(sections)}")
    emit({"settings": rows}, as_json=as_json, text=settings_text(rows))


def settings_text(rows: list[dict[str, Any]]) -> str:
    """Return a table for each section; a sentence on several settings is printed once."""
    lines = []
    for section in dict.fromkeys(row["section"] for row in rows):
        members = [row for row in rows if row["section"] == section]
        abouts = ["", *(row["about"] for row in members)]
        cells = [
            (row["name"], row["default"], row["type"], "" if row["about"] == before else row["about"])
            for row, before in zip(members, abouts, strict=False)
        ]
        lines += [f"[{section}]" if section != WHOLE else WHOLE, table([], cells, left=4, indent=2), ""]
    return "\n".join(lines).rstrip()


def rows_of(model: type[BaseModel], section: str = WHOLE) -> list[dict[str, Any]]:
    """A row for each setting, sections after settings outside of one; `about` is the section's docstring."""
    top, inner = [], []
    for name, field in model.model_fields.items():
        inside = name if section == WHOLE else f"{section}.{name}"
        part = _section(field)
        if part is not None:
            inner += rows_of(part, inside)
            continue
        about = _about(model, name)
        top.append({"section": section, "name": name, "default": _default(field), "type": _type(field), "about": about})
    return top + inner


def _section(field: FieldInfo) -> type[BaseModel] | None:
    """The model of a section: the field's type, or the only one beside None."""
    kinds = [kind for kind in (field.annotation, *get_args(field.annotation)) if kind is not type(None)]
    models = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
    plain = isinstance(field.annotation, type) or get_origin(field.annotation) in (Union, types.UnionType)
    return models[0] if plain and len(models) == 1 and len([k for k in kinds if isinstance(k, type)]) == 1 else None


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "none" if value is None else shown(value.model_dump(mode="json") if isinstance(value, BaseModel) else value)


def _type(field: FieldInfo) -> str:
    """The type as a person writes it, with the limits that the setting has."""
    limits = [
        f"{sign} {getattr(mark, name):g}"
        for mark in field.metadata
        for name, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
        if getattr(mark, name, None) is not None
    ]
    return " ".join([_type_text(field.annotation), ", ".join(limits)]).rstrip()


def _type_text(kind: Any) -> str:
    origin, inside = get_origin(kind), get_args(kind)
    if origin is Literal:
        return "|".join(map(str, inside))
    if origin in (Union, types.UnionType):
        return " or ".join(_type_text(member) for member in inside if member is not type(None))
    if origin is Annotated:
        return _type_text(inside[0])
    if origin in (tuple, list):
        return f"list of {_type_text(inside[0])}"
    if origin is dict:
        return "section"
    return str(getattr(kind, "__name__", kind)).replace("str", "text").replace("bool", "true|false")


def _about(model: type[BaseModel], name: str) -> str:
    """The sentence of the docstring that names the setting, without what a semicolon parts from it."""
    sentences = re.split(r"(?<=[.;])\s+(?![^()]*\))", one_line(model.__doc__ or ""))
    sentence = next((sentence for sentence in sentences if f"`{name}`" in sentence), "")
    begins = sentence.partition(" ")[0]
    return re.sub(r";$", ".", sentence[:1].upper() + sentence[1:] if begins.isalpha() else sentence)
