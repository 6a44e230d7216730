"""The experiments that everyone asks of TLT, one command each: `tltlab experiment NAME`.

Each experiment is a subclass of `harness.Experiment` in a module of its name. An experiment leaves no engine and no Ray
behind. Every size stands in its settings, so the same command with larger ones and a `model=` of your own runs on GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from tltlab.errors import ConfigError, did_you_mean

Progress = Callable[[str], None]
"""Reports progress."""

EXPERIMENTS = {
    "baseline": (
        "How much faster than under VeRL are RL steps of TLT at the settings that it published, simulated?",
        "half a minute",
    ),
    "staleness": (
        "How much acceptance does a drafter lose when it is no longer trained?",
        "7 minutes, and 2 once to train its model; 1 with --fast",
    ),
    "systems": (
        "What do systems from the literature take on real engines here, against what is predicted of them?",
        "16 minutes on two busy cores, and 2 once to train its model; fewer tokens with --fast",
    ),
    "batch-size": (
        "At which batch sizes do which drafts pay, and does the bandit find them?",
        "2 minutes, and 2 once to train its model; half a minute with --fast",
    ),
    "lossless": (
        "Do rewards stay the same with speculation?",
        "8 minutes, and 2 once to train its model; 1 with --fast",
    ),
}
"""The question of each, and what answering takes on two idle CPU cores."""
GONE = {
    "policies": "tltlab bench regimes has all policies on traces and regimes, tltlab bench runtime on real engines",
    "graph-memory": "tltlab tune --graph-memory plans buckets within a cap, tltlab bench gpu graphs measures graphs",
    "drift": "notebook 04_drafter_drift shows it; a recipe's schedule = {kind = 'gated'} trains while it pays",
    "open-questions": "notebook 08_field_guide has them, tltlab experiment baseline the set-ups that TLT published",
    "lengths": "tltlab simulate --placement longest_first shows what known lengths would bring",
}
"""Experiments of earlier releases, with what to use instead."""


def find(name: str) -> Any:
    """Return the `harness.Experiment` of that name, `BatchSize` in `batch_size` for batch-size.

    ConfigError names those that there are, or what took the place of one.
    """
    if name in GONE:
        raise ConfigError(f"experiment {name} is gone: {GONE[name]}")
    if name not in EXPERIMENTS:
        raise ConfigError(
            f"no experiment named {name!r}{did_you_mean(name, EXPERIMENTS)}, only {', '.join(EXPERIMENTS)}"
        )
    module = import_module(f"{__name__}.{name.replace('-', '_')}")
    return getattr(module, name.title().replace("-", ""))
