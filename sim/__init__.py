"""Discrete-event simulation of rollouts. Import it as `tltlab.sim`."""

if __name__ == "sim":
    raise ImportError("import this package as tltlab.sim")

from .config import SimulationConfig
from .rl_steps import RunResult, run_steps
from .scenario import Scenario
from .simulate import SimResult, simulate
from .sweep import compare, sweep
from .topology import Colocated, Separate
from .verification.rollouts import Verification, verify

__all__ = [
    "Colocated",
    "RunResult",
    "Scenario",
    "Separate",
    "SimResult",
    "SimulationConfig",
    "Verification",
    "compare",
    "run_steps",
    "simulate",
    "sweep",
    "verify",
]
