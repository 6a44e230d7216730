"""The 90 % range of a speed-up: the effect of errors in costs, acceptance and lengths, jointly and separately.

Each input is moved to the ends of its own 90 % range while the policy stays the same, and the speed-up is simulated
again. Logarithms of the effects add up as independent errors do, the lower and the upper ones apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Self

import numpy as np

from tltlab.acceptance.base import Acceptance, Scaled, scaled
from tltlab.acceptance.load import DEFAULT
from tltlab.arrays import Floats
from tltlab.calibration.logged import LoggedDrafting
from tltlab.costs.base import CostModel
from tltlab.costs.evidence import interval
from tltlab.costs.profiles import profile_costs
from tltlab.costs.roofline import RooflineCosts
from tltlab.costs.scaled import ScaledCosts
from tltlab.errors import ConfigError
from tltlab.lengths.fit import with_tail_drawn
from tltlab.policies.policy import Policy, load_policy
from tltlab.records import Json, frozen
from tltlab.sim.engine.requests import Requests, of_responses
from tltlab.sim.placement import place_steps
from tltlab.sim.scenario import Scenario
from tltlab.stats import Interval, paired_ratio, paired_speed_up, student_margin
from tltlab.strategy import NO_SPECULATION, Strategy, drafters_of
from tltlab.traces.trace import Trace

from .study import Cell, Study

LEVEL = 0.9
Source = Literal["costs", "acceptance", "engine", "lengths", "responses", "prompts", "longest", "depth", "context"]
WORDS: dict[Source, str] = {
    "costs": "cost-model error",
    "acceptance": "acceptance",
    "engine": "choice of engine",
    "lengths": "response lengths",
    "responses": "responses per RL step",
    "prompts": "prompt lengths",
    "longest": "longest response",
    "depth": "depth of the log's drafts",
    "context": "context that the drafter was trained at",
}
UNMEASURED, FITTED = 0.7, 0.3
"""Errors of speed-ups and of seconds, as factors less 1, where the costs state none: without data behind them, and of
a fit (`cpu-small`: .32 on RL steps left out).
"""
STAGES = 0.3
"""Error of the other stages' seconds, which are an assumed share of peak FLOPs."""
LEARNED, TEXT = (0.62, 1.52), (0.7, 1.3)
"""Range of the tokens per iteration of a drafter with a network, and of one that copies text, over those assumed.

LEARNED holds nine in ten of 21 pairs of an EAGLE-3 head and a workload, against `geometric:0.7` at the same depth. TEXT
holds the n-grams of gsm8k (.80) and ShareGPT (1.25) against `geometric:0.42`.
"""
HELD = (0.93, 1.06)
"""The same of a network's drafts deeper than those measured, from heads of two models at depths 3 to 8."""
_REFERENCE_DEPTH = 5
"""Draft depth at which a range of tokens per iteration is turned into one of chances."""
_FEW_STEPS, _DRAWS, _FEW_GROUPS = 5, 8, 4
"""RL steps below which prompt groups are drawn, how often, and groups below which responses are drawn instead."""

Effect = tuple[float, float]
"""Logarithm of the speed-up at the ends of an input's range over that of the estimate: (0 or below, 0 or above)."""
Ends = tuple[float, float]


