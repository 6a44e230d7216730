"""What the policy beside an engine does, counted as iterations end and shown to Prometheus where the engine is served.

A `Tally` counts in the engine's process, and whoever is asked for metrics asks it for `Metrics`: nothing is sent while
nobody asks. Names, all with the labels `model_name` and `engine` that vLLM's own metrics have; an `arm` is a strategy
as `str` writes it, "ngram:4" or "none":

| metric | |
|---|---|
| `tltlab:policy_info` | 1, with the policy's `selector`, the start of its `digest`, its `failure` if it failed |
| `tltlab:arm_info` | 1, with the `arm` of the newest iteration |
| `tltlab:iterations_total`, `tltlab:iteration_seconds_total`, `tltlab:generated_tokens_total` | by `arm` |
| `tltlab:drafts_total`, `tltlab:draft_tokens_total`, `tltlab:accepted_tokens_total` | by `arm` |
| `tltlab:draft_tokens_per_position_total`, `tltlab:accepted_tokens_per_position_total` | by `arm` and `position` |
| `tltlab:gained_seconds` | by `arm`: what plain decoding would have taken more; below 0 where it is faster |
| `tltlab:compared_seconds_total` | by `arm`: the seconds of the iterations which that was said of; both say `by` what |
| `tltlab:own_seconds_total` | spent beside the engine, by `part`: policy, drafters, rest |

What plain decoding takes is what a cost model says of the same batch and context (`by` is "costs"), where the engine
was given one. Else it is "measured": the median of the last 32 plain iterations of the same batch size, between known
sizes interpolated (`tltlab.policies.reward`); a policy that never decodes plainly is then compared with nothing.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tltlab.costs.base import CostModel
from tltlab.policies.reward import Reward
from tltlab.state import StepOutcome
from tltlab.strategy import NO_SPECULATION, Strategy

from .ledger import Iteration

if TYPE_CHECKING:
    from prometheus_client import Metric

logger = logging.getLogger(__name__)

_TOGETHER = 256
"""Iterations that are counted at a time: between forward passes caches are cold, and counting one costs more."""


@dataclass(slots=True)
class ArmCounts:
    """What iterations of one arm did. `drafts` counts drafts by tokens drafted, at least 1, and tokens kept."""

    iterations: int = 0
    seconds: float = 0.0
    generated: int = 0
    drafts: Counter[tuple[int, int]] = field(default_factory=Counter)
    gained_s: float = 0.0
    compared_s: float = 0.0

    def by_position(self, column: int) -> list[int]:
        """Drafts that had a token at position 0, 1, ...: `column` 0 counts tokens drafted, 1 tokens kept."""
        deepest = max((draft[0] for draft in self.drafts), default=0)
        return [sum(times for draft, times in self.drafts.items() if draft[column] > at) for at in range(deepest)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """All that is shown of one engine. `seconds` are spent in all, of these by the policy, and beside by drafters.

    `by` says what plain decoding was told from.
    """

    selector: str
    digest: str
    failure: str
    newest: Strategy
    arms: Mapping[Strategy, ArmCounts]
    seconds: tuple[float, float, float]
    by: str


class Tally:
    """Counts iterations by arm; what it holds grows with arms and draft depths, not with iterations.

    Plain decoding is told from `costs`, or from what is measured. Where something cannot be counted it says so once and
    counts no more: the engine has others to serve.
    """

    def __init__(self, costs: CostModel | None = None) -> None:
        self.newest = NO_SPECULATION
        self.by = "measured" if costs is None else "costs"
        self._plain = None if costs is None else costs.iteration(NO_SPECULATION)
        self._arms: dict[Strategy, ArmCounts] = {}
        self._relative = Reward("relative")
        self._uncounted: list[Iteration] = []
        self._failed = False

    def add(self, iteration: Iteration) -> None:
        """An iteration has ended."""
        self._uncounted.append(iteration)
        if len(self._uncounted) >= _TOGETHER:
            self._count()

    @property
    def arms(self) -> Mapping[Strategy, ArmCounts]:
        """By arm, in the order in which arms were first run."""
        self._count()
        return self._arms

    def _count(self) -> None:
        new, self._uncounted = self._uncounted, []
        if not new or self._failed:
            return
        try:
            self._count_all(new)
        except Exception as error:  # a cost model may be anybody's
            self._failed = True
            logger.error("iterations are not counted any more: %s: %s", type(error).__name__, error)
        self.newest = new[-1].verified.strategy

    def _count_all(self, new: Sequence[Iteration]) -> None:
        for iteration in new:
            strategy, outcome = iteration.verified.strategy, iteration.outcome
            counts = self._arms.setdefault(strategy, ArmCounts())
            counts.iterations += 1
            counts.seconds += outcome.elapsed_s
            counts.generated += iteration.num_generated
            if not strategy.speculates:
                self._relative.learn(strategy, outcome)
                continue
            counts.drafts.update(zip(iteration.drafted, iteration.accepted, strict=True))
            # Who was drafted nothing.
            del counts.drafts[0, 0]
            speed_up = self._speed_up(iteration, outcome)
            if speed_up is not None:
                counts.gained_s += (speed_up - 1.0) * outcome.elapsed_s
                counts.compared_s += outcome.elapsed_s

    def _speed_up(self, iteration: Iteration, outcome: StepOutcome) -> float | None:
        """Over plain decoding; None where that cannot be told, as of an iteration that prefilled."""
        if self._plain is None:
            return self._relative(iteration.verified.strategy, outcome)
        if outcome.had_prefill or outcome.elapsed_s <= 0.0:
            return None
        plain_s = self._plain.seconds(outcome.batch, iteration.context_tokens)
        return outcome.accept_length * plain_s / outcome.elapsed_s


class NullTally(Tally):
    """Counts nothing."""

    def add(self, iteration: Iteration) -> None:
        pass


Labels = tuple[str, str]
"""`model_name` and `engine`."""

Ask = Callable[[], Sequence[tuple[Labels, Metrics]]]
"""Asks engines for their metrics; it may raise, and may take a moment."""


class Collector:
    """A collector of `prometheus_client` for all engines that this process serves: they are asked at each scrape.

    An engine that cannot be asked is left out, and the scrape goes on without it.
    """

    def __init__(self) -> None:
        self.asks: list[Ask] = []

    def describe(self) -> list[Metric]:
        """Nothing: at registration no engine is asked."""
        return []

    def collect(self) -> Iterable[Metric]:
        if not self.asks:
            return []
        of_engines: list[tuple[Labels, Metrics]] = []
        for ask in self.asks:
            try:
                of_engines += ask()
            except Exception as error:  # whatever it is, vLLM's own metrics are being asked for
                logger.debug("an engine was not asked for its metrics: %s: %s", type(error).__name__, error)
        return families(of_engines)


Samples = Iterable[tuple[tuple[str, ...], float]]
"""Label values and a number each."""


def _of_arms(number: Callable[[ArmCounts], float]) -> Callable[[Metrics], Samples]:
    return lambda metrics: [((str(arm),), number(counts)) for arm, counts in metrics.arms.items()]


def _compared(number: Callable[[ArmCounts], float]) -> Callable[[Metrics], Samples]:
    return lambda metrics: [((str(arm), metrics.by), number(counts)) for arm, counts in metrics.arms.items()]


def _by_position(column: int) -> Callable[[Metrics], Samples]:
    return lambda metrics: [
        ((str(arm), str(position)), times)
        for arm, counts in metrics.arms.items()
        for position, times in enumerate(counts.by_position(column))
    ]


def _own_seconds(metrics: Metrics) -> Samples:
    inside, policy, drafters = metrics.seconds
    return [(("policy",), policy), (("drafters",), drafters), (("rest",), inside - policy)]


_FAMILIES: Sequence[tuple[str, str, tuple[str, ...], Callable[[Metrics], Samples]]] = (
    (
        "policy_info",
        "The policy in force.",
        ("selector", "digest", "failure"),
        lambda metrics: [((metrics.selector, metrics.digest, metrics.failure), 1)],
    ),
    ("arm_info", "The arm of the newest iteration.", ("arm",), lambda metrics: [((str(metrics.newest),), 1)]),
    ("iterations_total", "Iterations that verified this arm.", ("arm",), _of_arms(lambda c: c.iterations)),
    ("iteration_seconds_total", "Seconds of these, its drafting included.", ("arm",), _of_arms(lambda c: c.seconds)),
    ("generated_tokens_total", "Tokens generated in these.", ("arm",), _of_arms(lambda c: c.generated)),
    ("drafts_total", "Drafts that were verified.", ("arm",), _of_arms(lambda c: c.drafts.total())),
    ("draft_tokens_total", "Tokens of these.", ("arm",), _of_arms(lambda c: sum(c.by_position(0)))),
    ("accepted_tokens_total", "Tokens of these that were kept.", ("arm",), _of_arms(lambda c: sum(c.by_position(1)))),
    ("draft_tokens_per_position_total", "Drafts with a token here.", ("arm", "position"), _by_position(0)),
    ("accepted_tokens_per_position_total", "Drafts kept up to here.", ("arm", "position"), _by_position(1)),
    ("gained_seconds", "What plain decoding had taken more.", ("arm", "by"), _compared(lambda c: c.gained_s)),
    ("compared_seconds_total", "Seconds compared with it.", ("arm", "by"), _compared(lambda c: c.compared_s)),
    ("own_seconds_total", "Seconds spent beside the engine.", ("part",), _own_seconds),
)
"""Of each metric its name, what it is, its labels, and where it comes from."""


def families(of_engines: Sequence[tuple[Labels, Metrics]]) -> list[Metric]:
    """The metrics of some engines as `prometheus_client` writes them."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    collection: list[Metric] = []
    for name, text, labels, samples in _FAMILIES:
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        family = kind(f"tltlab:{name}", text, labels=("model_name", "engine", *labels))
        for engine, metrics in of_engines:
            for values, number in samples(metrics):
                family.add_metric((*engine, *values), number)
        collection.append(family)
    return collection
