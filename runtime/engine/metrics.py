"""Counters of a policy's iterations, exported to Prometheus where the engine is served.

A `Tally` counts in the engine's process; it is read at each scrape, and nothing is sent otherwise. `FAMILIES` are the
metrics, all with vLLM's labels `model_name` and `engine`. An `arm` is a strategy as `str` writes it, "ngram:4" or
"none". `gained_seconds` is below 0 where plain decoding is faster.

The time of plain decoding is a cost model's for the same batch and context (`by` is "costs"), where the engine was
given one. Else it is "measured": the median of the last 32 plain iterations of the same batch size, interpolated
between known sizes (`tltlab.policies.reward`). A policy that never decodes plainly then has no gain.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from tltlab.costs.base import CostModel
from tltlab.policies.reward import Reward
from tltlab.state import StepOutcome
from tltlab.strategy import NO_SPECULATION

from .guard import FAULTS, Guard
from .tracker import Iteration

if TYPE_CHECKING:
    from prometheus_client import Metric

logger = logging.getLogger(__name__)

Samples = Mapping[tuple[str, ...], float]
"""Numbers by metric name, without "tltlab:", and label values, without model and engine."""

FAMILIES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "policy_info": ("The active policy: 1.", ("selector", "digest", "failure")),
    "iterations_total": ("Iterations that verified this arm.", ("arm",)),
    "iteration_seconds_total": ("Seconds of these iterations, drafting included.", ("arm",)),
    "generated_tokens_total": ("Tokens generated in these iterations.", ("arm",)),
    "draft_tokens_per_position_total": ("Drafts with a token here.", ("arm", "position")),
    "accepted_tokens_per_position_total": ("Drafts kept up to here.", ("arm", "position")),
    "drafter_collapsed": ("1: its acceptance collapsed after a wake or new weights.", ("drafter",)),
    "gained_seconds": ("Seconds saved over plain decoding.", ("arm", "by")),
}
"""Description and labels of each metric."""

_CHUNK = 256
"""Iterations counted at a time: between forward passes caches are cold, and counting one costs more."""


class Tally:
    """Counts iterations by arm; its size grows with arms and draft depths, not with iterations.

    The time of plain decoding comes from `costs`, or from measurements. After the first exception it logs an error and
    stops counting, since the engine serves others.
    """

    def __init__(self, costs: CostModel | None = None) -> None:
        self.by = "measured" if costs is None else "costs"
        self._plain = None if costs is None else costs.iteration(NO_SPECULATION)
        self._counts: defaultdict[tuple[str, ...], float] = defaultdict(float)
        self._relative = Reward("relative")
        self._uncounted: list[Iteration] = []
        self._guard = Guard("iterations are not counted any more:", "the engine continues")

    def add(self, iteration: Iteration) -> None:
        """Add an ended iteration."""
        self._uncounted.append(iteration)
        if len(self._uncounted) >= _CHUNK:
            self._count()

    @property
    def counts(self) -> Samples:
        """Counts since the start."""
        self._count()
        return self._counts

    def _count(self) -> None:
        new, self._uncounted = self._uncounted, []
        # A cost model may be anybody's.
        self._guard.call(self._count_all, new)

    def _count_all(self, new: Sequence[Iteration]) -> None:
        counts = self._counts
        drafts: defaultdict[tuple[str, str], Counter[int]] = defaultdict(Counter)
        for iteration in new:
            strategy, outcome = iteration.verified.strategy, iteration.outcome
            arm = str(strategy)
            counts["iterations_total", arm] += 1
            counts["iteration_seconds_total", arm] += outcome.elapsed_s
            counts["generated_tokens_total", arm] += iteration.num_generated
            if not strategy.speculates:
                self._relative.learn(strategy, outcome)
                continue
            drafts["draft", arm].update(iteration.drafted)
            drafts["accepted", arm].update(iteration.accepted)
            speed_up = self._speed_up(iteration, outcome)
            if speed_up is not None:
                counts["gained_seconds", arm, self.by] += (speed_up - 1.0) * outcome.elapsed_s
        for (kind, arm), lengths in drafts.items():
            for position in range(max(lengths, default=0)):
                times = sum(times for length, times in lengths.items() if length > position)
                counts[f"{kind}_tokens_per_position_total", arm, str(position)] += times

    def _speed_up(self, iteration: Iteration, outcome: StepOutcome) -> float | None:
        """Speed-up over plain decoding; None where it is unknown, as for an iteration with prefill."""
        if self._plain is None:
            return self._relative(iteration.verified.strategy, outcome)
        if outcome.had_prefill or outcome.elapsed_s <= 0.0:
            return None
        plain_s = self._plain.seconds(outcome.batch, iteration.context_tokens)
        return outcome.accept_length * plain_s / outcome.elapsed_s


Labels = tuple[str, str]
"""`model_name` and `engine`."""

Ask = Callable[[], Sequence[tuple[Labels, Samples]]]
"""Reads the counts of engines; it may raise or block briefly."""


class Collector:
    """A collector of `prometheus_client` for all engines that this process serves, read at each scrape.

    An engine that cannot be read is left out.
    """

    def __init__(self) -> None:
        self.asks: list[Ask] = []

    def describe(self) -> list[Metric]:
        """Return nothing: at registration no engine is read."""
        return []

    def collect(self) -> Iterable[Metric]:
        if not self.asks:
            return []
        of_engines: list[tuple[Labels, Samples]] = []
        for ask in self.asks:
            try:
                of_engines += ask()
            except FAULTS as error:  # vLLM's own metrics must be served in any case
                logger.debug("an engine was not asked for its metrics: %s: %s", type(error).__name__, error)
        return families(of_engines)


def families(of_engines: Sequence[tuple[Labels, Samples]]) -> list[Metric]:
    """Return the metrics of some engines in `prometheus_client`'s form."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    collection = {}
    for name, (text, labels) in FAMILIES.items():
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        collection[name] = kind(f"tltlab:{name}", text, labels=("model_name", "engine", *labels))
    for engine, samples in of_engines:
        for (name, *values), number in samples.items():
            collection[name].add_metric((*engine, *values), number)
    return list(collection.values())