@frozen
class Band:
    """A speed-up with its 90 % range, from the independent `effects` of its inputs.

    >>> band = Band(estimate=2.0, effects={"costs": (-0.3, 0.4), "lengths": (-0.4, 0.3)})
    >>> round(band.low, 2), round(band.high, 2), band.shares
    (1.21, 3.3, {'costs': 0.5, 'lengths': 0.5})
    """

    estimate: float
    effects: Mapping[Source, Effect]

    @property
    def low(self) -> float:
        return self.estimate * math.exp(-math.hypot(*(low for low, _ in self.effects.values())))

    @property
    def high(self) -> float:
        return self.estimate * math.exp(math.hypot(*(high for _, high in self.effects.values())))

    @property
    def shares(self) -> dict[Source, float]:
        """Share of each input in the variance of all; they add up to 1, or are 0 where nothing is open."""
        variances = {name: ((high - low) / 2) ** 2 for name, (low, high) in self.effects.items()}
        total = sum(variances.values())
        return {name: variance / total if total else 0.0 for name, variance in variances.items()}

    @property
    def loses(self) -> bool:
        """True if a slowdown is within the range."""
        return self.low < 1.0

    def with_ends(self, name: Source, speed_ups: Sequence[float]) -> Band:
        """The band where an input makes the estimate one of these speed-ups at the ends of its range."""
        return replace(self, effects={**self.effects, name: effect(self.estimate, speed_ups)})

    def ends_json(self) -> dict[str, float]:
        """The speed-up and its range."""
        return {"mean": self.estimate, "low": self.low, "high": self.high}

    def of_input(self, name: Source) -> Ends:
        """The speed-up at the ends of the range of one input."""
        low, high = self.effects[name]
        return self.estimate * math.exp(low), self.estimate * math.exp(high)

    def json(self) -> Json:
        """The range and, by input, the speed-up at the ends of that one's range and its share of the variance."""
        parts = {}
        for name, share in self.shares.items():
            low, high = self.of_input(name)
            parts[name] = {"low": low, "high": high, "share": share}
        return {"low": self.low, "high": self.high, "level": LEVEL, "parts": parts}

    def __str__(self) -> str:
        """
        >>> str(Band(estimate=1.33, effects={"costs": (-0.4, 0.45), "acceptance": (-0.2, 0.1)}))
        '1.33x (90 % range 0.9x to 2.1x, mostly cost-model error)'
        """
        shares = sorted(self.shares.items(), key=lambda part: -part[1])
        named = [WORDS[name] for name, share in shares if share >= 0.25]
        why = f", mostly {named[0]}" if shares[0][1] >= 0.6 else f", from {' and '.join(named)}" if named else ""
        return f"{self.estimate:.2f}x (90 % range {self.range_text}{why})"

    @property
    def range_text(self) -> str:
        """Both ends in words, to two digits, and more where the side of 1 is seen in them only."""
        wide = self.high - self.low >= 1
        low, high = (f"{end:.{1 if wide and abs(end - 1) > 0.1 else 2}f}x" for end in (self.low, self.high))
        return f"{low} to {high}"


@frozen
class InputErrors:
    """The 90 % ranges of a simulation's inputs.

    `speed_up` and `seconds` are errors of the costs, as factors less 1, `tokens` the least and the most tokens per
    iteration of each drafter, over those simulated.
    """

    speed_up: float
    seconds: float
    tokens: Mapping[str, Ends]
    stages: float = STAGES

    @classmethod
    def of(cls, scenario: Scenario, strategies: Iterable[Strategy], trace: Trace, *, recorded: bool) -> InputErrors:
        """The errors where these strategies run; `recorded` if the trace has the acceptance.

        Acceptance that a user gives is taken unchanged.
        """
        strategies = list(strategies)
        speed_up, seconds = scenario.evidence(strategies)["speedup_error"], scenario.evidence([])["error"]
        unstated = UNMEASURED if scenario.costs.calibrated is None else FITTED
        if speed_up is None:
            # Both times of a ratio come from one fit, and each is off by its error at most.
            speed_up = unstated if seconds is None else _added(seconds, seconds)
        granted = scenario.granted(strategies)["acceptance"]
        tokens = {}
        for name in drafters_of(strategies):
            usual = LEARNED if scenario.registry[name].has_network else TEXT
            if f"({DEFAULT}" in granted[name]:
                tokens[name] = usual
            elif recorded:
                tokens[name] = recorded_tokens(trace, name) or usual
            elif scenario.held(s for s in strategies if s.drafter == name):
                tokens[name] = HELD
        return cls(speed_up=speed_up, seconds=unstated if seconds is None else seconds, tokens=tokens)

    def of_tokens(self) -> Effect:
        """The effect of acceptance at most: a rollout gains no more than in proportion to tokens per iteration."""
        return effect(1.0, [end for ends in self.tokens.values() for end in ends])


@frozen
class Times:
    """Seconds of each RL step's rollout, and of the whole RL step where that is known."""

    rollout_s: Floats
    step_s: Floats | None = None

    def seconds(self, whole: bool = False) -> Floats:
        """Seconds of the rollouts, or of `whole` RL steps, which must be known."""
        seconds = self.step_s if whole else self.rollout_s
        assert seconds is not None
        return seconds

    def over(self, other: Times, whole: bool = False) -> float:
        """How many times those of others these seconds are in sum."""
        return float(self.seconds(whole).sum() / other.seconds(whole).sum())

    def others_s(self) -> Floats:
        """Seconds of an RL step beside its rollout."""
        return np.maximum(self.seconds(whole=True) - self.rollout_s, 0.0)


