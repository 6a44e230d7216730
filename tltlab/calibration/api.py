"""Calibration for notebooks, the simulator and commands: fits to a trace, and to its RL steps."""

from pathlib import Path

from tltlab.acceptance.measured import MeasuredAcceptance, fit_acceptance
from tltlab.costs.linear import LinearCosts
from tltlab.errors import ConfigError
from tltlab.importers.sources import read
from tltlab.records import frozen
from tltlab.traces.trace import Trace

from .costs import fit_trace
from .iterations import iterations_of


@frozen
class Calibration:
    """Linear costs and acceptance by batch; `notes` lists the terms that are None or folded into others, and why."""

    costs: LinearCosts
    acceptance: MeasuredAcceptance | None
    notes: tuple[str, ...]


def calibrate(trace: str | Path | Trace) -> Calibration:
    """Fit linear costs and acceptance to the iterations of a trace (or of what is at its path); no cross-validation.

    An iteration's duration holds its verification and the drafting for the next one, separated by `draft_duration`:

        duration - draft_duration = base + per_request*b + per_token*(b + drafted) + per_context*S
                                    + prefill_per_token*prefill_tokens + [speculative] sd_base + [loaded, plain] sd_idle
        draft_duration            = [next depth d > 0] sd_base' + draft_per_request*b
                                    + d*(draft_level + draft_level_per_request*b)

    with sd_base_s = sd_base + sd_base', and far_token_s for tokens beyond `FAR_TOKENS` where there are many. A term
    that the rows do not separate from others is None; without speculation per_request_s includes per_token_s. Raises
    ConfigError for a trace without iterations.
    """
    trace = read(trace)
    costs = fit_trace(trace, most_folds=0).costs
    assert isinstance(costs, LinearCosts)
    acceptance, acceptance_notes = fit_acceptance(iterations_of(trace), trace.drafters)
    notes = (*costs.notes, *acceptance_notes)
    return Calibration(costs=costs.model_copy(update={"notes": notes}), acceptance=acceptance, notes=notes)


def parse_rl_steps(text: str | None, rl_steps: list[int]) -> list[int] | None:
    """`a:b` as the RL steps a <= step < b that the trace has; either may be left out; `a` alone is one step, or all."""
    if text is None:
        return None
    if text == "all":
        return list(rl_steps)
    first, colon, last = text.partition(":")
    try:
        low = int(first) if first else min(rl_steps, default=0)
        high = (int(last) if last else max(rl_steps, default=0) + 1) if colon else low + 1
    except ValueError as error:
        raise ConfigError(f"--rl-steps {text!r}: give a:b, such as 0:5, or all") from error
    steps = [step for step in rl_steps if low <= step < high]
    if not steps:
        span = f"{rl_steps[0]}..{rl_steps[-1]}" if rl_steps else "none"
        raise ConfigError(f"--rl-steps {text}: the trace has none of these; its RL steps are {span}")
    return steps
