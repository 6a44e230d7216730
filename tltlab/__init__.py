"""tltlab: a lab for the long tail of reasoning-RL rollouts.

>>> trace = tltlab.read("traces/tiny")  # doctest: +SKIP
>>> result = tltlab.sim.simulate(trace, policy="beg-mab")  # doctest: +SKIP
>>> tltlab.timeline(result)  # doctest: +SKIP
"""

from __future__ import annotations

import importlib
from typing import Any

from .errors import ConfigError, RunError, TltlabError, TraceError
from .policies.policy import Policy, load_policy
from .policies.selector import Selector
from .report.timeline import timeline
from .state import StepOutcome, StepState
from .strategy import NO_SPECULATION, Strategy
from .traces.trace import Trace, read

__all__ = [
    "NO_SPECULATION",
    "ConfigError",
    "Policy",
    "RunError",
    "Selector",
    "StepOutcome",
    "StepState",
    "Strategy",
    "TltlabError",
    "Trace",
    "TraceError",
    "load_policy",
    "read",
    "timeline",
]


def __getattr__(name: str) -> Any:
    # The simulator and the runtime need packages that the core does not: they load when they are first asked for.
    if name in ("sim", "runtime"):
        return importlib.import_module(f"tltlab.{name}")
    raise AttributeError(f"module 'tltlab' has no attribute {name!r}")
