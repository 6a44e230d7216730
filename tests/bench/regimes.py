"""Traces and regimes for policies without tuning, which differ in what the policy does not know.

A regime is a run in phases: the same workers and selectors continue while costs or acceptance change between RL steps,
as when a drafter learns or a machine slows down. Recorded traces come with the costs and acceptance fitted to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np

from tltlab.acceptance.base import Acceptance, from_survival
from tltlab.acceptance.load import load_acceptance
from tltlab.acceptance.measured import FittedDepth, MeasuredAcceptance
from tltlab.arrays import Floats
from tltlab.costs.base import CostModel
from tltlab.costs.linear import LinearCosts
from tltlab.costs.load import load_costs
from tltlab.costs.noise import Block, IterationNoise
from tltlab.costs.scaled import ScaledCosts
from tltlab.importers.sources import read
from tltlab.lengths.generate import generate
from tltlab.lengths.model import REGIMES
from tltlab.policies.policy import Policy, load_policy
from tltlab.policies.selector import Selector
from tltlab.policies.specs import CustomSpec
from tltlab.sim.scenario import Scenario
from tltlab.sim.tuning.cases import oracle_policy
from tltlab.strategy import NO_SPECULATION, Strategy
from tltlab.traces.trace import Trace

MAX_DEPTH = 8
NOISE = IterationNoise(
    ratios=(0.92, 0.94, 0.95, 0.96, 0.97, 0.98, 0.99, 1.01, 1.06, 1.22),
    blocks=(Block(iterations=16, share=0.3),),
)
"""Iterations that scatter by 8 %, mostly upwards, a third of it in blocks of 16: less than on busy cores."""


@dataclass(frozen=True, kw_only=True)
class PolicyRegime:
    """RL steps in `phases`, one scenario each; `file_costs` is the cost model that policies with a file are given."""

    name: str
    phases: tuple[Scenario, ...]
    drafters: tuple[str, ...]
    file_costs: CostModel
    about: str

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        """No speculation, and every depth of every drafter."""
        depths = range(1, MAX_DEPTH + 1)
        return (NO_SPECULATION, *(Strategy.chain(name, depth) for name in self.drafters for depth in depths))

    def seconds(self, policy: Policy | None, seed: int) -> Floats:
        """Makespan of each RL step, under selectors that live through all of them; None is the per-iteration oracle.

        The oracle knows each phase's costs.
        """
        kept = None if policy is None else lasting(policy)
        seeded = [replace(phase, seed=seed) for phase in self.phases]
        rollouts = (s.rollouts(kept or oracle_policy(s, self.strategies)) for s in seeded)
        return np.array([rollout.makespan_s for rollout in chain.from_iterable(rollouts)])


def lasting(policy: Policy) -> Policy:
    """A policy whose selectors are built once for each seed of a generator, however often they are asked for."""
    selectors: dict[str, Selector] = {}

    def build(rng: np.random.Generator) -> Selector:
        seed = str(rng.bit_generator.seed_seq)
        if seed not in selectors:
            selectors[seed] = policy.build(rng)
        return selectors[seed]

    return Policy(selector=CustomSpec.holding(build))


def regimes(traces: Path, rl_steps: int) -> list[PolicyRegime]:
    """All of them, with at most `rl_steps` RL steps each; recorded ones are those that the folder `traces` holds."""
    recorded = [
        _recorded(traces / name, rl_steps, drafter, about)
        for name, drafter, about in (
            ("subset-sum-small", "ngram", "recorded here on CPU"),
            ("gcd-small", "ngram", "recorded here on CPU"),
            ("tiny", "ngram", "recorded here on CPU"),
            ("h100-smoke", "learned", "recorded on one H100, a trained drafter"),
        )
        if (traces / name / "costs.json").is_file()
    ]
    return recorded + [make(rl_steps) for make in _GENERATED]


def _recorded(path: Path, rl_steps: int, drafter: str, about: str) -> PolicyRegime:
    trace = read(path)
    steps = sorted(set(trace.outcomes["rl_step"].tolist()))[-rl_steps:]
    acceptance = str(path / "acceptance.json")
    scenario = Scenario.of(trace, mode="sampled", acceptance=acceptance, workers=1, rl_steps=steps)
    return PolicyRegime(name=path.name, phases=(scenario,), drafters=(drafter,), file_costs=scenario.costs, about=about)


def _lengths(
    rl_steps: int, *, median: float = 500.0, sigma: float = 1.0, cap: int = 4096, prompt: float = 200.0, group: int = 8
) -> Trace:
    model = REGIMES["base-rl"].with_changes(
        median=median, sigma=sigma, max_response_tokens=cap, prompt_tokens_median=prompt, prompt_tokens_sigma=0.3
    )
    return generate(model, num_rl_steps=rl_steps, prompts_per_step=8, group_size=group, seed=7, num_workers=1)


def _chances(*chances: float) -> FittedDepth:
    """Tokens that are kept with these chances, each while all before it were."""
    accepted = from_survival(np.cumprod(np.array(chances)))
    return FittedDepth(accepted=tuple(accepted.tolist()), drafted=float(len(chances)))


def _drafters(**first: tuple[float, float]) -> MeasuredAcceptance:
    """Drafters whose first token is kept with one chance and each later one with the other."""
    return MeasuredAcceptance.at_any_batch(
        {name: {MAX_DEPTH: _chances(chance, *([later] * (MAX_DEPTH - 1)))} for name, (chance, later) in first.items()}
    )


def _gpu(**changes: float) -> LinearCosts:
    """A dense 7B model on an H100 as the preset `h100-qwen2.5-7b` has it, as a linear model with a small drafter."""
    terms: dict[str, float] = {
        "base_s": 6e-3, "per_request_s": 1.5e-5, "per_token_s": 1.2e-5, "per_context_s": 1.9e-8, "sd_base_s": 8e-4,
        "sd_idle_s": 1e-4, "draft_level_s": 4.5e-4, "draft_level_per_request_s": 1e-6, "prefill_per_token_s": 2e-5,
    }  # fmt: skip
    return LinearCosts.model_validate({**terms, **changes, "noise": NOISE})


def _regime(
    name: str,
    trace: Trace,
    phases: Sequence[tuple[CostModel, Acceptance]],
    about: str,
    *,
    file_costs: CostModel | None = None,
    drafters: tuple[str, ...] = ("learned",),
) -> PolicyRegime:
    steps = sorted(set(trace.outcomes["rl_step"].tolist()))
    parts = [part.tolist() for part in np.array_split(steps, len(phases)) if len(part)]
    scenarios = tuple(
        Scenario.of(trace, mode="sampled", costs=costs, acceptance=acceptance, rl_steps=part)
        for part, (costs, acceptance) in zip(parts, phases, strict=False)
    )
    return PolicyRegime(
        name=name, phases=scenarios, drafters=drafters, file_costs=file_costs or phases[0][0], about=about
    )


_Make = Callable[[int], PolicyRegime]
_GOOD, _FAIR, _POOR = (0.85, 0.8), (0.7, 0.65), (0.1, 0.1)


def _steady(name: str, about: str, costs: CostModel, chances: tuple[float, float] = _FAIR, **lengths: float) -> _Make:
    return lambda n: _regime(name, _lengths(n, **lengths), [(costs, _drafters(learned=chances))], about)  # type: ignore[arg-type]


def _drifts(name: str, about: str, first: float, last: float) -> _Make:
    def make(rl_steps: int) -> PolicyRegime:
        chances = np.linspace(first, last, rl_steps)
        phases = [(_gpu(), _drafters(learned=(chance, chance - 0.03))) for chance in chances.tolist()]
        return _regime(name, _lengths(rl_steps), phases, about)

    return make


def _slows_down(rl_steps: int) -> PolicyRegime:
    slow = _gpu(per_request_s=4e-5, per_token_s=1e-4, draft_level_s=1.2e-3, base_s=8e-3)
    acceptance = _drafters(learned=_GOOD)
    about = "from the middle on compute takes 8 times, memory 1.3 times as long"
    return _regime("machine slows down", _lengths(rl_steps), [(_gpu(), acceptance), (slow, acceptance)], about)


def _wrong_costs(speculative: float, name: str) -> _Make:
    def make(rl_steps: int) -> PolicyRegime:
        costs = ScaledCosts.wrapping(_gpu(), speculative=speculative)
        about = f"speculation takes {speculative:g} times what the cost file says"
        return _regime(name, _lengths(rl_steps), [(costs, _drafters(learned=_FAIR))], about, file_costs=_gpu())

    return make


def _two_drafters(rl_steps: int) -> PolicyRegime:
    acceptance = _drafters(learned=(0.7, 0.55), suffix=(0.5, 0.9))
    about = "one keeps the first token more often, the other long runs"
    return _regime("two drafters", _lengths(rl_steps), [(_gpu(), acceptance)], about, drafters=("learned", "suffix"))


def _preset(rl_steps: int) -> PolicyRegime:
    costs = load_costs("h100-qwen2.5-32b-tp4").model_copy(update={"noise": NOISE, "switch_s": 0.0})
    return _regime(
        "32B on 4 H100", _lengths(rl_steps), [(costs, load_acceptance("geometric:0.7"))], "roofline costs, not linear"
    )


_GENERATED: tuple[_Make, ...] = (
    _steady("generated", "log-normal lengths", _gpu()),
    _steady("heavy tail", "log-normal lengths with sigma 1.7", _gpu(), sigma=1.7, median=200.0),
    _steady("cap mass", "half of the responses are cut", _gpu(), median=2500.0, cap=2500),
    _steady("context to 128K", "prompts of 60,000 to 128,000 tokens", _gpu(), prompt=90_000.0, median=300.0),
    _steady("MoE", "flat in the batch, each verified token loads experts", _gpu(
        per_request_s=1e-6, per_token_s=2.5e-4, far_token_s=2e-6), chances=_GOOD),
    _steady("useless drafter", "a tenth of the tokens is kept", _gpu(), chances=_POOR),
    _steady("wide batch", "up to 128 requests a worker", _gpu(per_token_s=6e-5), group=16, median=300.0),
    _preset,
    _two_drafters,
    _drifts("drafter improves", "tokens kept rise from 20 to 85 % over the RL steps", 0.2, 0.85),
    _drifts("drafter goes stale", "tokens kept fall from 85 to 20 %", 0.85, 0.2),
    _slows_down,
    _wrong_costs(1.3, "costs wrong, dearer"),
    _wrong_costs(0.7, "costs wrong, cheaper"),
)  # fmt: skip


def best_fixed(regime: PolicyRegime, seeds: Sequence[int]) -> tuple[Strategy, Mapping[int, Floats]]:
    """The strategy that takes least time when it is used throughout, known only in hindsight, and its seconds."""
    seconds = {s: {seed: regime.seconds(load_policy(s), seed) for seed in seeds} for s in regime.strategies}
    best = min(seconds, key=lambda strategy: sum(float(row.sum()) for row in seconds[strategy].values()))
    return best, seconds[best]
