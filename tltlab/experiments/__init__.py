"""The experiments that everyone asks of TLT, one command each: `tltlab experiment NAME`.

Each is a module of this package with two names, and a row of `EXPERIMENTS`:

    FAST        the settings that --fast changes, a dict
    run(settings, *, folder, seed, progress) -> ExperimentResult

The type of `settings` is a frozen dataclass of what may be set on the command line as key=value. `folder` is where the
command writes, for what is worth keeping between experiments: a model that was trained first. An experiment leaves no
engine and no Ray behind. Every size stands in its settings, so the same command with larger ones and a `model=` of your
own runs on GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

from tltlab.errors import ConfigError, did_you_mean

Progress = Callable[[str], None]
"""Says what is going on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """A row of the list: what is asked, and what answering takes on two idle CPU cores, also with --fast."""

    name: str
    module: str
    question: str
    takes: str

    def load(self) -> ModuleType:
        return import_module(f"{__name__}.{self.module}")


_ROWS = (
    Experiment(
        name="baseline",
        module="baseline",
        question="How much faster is a rollout with adaptive drafts than with fixed ones or none, here and at TLT's "
        "settings?",
        takes="10 minutes, and 20 once to train its model; 3 with --fast",
    ),
    Experiment(
        name="staleness",
        module="staleness",
        question="How much acceptance does a drafter lose when it is no longer trained?",
        takes="7 minutes, and 2 once to train its model; 1 with --fast",
    ),
    Experiment(
        name="systems",
        module="systems",
        question="What do systems from the literature take on real engines here, against what is predicted of them?",
        takes="16 minutes on two busy cores, and 2 once to train its model; fewer tokens with --fast",
    ),
    Experiment(
        name="batch-size",
        module="batch_size",
        question="At which batch sizes do which drafts pay, and does the bandit find them?",
        takes="2 minutes, and 2 once to train its model; half a minute with --fast",
    ),
    Experiment(
        name="graph-memory",
        module="graph_memory",
        question="What do bucketed CUDA graphs save, and what does each plan of buckets cost in time?",
        takes="seconds",
    ),
    Experiment(
        name="lossless",
        module="lossless",
        question="Do rewards and sampled tokens stay the same with speculation?",
        takes="10 minutes, and 2 once to train its model; 1 with --fast",
    ),
    Experiment(
        name="policies",
        module="policies",
        question="Which policy comes closest to the best fixed strategy in hindsight, over many traces and regimes?",
        takes="6 minutes, shared by `jobs`; 2 with --fast; with `models=`, 3 more for each",
    ),
)
EXPERIMENTS = {row.name: row for row in _ROWS}
GONE = {
    "drift": "notebook 04_drafter_drift shows it; a recipe's schedule = {kind = 'gated'} trains while it pays",
    "open-questions": "notebook 08_field_guide has them, tltlab experiment baseline the set-ups that TLT published",
    "lengths": "tltlab simulate --placement longest_first shows what known lengths would bring",
}
"""Experiments of earlier releases, with what to use instead."""


def find(name: str) -> Experiment:
    """Return the experiment of that name; ConfigError names those that there are, or what took the place of one."""
    if name in GONE:
        raise ConfigError(f"experiment {name} is gone: {GONE[name]}")
    if name not in EXPERIMENTS:
        raise ConfigError(
            f"no experiment named {name!r}{did_you_mean(name, EXPERIMENTS)}; there are {', '.join(EXPERIMENTS)}"
        )
    return EXPERIMENTS[name]
