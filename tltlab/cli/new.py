"""`tltlab new`: a recipe or a part of a user's own as files that run."""

import json
import re
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from tltlab.console import emit
from tltlab.errors import ConfigError, did_you_mean
from tltlab.files import write_file
from tltlab.options import command, option

KINDS = ("recipe", "policy", "drafter", "placement", "planner", "costs", "acceptance", "reward")
_PROBLEMS = 32


@command
def new(
    kind: Annotated[str, typer.Argument(help=f"What to write: {', '.join(KINDS)}.")],
    name: Annotated[
        str | None, typer.Argument(help="A Python name; of a recipe its folder. [default: my_KIND]")
    ] = None,
    model: str = option("Of a recipe: a Hugging Face folder or id.", "Qwen/Qwen2.5-0.5B-Instruct"),
) -> None:
    """Write a recipe or a part of your own that runs as it stands, to be changed.

    Example: tltlab new policy halving
    """
    if kind not in KINDS:
        raise ConfigError(f"cannot write a {kind!r}{did_you_mean(kind, KINDS)}; there are {', '.join(KINDS)}")
    paths = write(kind, name or f"my_{kind}", Path.cwd(), model=model)
    names = [str(path.relative_to(Path.cwd())) for path in paths]
    command = f"tltlab train {names[0]} --dry-run" if kind == "recipe" else f"python {names[0]}"
    emit({"files": names, "next": command}, f"wrote {', '.join(names)}; next: {command}")


def write(kind: str, name: str, folder: Path, *, model: str) -> list[Path]:
    """Write the files of one kind into `folder`, the one to begin with first; ConfigError where one is there."""
    if not re.fullmatch(r"[a-z_][a-z0-9_]*", name):
        raise ConfigError(f"{name!r} is no name for a module: small letters, digits and _, such as my_{kind}")
    words = {
        "module": name,
        "class_name": "".join(part.title() for part in name.split("_")),
        "model": model,
    }
    if kind == "recipe":
        inside = folder / name
        texts = {
            inside / "recipe.toml": _filled("recipe.toml", words),
            inside / "reward.py": _filled("reward.py", words | {"module": "reward"}),
            inside / "prompts.jsonl": "".join(
                json.dumps({"prompt": f"{a} + {a + 1} =", "answer": str(2 * a + 1)}) + "\n" for a in range(_PROBLEMS)
            ),
        }
    else:
        texts = {folder / f"{name}.py": _filled(f"{kind}.py", words)}
    for path in texts:
        if path.exists():
            raise ConfigError(f"{path} is there already: give another name")
    for path, text in texts.items():
        write_file(path, text)
    return list(texts)


def _filled(template: str, words: dict[str, str]) -> str:
    text = (files("tltlab.cli") / "templates" / f"{template}.txt").read_text("utf-8")
    return Template(text).substitute(words)