@frozen
class SpeedUp:
    """Speed-up of some seconds over others: 95 % intervals of draws only, and 90 % ranges.

    Those of the RL step are None where the other stages' costs are unknown.
    """

    rollout: Interval
    rl_step: Interval | None
    band: Band
    rl_step_band: Band | None

    @classmethod
    def of(cls, base: Times, own: Times, ranges: tuple[Band, Band | None], seed: int, **more: Any) -> Self:
        """From the seconds that are compared, and their ranges; `more` are further fields."""
        rl_step = None if ranges[1] is None else paired_speed_up(base.seconds(True), own.seconds(True), seed)
        rollout = paired_speed_up(base.rollout_s, own.rollout_s, seed)
        return cls(rollout=rollout, rl_step=rl_step, band=ranges[0], rl_step_band=ranges[1], **more)


def at_range_ends(scenario: Scenario, errors: InputErrors) -> dict[Source, list[Scenario]]:
    """Scenarios with costs, and with acceptance, at the lower and at the upper end of its range, and on other engines.

    Acceptance has no scenarios where its error is unknown, or where replay fixes it; engines have none where one was
    named. The engines come last: with them plain decoding takes another time too.
    """
    model, tokens = scenario.acceptance, errors.tokens
    costs = [ScaledCosts.wrapping(scenario.costs, speculative=factor) for factor in _costs_ends(errors.speed_up)]
    ends: dict[Source, list[Scenario]] = {"costs": [replace(scenario, costs=c) for c in costs], "acceptance": []}
    ends["engine"] = [replace(scenario, costs=c) for c in on_other_engines(scenario.costs)]
    if model is not None and tokens and model.varies_by != "position":
        ends["acceptance"] = [
            _with_tokens(scenario, model, {name: pair[end] for name, pair in tokens.items()}) for end in (0, 1)
        ]
    return ends


def on_other_engines(costs: CostModel) -> list[CostModel]:
    """Costs of the same GPUs and model on each other engine; none where the engine was named."""
    if isinstance(costs, ScaledCosts):
        return [costs.model_copy(update={"of": other}) for other in on_other_engines(costs.of)]
    if not isinstance(costs, RooflineCosts) or costs.evidence is None:
        return []
    return [
        profile_costs(name, costs.gpu, costs.model, costs.tp, weights=costs.weights, kv=costs.kv)
        for name in costs.evidence.other_engines
    ]


def bands(
    scenario: Scenario,
    policy: Callable[[Scenario], Policy],
    plain: Times,
    drafting: Times,
    errors: InputErrors,
    *,
    baseline: Policy | None = None,
    jobs: int | None = 1,
) -> tuple[Band, Band | None]:
    """The ranges of the speed-ups of rollouts and of RL steps, from `plain` and `drafting`, which were simulated.

    `policy` returns the policy of a scenario with changed inputs: the simulated one, or the best one there if that
    drafts nothing. `plain` are the times of plain decoding or of the `baseline`, whose ends are simulated too.
    Other stages take what they take in `plain` and `drafting`, in proportion to the tokens. `jobs` as in
    `side_by_side`.
    """
    moved = at_range_ends(scenario, errors)
    rng = np.random.default_rng(scenario.seed)
    drawn = [resampled(scenario, rng) for _ in range(_DRAWS)] if len(scenario.steps) < _FEW_STEPS else []
    used, none = policy(scenario), load_policy("none")
    ends = [end for ends in moved.values() for end in ends]
    runs = [(end, policy(end)) for end in ends] + [(draw, used) for draw in drawn]
    # The ends of costs and acceptance are those of speculation: plain decoding takes what it took.
    kept = 0 if baseline is not None else len(ends) - len(moved["engine"])
    runs += [(end, baseline or none) for end in [*ends[kept:], *drawn]]
    cells = [Cell(name=str(at), policy=each, scenario=run) for at, (run, each) in enumerate(runs)]
    found = Study(cells=cells, jobs=jobs).makespans() if cells else []
    drafting_s, plain_s = found[: len(ends) + len(drawn)], found[len(ends) + len(drawn) :]
    plain_s = [plain.rollout_s] * kept + plain_s
    pairs = list(zip(plain_s, drafting_s, strict=True))
    tokens_of = [_tokens(draw) / np.maximum(_tokens(scenario), 1.0) for draw in drawn]

    def of(whole: bool) -> Band:
        def ratio(pair: tuple[Floats, Floats], scale: Floats | float = 1.0) -> float:
            a, b = pair
            if whole:
                a, b = a + scale * plain.others_s(), b + scale * drafting.others_s()
            return float(a.sum() / b.sum()) if b.any() else 1.0

        nominal = plain.rollout_s, drafting.rollout_s
        estimate = ratio(nominal)
        each = iter(pairs)
        effects = {name: effect(estimate, [ratio(next(each)) for _ in ends]) for name, ends in moved.items()}
        if not moved["acceptance"]:
            effects["acceptance"] = errors.of_tokens()
        if whole:
            factors = _costs_ends(_added(errors.seconds, errors.stages))
            low, high = effect(estimate, [ratio(nominal, 1 / f) for f in factors])
            effects["costs"] = -math.hypot(effects["costs"][0], low), math.hypot(effects["costs"][1], high)
        if drawn:
            logs = [math.log(ratio(pair, scale)) for pair, scale in zip(each, tokens_of, strict=True)]
            margin = student_margin(float(np.std(logs, ddof=1)), len(logs) - 1, LEVEL)
            effects["lengths"] = -margin, margin
        else:
            effects["lengths"] = of_steps(plain.seconds(whole), drafting.seconds(whole), seed=scenario.seed)
        return Band(estimate=estimate, effects=effects)

    return of(False), None if plain.step_s is None or drafting.step_s is None else of(True)


