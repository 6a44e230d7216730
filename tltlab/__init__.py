"""tltlab: a lab for the long tail of reasoning-RL rollouts.

>>> trace = tltlab.read("traces/tiny")  # doctest: +SKIP
>>> result = tltlab.simulate(trace, policy="beg-mab")  # doctest: +SKIP
>>> result.plot()  # doctest: +SKIP
>>> tltlab.what_if("lengths.csv", gpus="8xH100", model="Qwen2.5-7B").verdict  # doctest: +SKIP
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import ConfigError, RunError, TltlabError, TraceError
from .state import Choice, StepOutcome, StepState
from .strategy import NO_SPECULATION, Strategy

if TYPE_CHECKING:
    from .importers.sources import read
    from .policies.policy import Policy, load_policy
    from .policies.selector import Selector
    from .report.timeline import timeline
    from .sim.simulate import simulate
    from .sim.study.compare import compare
    from .sim.study.waterfall import waterfall
    from .sim.study.what_if import what_if
    from .sim.tuning.tune import tune
    from .traces.trace import Trace

__all__ = [
    "NO_SPECULATION",
    "Choice",
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
    "compare",
    "load_policy",
    "read",
    "simulate",
    "timeline",
    "tune",
    "waterfall",
    "what_if",
]

# Engines and Ray actors import tltlab too: what loads pandas, pydantic or matplotlib waits until it is asked for.
_MODULE_OF = {
    "Policy": "policies.policy",
    "Selector": "policies.selector",
    "Trace": "traces.trace",
    "compare": "sim.study.compare",
    "load_policy": "policies.policy",
    "read": "importers.sources",
    "simulate": "sim.simulate",
    "timeline": "report.timeline",
    "tune": "sim.tuning.tune",
    "waterfall": "sim.study.waterfall",
    "what_if": "sim.study.what_if",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("tltlab")
    if name in ("sim", "runtime"):
        return import_module(f"tltlab.{name}")
    if name in _MODULE_OF:
        return getattr(import_module(f"tltlab.{_MODULE_OF[name]}"), name)
    gone = "; compare takes lists, such as workers=[4, 8]" if name == "sweep" else ""
    raise AttributeError(f"module 'tltlab' has no attribute {name!r}{gone}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__", "sim", "runtime"})
