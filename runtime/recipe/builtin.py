"""Recipes that come with tltlab, found by name."""

from __future__ import annotations

from pathlib import Path

from tltlab.errors import ConfigError

FOLDER = Path(__file__).parent / "recipes"


def builtin_recipes() -> dict[str, Path]:
    """The files by name."""
    return {file.name.removesuffix(".toml"): file for file in sorted(FOLDER.glob("*.toml"))}


def find_recipe(name_or_path: str | Path) -> Path:
    """The path itself where there is a file, else the recipe of that name; ConfigError names those that there are."""
    path, known = Path(name_or_path), builtin_recipes()
    if path.is_file():
        return path
    if str(name_or_path) not in known:
        raise ConfigError(
            f"cannot read recipe {name_or_path}: it is no file, and no recipe of tltlab's: {', '.join(known)}"
        )
    return known[str(name_or_path)]