def recorded_tokens(trace: Trace, drafter: str) -> Ends | None:
    """The 90 % range of a recorded drafter's mean tokens per iteration, over that mean; None for too few records.

    Records are positions of acceptance.parquet, by prompt group, else iterations, by RL step and worker, else accept
    lengths of a log, by RL step in which drafts were kept.
    """
    pairs: dict[tuple[int, Any], list[float]] = {}
    table, rows = trace.acceptance, trace.arrow("iterations")
    if table is not None and len(table):
        part = table[table["drafter"] == drafter]
        keys = zip(part["rl_step"], part["prompt_id"], strict=True)
        for key, listed in zip(keys, part["accept_if_drafted"], strict=True):
            pair = pairs.setdefault(key, [0.0, 0.0])
            pair[0] += float(np.sum(listed)) + len(listed)
            pair[1] += len(listed)
    elif rows is not None:
        names = ["rl_step", "worker", "drafter", "draft_depth", "batch", "num_accepted"]
        frame = rows.select(names).to_pandas()
        frame = frame[(frame["draft_depth"] > 0) & (frame["drafter"] == drafter)]
        for (step, worker), part in frame.groupby(["rl_step", "worker"]):
            drafts = float(part["batch"].sum())
            pairs[int(step), worker] = [drafts + float(part["num_accepted"].sum()), drafts]
    elif (logged := LoggedDrafting.of(trace)) is not None:
        pairs = {(0, step): [length, 1.0] for step, length in logged.kept.items()}
    kept = np.array([pair for pair in pairs.values() if pair[1] > 0]).reshape(-1, 2)
    if len(kept) < 2:
        return None
    ratio = paired_ratio(kept[:, 0], kept[:, 1], level=LEVEL)
    return max(ratio.low, 1.0) / ratio.estimate, ratio.high / ratio.estimate


def resampled(scenario: Scenario, rng: np.random.Generator) -> Scenario:
    """The scenario with as many prompt groups per RL step, drawn with replacement; responses where groups are few.

    The longest responses are drawn from the tail, where what is accepted does not depend on their text.
    """
    steps = tuple(_drawn(step, rng) for step in scenario.steps)
    if scenario.acceptance is None or scenario.acceptance.varies_by != "position":
        steps = tuple(step if step.turns else _with_longest_drawn(step, rng) for step in steps)
    return replace(
        scenario, steps=steps, queues=place_steps(steps, scenario.workers, scenario.placement, scenario.costs)
    )


def _with_longest_drawn(step: Requests, rng: np.random.Generator) -> Requests:
    lengths = with_tail_drawn(step.lengths.astype(np.float64), step.lengths >= step.caps, rng)
    return replace(step, lengths=np.minimum(np.rint(lengths).astype(np.int64), step.caps))


def _drawn(step: Requests, rng: np.random.Generator) -> Requests:
    """An RL step of groups that are drawn, in the order of the step."""
    chains = step.chains
    group_of = step.groups[[chain[0] for chain in chains]] if chains else np.zeros(0, np.int64)
    if len(np.unique(group_of)) < _FEW_GROUPS:
        group_of = np.arange(len(chains))
    members: dict[int, list[list[int]]] = {}
    for group, chain in zip(group_of.tolist(), chains, strict=True):
        members.setdefault(group, []).append(chain)
    names = list(members)
    picks = np.sort(rng.integers(len(names), size=len(names))) if names else np.zeros(0, np.int64)
    chosen = [chain for pick in picks.tolist() for chain in members[names[pick]]]
    drawn = of_responses(step, [(step, chain, step.keys[chain[0]]) for chain in chosen])
    at = [request for chain in chosen for request in chain]
    return replace(drawn, recorded_worker=step.recorded_worker[at])


