"""`tltlab settings`: every setting of a recipe with its default, its type and what it does."""

from typing import Annotated

import typer

from tltlab.config import WHOLE, settings_of
from tltlab.console import emit, table
from tltlab.errors import ConfigError, did_you_mean
from tltlab.policies.policy import Policy
from tltlab.records import Json


def settings(
    section: Annotated[
        str | None, typer.Argument(help="A section of recipes, such as train, or policy. [default: all of a recipe]")
    ] = None,
) -> None:
    """List every setting of a recipe, or of one section, with its default, its type and what it does.

    Example: tltlab settings rollout
    """
    from tltlab.runtime.recipe.recipe import Recipe

    rows = settings_of(Policy, "policy") if section == "policy" else settings_of(Recipe)
    sections = [*dict.fromkeys(str(row["section"]) for row in rows), "policy"]
    if section not in (None, "policy"):
        rows = [row for row in rows if row["section"] == section or row["section"].startswith(f"{section}.")]
    if not rows:
        nearest = did_you_mean(str(section), sections)
        raise ConfigError(f"recipes have no section {section!r}{nearest}; there are {', '.join(sections)}")
    emit({"settings": rows}, settings_text(rows))


def settings_text(rows: list[Json]) -> str:
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
