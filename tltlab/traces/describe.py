"""What is in a trace, in numbers: for traces of any size, which are read in parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import metrics
from .trace import Trace, read


def describe(trace: Trace) -> dict[str, Any]:
    """The keys of `tltlab trace describe --json`: manifest, rows of each table, one dict per RL step, prompt share."""
    return {
        "manifest": trace.manifest.model_dump(),
        "tables": {name: trace.num_rows(name) for name in trace.names},
        "rl_steps": metrics.per_step(trace),
        "prompt_share": metrics.prompt_share(trace),
    }


def count(trace: Trace) -> dict[str, Any]:
    """RL steps, responses and tokens of a trace, and the names of its tables."""
    return {
        "num_rl_steps": len(trace.rl_steps),
        "num_responses": trace.num_rows("outcomes"),
        "num_tokens": metrics.num_tokens(trace),
        "tables": list(trace.names),
    }


def describe_stream(path: str | Path) -> dict[str, Any]:
    """Check a trace and `describe` it in bounded memory. Raises TraceError."""
    return describe(read(path))


def validate_stream(path: str | Path) -> dict[str, Any]:
    """Check a trace and `count` it in bounded memory. Raises TraceError for the first fault."""
    return count(read(path))