def _tokens(scenario: Scenario) -> Floats:
    return np.array([float(step.trained_tokens.sum()) for step in scenario.steps])


def _costs_ends(error: float) -> Ends:
    """Factors of seconds at the ends of an error."""
    ends = interval(1.0, error)
    assert ends is not None
    return 1.0 / ends[1], 1.0 / ends[0]


def _added(*errors: float) -> float:
    """Independent errors, as factors less 1, in one."""
    return math.expm1(math.hypot(*map(math.log1p, errors)))


def with_overhead(scenario: Scenario, strategies: Sequence[Strategy], error: float) -> list[Scenario]:
    """Scenarios in which all that speculation adds is cheaper, and dearer, so that an iteration is off by the error.

    That moves deep drafts and large batches more than shallow and small ones, as an error of all speculative iterations
    does not. The iteration has the mean draft of these strategies, at the mean batch size of a rollout.
    """
    costs, step = scenario.costs, scenario.steps[0]
    # The longest response takes as many iterations as it has tokens, the others run in a part of them.
    mean, longest = float(np.mean(step.lengths)), float(np.max(step.lengths))
    batch = max(1, round(len(step) / scenario.workers * mean / max(longest, 1.0)))
    drafting = [s for s in strategies if s.speculates]
    context = batch * (float(np.mean(step.prompts)) + mean / 2)
    plain_s = costs.iteration(NO_SPECULATION).seconds(batch, context)
    each_s = [costs.iteration(s, drafters=scenario.registry).seconds(batch, context) for s in drafting]
    adds = float(np.mean(each_s)) - plain_s if each_s else 0.0
    if adds <= 0.0:
        return []
    factors = (max(0.0, 1.0 + (end - 1.0) * (adds + plain_s) / adds) for end in _costs_ends(error))
    return [replace(scenario, costs=ScaledCosts.wrapping(costs, overhead=factor)) for factor in factors]


def _with_tokens(scenario: Scenario, model: Acceptance, factors: Mapping[str, float]) -> Scenario:
    """The scenario in which drafters have `factors` times as many tokens per iteration."""
    for name, factor in factors.items():
        model = Scaled(model, (name,), chance_ratio(model, name, factor))
    return replace(scenario, acceptance=model)


def chance_ratio(model: Acceptance, drafter: str, factor: float) -> float:
    """Ratio of every token's chance for which a draft brings `factor` times the tokens, up to the most a draft can.

    >>> from tltlab.acceptance.base import GeometricAcceptance
    >>> round(0.7 * chance_ratio(GeometricAcceptance(alpha=0.7), "learned", 0.64), 2)
    0.47
    """
    curve = _curve(model, drafter)
    if not curve.any():
        return 1.0
    target = factor * (1.0 + curve.sum())
    low, high = 0.0, 16.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if 1.0 + scaled(curve, middle).sum() < target else (low, middle)
    return high


def _curve(model: Acceptance, drafter: str) -> Floats:
    """P(accepted >= i) of the deepest chain up to `_REFERENCE_DEPTH` that the model covers."""
    (first, *_) = model.in_state({}).by_batch(drafter)
    for depth in range(_REFERENCE_DEPTH, 0, -1):
        try:
            return first.curve(Strategy.chain(drafter, depth))
        except ConfigError:
            continue
    return np.zeros(0)


def effect(estimate: float, ends: Sequence[float]) -> Effect:
    """Effect of an input that makes an estimate one of these speed-ups at the ends of its range."""
    logs = [math.log(end / estimate) for end in ends]
    return min([0.0, *logs]), max([0.0, *logs])


def of_steps(plain: Floats, drafting: Floats, *, seed: int) -> Effect:
    """Effect of the draw of RL steps, from the seconds of each."""
    ratio = paired_ratio(drafting, plain, level=LEVEL, rng=seed)
    low, high = math.log(ratio.estimate / ratio.high), math.log(ratio.estimate / max(ratio.low, ratio.estimate / 10))
    return min(0.0, low), max(0.0, high)
