"""The share of a simulation's time that a policy takes, and a hint where it is large."""

import math
import time
from collections.abc import Callable, Iterable
from typing import Any

from tltlab.console import progress
from tltlab.policies.selector import Selector

HINT_S = 5.0
"""Seconds of a simulation after which a slow policy is reported."""
LEAST_SHARE = 0.5


def report_if_slow(selectors: Iterable[Selector], decision_block: int) -> None:
    """Measure what the calls of a simulation's selectors take; once that is most of `HINT_S` or more, one line says so.

    Methods of these selectors are replaced.
    """
    began_s, spent_s, is_reported = time.perf_counter(), 0.0, False

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*args: Any) -> Any:
            nonlocal spent_s, is_reported
            before_s = time.perf_counter()
            result = call(*args)
            now_s = time.perf_counter()
            spent_s += now_s - before_s
            whole_s = now_s - began_s
            if whole_s >= HINT_S and not is_reported and (share := spent_s / whole_s) >= LEAST_SHARE:
                is_reported = True
                # So many times fewer choices take as long as the rest.
                block = decision_block * 2 ** math.ceil(math.log2(max(2.0, share / max(1.0 - share, 0.01))))
                progress(
                    f"the policy takes {share:.0%} of the {whole_s:.0f} s so far: --decision-block {block} "
                    f"(decision_block={block} in Python) asks it once in {block} iterations"
                )
            return result

        return measured

    for selector in selectors:
        for name in ("choose", "observe"):
            setattr(selector, name, timed(getattr(selector, name)))
