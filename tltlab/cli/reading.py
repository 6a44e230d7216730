"""The option of commands that read files of other programs: their format."""

from __future__ import annotations

from typing import Annotated

import typer

from tltlab.errors import ConfigError
from tltlab.importers.sources import FORMATS, Format

Form = Annotated[str | None, typer.Option("--format", help=f"{', '.join(FORMATS)}. [default: by the content]")]


def known_format(name: str | None) -> Format | None:
    """Return the format of this name. Raises ConfigError where there is none."""
    if name is not None and name not in FORMATS:
        raise ConfigError(f"--format is {name!r}; there are: {', '.join(FORMATS)}")
    return name
