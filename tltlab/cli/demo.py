"""`tltlab demo`."""

from itertools import count
from pathlib import Path

from tltlab.console import emit, progress
from tltlab.errors import ConfigError
from tltlab.options import command, option


@command
def demo(
    out: Path = option("Folder for everything; it becomes a RUN.", Path("demo")),
    fast: bool = option("A tiny model and few steps: 3 minutes instead of 10.", False),
    task: str = option("The task of the model: subset-sum or gcd.", "subset-sum"),
    seed: int = option("Seed of the model, the data order and the policies.", 0),
) -> None:
    """The whole loop on this machine's CPU: train, record, calibrate, predict, pick a policy, run it, compare.

    Example: tltlab demo --out demo --fast
    """
    # torch, Ray and vLLM take seconds to import: --help should not wait for them.
    from tltlab.demo import FAST, FULL, demo_text, run_demo

    make_room(out)
    result = run_demo(out, FAST if fast else FULL, task=task, seed=seed)
    emit(result, demo_text(result))


def make_room(out: Path) -> None:
    """Move an earlier demo at `out` aside, to `out.1`, `out.2`, ...; ConfigError where something else is there."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not (out / "model" / "report.json").exists():
        raise ConfigError(f"{out} is there already and is no earlier demo; choose another --out")
    aside = next(path for n in count(1) if not (path := out.with_name(f"{out.name}.{n}")).exists())
    out.rename(aside)
    progress(f"the earlier {out} is now {aside}")
