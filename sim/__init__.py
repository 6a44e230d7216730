"""Discrete-event simulation of rollouts. Import it as `tltlab.sim`.

`simulate` replays a trace's responses under a policy; `SimulationConfig` is all that a user sets beside these two, and
`Scenario` a trace under such settings. `compare` asks a study (`study`) of many policies or systems. `run_steps` makes
whole RL steps of rollouts, on GPUs that share the work (`Colocated`) or split it (`Separate`). `tuning` searches
policies in simulation, `verify` holds predictions against recorded runs. `engine` simulates an engine.
"""

if __name__ == "sim":
    raise ImportError("import this package as tltlab.sim")

from typing import TYPE_CHECKING, Any

from .config import SimulationConfig
from .rl_steps import Colocated, RunResult, Separate, run_steps
from .scenario import Scenario
from .simulate import SimResult, simulate
from .study.compare import StudyConfig, compare

if TYPE_CHECKING:
    from .verification.rollouts import Verification, verify

__all__ = [
    "Colocated",
    "RunResult",
    "Scenario",
    "Separate",
    "SimResult",
    "SimulationConfig",
    "StudyConfig",
    "Verification",
    "compare",
    "run_steps",
    "simulate",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in ("Verification", "verify"):
        # Loads what fits costs and acceptance.
        from .verification import rollouts

        return getattr(rollouts, name)
    raise AttributeError(f"module 'tltlab.sim' has no attribute {name!r}")
