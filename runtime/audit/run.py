"""An audit from start to end: models are made, engines started one by one, every case judged, a report written."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import field, replace
from itertools import combinations, groupby, product
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.torch import load_file
from scipy.optimize import brentq
from scipy.stats import chi2, ncx2, power_divergence

from tltlab.arrays import Array, Floats, Ints
from tltlab.console import table
from tltlab.drafters.base import Key
from tltlab.drafters.specs import DEFAULT_DRAFTERS, DrafterSpec, HybridSpec, LearnedSpec
from tltlab.errors import ConfigError, RunError
from tltlab.policies.policy import AcceptanceBudgetSpec, Policy, load_policy
from tltlab.policies.specs import ExploreSpec, FixedSpec
from tltlab.records import Fields, Json, frozen
from tltlab.runtime.engine.engine import Engine
from tltlab.runtime.engine.generation import GenerationRequest
from tltlab.runtime.engine.vllm import on_cpu
from tltlab.runtime.models.measure import sample
from tltlab.stats import finite
from tltlab.strategy import NO_SPECULATION, Strategy

from .exact import ExactModel, Sampling, probabilities
from .models import MAX_POSITIONS, TinyModels, make_tiny_models

MAX_DEPTH = 8
"""The deepest draft of the default cases, for which their engines are built."""

RESPONSE_TOKENS = 12
_UPDATE_AFTER = 3
"""Iterations after which a weight update arrives in a running batch: prompts are through, few responses have ended."""

# Every pair of letters occurs, so n-grams have a continuation for any first token.
_ALL_PAIRS = [0, 0, 1, 0, 2, 0, 3, 1, 1, 2, 1, 3, 2, 2, 3, 3]
PROMPTS = tuple(tuple(_ALL_PAIRS[i:] + _ALL_PAIRS[: i + 1]) for i in (0, 7))

COMPOSITIONS = {
    "batch": "as many equal requests at once as the engine runs",
    "alone": "one request at a time",
    "mixed": "one batch of different prompts, temperatures, filters and lengths",
    "queue": "four times as many requests as the engine runs at once",
    "budgets": "fewer drafts than requests, shared out again in every iteration",
    "switching": "another drafter or depth, or none, in every iteration",
    "updates": "the target's weights change between rollouts",
    "updates while running": "the target's weights change while requests run, which keep their keys and values",
}

DEPTHS = (1, 2, 4, 8)
TEMPERATURES = (0.6, 0.9, 1.0, 1.3)
FILTERS = ((1.0, 0), (0.9, 0), (1.0, 3), (0.9, 4))
"""(top_p, top_k)."""

JOINT_TOKENS = 4
LEAST_DRAFTS = 30
"""A case with fewer accepted draft tokens, or fewer rejected ones, has tested nothing."""
LOGPROB_TOLERANCE = 5e-5

LEAST_EXPECTED = 5.0
"""Cells that expect fewer samples are pooled: below about five the chi-square approximation is poor."""
POWER = 0.9


@frozen
class EnginePlan:
    """One engine to start and the cases to run on it."""

    cases: list[tuple[AuditCase, Policy]]
    drafters: Mapping[str, DrafterSpec]
    max_depth: int = MAX_DEPTH
    vllm_args: Fields = field(default_factory=dict)


def run_audit(
    *,
    fast: bool,
    drafters: Sequence[str],
    policy: str | None,
    vllm_args: Fields,
    num_samples: int,
    false_alarm_rate: float,
    seed: int,
    progress: Callable[[str], None],
) -> Json:
    """Run the audit and return the report; ConfigError for engines that cannot be audited.

    `drafters` restricts the default cases to some of them; a `policy` replaces them.
    """
    started = time.perf_counter()
    # Policies speculate on small batches; the shipped ones begin at 32.
    args = settings(vllm_args if policy is None else {"max_num_seqs": 32, **vllm_args})
    with tempfile.TemporaryDirectory() as folder:
        models = make_tiny_models(Path(folder))
        if drafters and policy is not None:
            raise ConfigError("--drafter picks from the default cases, which --policy replaces")
        if policy is not None:
            plans = [policy_plan(policy, models, args)]
        else:
            plans = default_plans(drafters, models, args, fast=fast)
        num_cases = sum(len(plan.cases) for plan in plans)
        # Bonferroni: a sound engine fails any of the checks at `false_alarm_rate`.
        num_checks = 2 * sum(case.composition != "greedy" for plan in plans for case, _ in plan.cases)
        level = false_alarm_rate / max(num_checks, 1)
        rows: list[Json] = []
        for plan in plans:
            engine = Engine(
                str(models.target),
                drafters=plan.drafters,
                max_draft_depth=plan.max_depth,
                seed=seed,
                vllm_args=plan.vllm_args,
            )
            with closing(engine):
                batch = plan.vllm_args["max_num_seqs"]
                auditor = Auditor(engine, models, batch=batch, num_samples=num_samples, level=level, seed=seed)
                for row in run_plan(plan, auditor):
                    rows.append(row)
                    progress(f"{len(rows)}/{num_cases} {row['case']}: {row['verdict']}")
    return {
        "passed": all(row["passed"] for row in rows),
        "false_alarm_rate": false_alarm_rate,
        "seconds": time.perf_counter() - started,
        "cases": rows,
    }


def run_plan(plan: EnginePlan, auditor: Auditor) -> Iterator[Json]:
    """Yield rows of the plan's cases. A case in which the engine fails has failed; later ones are not tested."""
    died = None
    for case, policy in plan.cases:
        try:
            yield auditor.run(case, policy) if died is None else unsampled_row(case, "not tested", died)
        except RunError as error:
            died = f"the engine failed in {case}"
            yield unsampled_row(case, "failed", f"the engine failed: {error}")


def default_plans(drafters: Sequence[str], models: TinyModels, args: Fields, *, fast: bool) -> list[EnginePlan]:
    """Return a plan for each engine that the default cases need."""
    unknown = [name for name in drafters if name not in DRAFTERS]
    if unknown:
        raise ConfigError(f"no drafter named {unknown[0]!r} to audit; there are: {', '.join(DRAFTERS)}")
    chosen = cases(list(drafters) or list(DRAFTERS), fast=fast)
    sampled_drafts = {
        "method": "draft_model",
        "model": str(models.draft_model),
        "num_speculative_tokens": MAX_DEPTH,
        "draft_sample_method": "probabilistic",
    }
    plans = []
    for _, same_engine in groupby(chosen, key=lambda case: replace(DRAFTERS[case.drafter], name="")):
        group = [(case, policy_of(case, DRAFTERS[case.drafter], args["max_num_seqs"])) for case in same_engine]
        drafting = DRAFTERS[group[0][0].drafter]
        more = {"speculative_config": sampled_drafts} if drafting.probabilistic else {}
        plans.append(EnginePlan(cases=group, drafters=drafting.specs(models), vllm_args={**args, **more}))
    return plans


def policy_plan(source: str, models: TinyModels, args: Fields) -> EnginePlan:
    """Return the plan of an engine under a policy, which chooses drafter and depth itself."""
    policy = load_policy(source)
    depth = max((strategy.draft_depth for strategy in policy.strategies), default=0) or MAX_DEPTH
    pairs = [(case, policy) for case in policy_cases(Path(source).stem)]
    return EnginePlan(cases=pairs, drafters=tiny_drafters(policy, models), max_depth=depth, vllm_args=args)


def audit_text(report: Fields) -> str:
    """Return the report as a table."""
    rows = report["cases"]
    lines = [
        table(
            ("case", "samples", "drafted", "kept", "p joint", "p ranks", "finds TV"),
            (
                (
                    row["case"],
                    f"{row['sample_size']:,d}",
                    f"{row['num_drafted']:,d}",
                    f"{row['num_accepted'] / max(row['num_drafted'], 1):.0%}",
                    *(
                        "" if value is None else f"{value:.2g}"
                        for value in (row["p_value"], (row["ranks"] or {}).get("p_value"), row["detectable_tv"])
                    ),
                )
                for row in rows
            ),
        )
    ]
    bad = [row for row in rows if not row["passed"]]
    lines += [f"{row['verdict'].upper()}: {row['case']}: {row['reason']}" for row in bad]
    verdict = "no loss detected" if report["passed"] else f"{len(bad)} of {len(rows)} cases did not pass"
    lines.append(
        f"{verdict}; a sound engine fails at a rate of {report['false_alarm_rate']:g}; {report['seconds']:.0f} s"
    )
    return "\n".join(lines)


@frozen
class AuditRequest:
    """A request of the audit; with `updated` the updated weights answer it."""

    prompt: int
    sampling: Sampling
    max_tokens: int = RESPONSE_TOKENS
    updated: bool = False


@frozen
class SampledAnswer:
    """Tokens that the engine sampled; the first `num_before` by the old weights where they changed meanwhile."""

    request: AuditRequest
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    num_before: int | None = None


def settings(vllm_args: Fields) -> Json:
    """Return vLLM arguments of a small engine in full precision, like the reference; `vllm_args` override."""
    memory = {"kv_cache_memory_bytes": 64 << 20} if on_cpu() else {"gpu_memory_utilization": 0.1}
    return {"dtype": "float32", "max_model_len": MAX_POSITIONS, "max_num_seqs": 128, **memory, **vllm_args}


@frozen
class AuditCase:
    """One setting to audit. With `depth` 0 the policy chooses it."""

    drafter: str
    depth: int
    sampling: Sampling
    composition: str

    def __str__(self) -> str:
        s = self.sampling
        parts = [self.drafter, f"depth {self.depth}" if self.depth else "", f"T {s.temperature:g}"]
        parts += [f"top-p {s.top_p:g}" if s.top_p < 1 else "", f"top-k {s.top_k}" if s.top_k else "", self.composition]
        return ", ".join(filter(None, parts))


@frozen
class AuditedDrafter:
    """A drafter under audit, by its name in an engine with a head of `method`, which samples if `probabilistic`."""

    name: str
    method: Literal["eagle", "eagle3", "draft_model"] | None = None
    probabilistic: bool = False

    def specs(self, models: TinyModels) -> dict[str, DrafterSpec]:
        """Return the engine's drafters."""
        specs: dict[str, DrafterSpec] = dict(DEFAULT_DRAFTERS)
        if self.method:
            specs["learned"] = LearnedSpec(method=self.method, model=str(getattr(models, self.method)))
        if self.method and not self.probabilistic:
            specs["hybrid"] = HybridSpec(first="suffix", otherwise="learned", min_expected=0.5)
        return specs


DRAFTERS: dict[str, AuditedDrafter] = {
    "ngram": AuditedDrafter(name="ngram"),
    "suffix": AuditedDrafter(name="suffix"),
    "eagle": AuditedDrafter(name="learned", method="eagle"),
    "hybrid": AuditedDrafter(name="hybrid", method="eagle"),
    "eagle3": AuditedDrafter(name="learned", method="eagle3"),
    "draft_model": AuditedDrafter(name="learned", method="draft_model"),
    "draft_model-sampled": AuditedDrafter(name="learned", method="draft_model", probabilistic=True),
}
"""Drafters by their names in the audit. The last one samples its drafts; verification needs their probabilities."""


def cases(drafters: Sequence[str], *, fast: bool) -> list[AuditCase]:
    """Return the default audit: every pair of two factors' values occurs in some case; `fast`, every value does.

    Cases of one engine are adjacent.
    """
    sampled = _cases(drafters, DEPTHS, 1 if fast else 2)
    likeliest = [greedy(drafter, depth) for drafter, depth in product(drafters, (1, 8) if fast else DEPTHS)]
    return sorted(sampled + likeliest, key=lambda case: list(DRAFTERS).index(case.drafter))


def policy_cases(name: str) -> list[AuditCase]:
    """Return cases of a policy, which varies drafter and depth itself: each other value once."""
    by_the_policy = ("budgets", "switching")
    return [*(case for case in _cases([name], [0], 1) if case.composition not in by_the_policy), greedy(name, 0)]


def _cases(drafters: Sequence[str], depths: Sequence[int], strength: int) -> list[AuditCase]:
    return [
        AuditCase(drafter=d, depth=k, sampling=Sampling(temperature=t, top_p=f[0], top_k=f[1]), composition=c)
        for d, k, t, f, c in covering([drafters, depths, TEMPERATURES, FILTERS, list(COMPOSITIONS)], strength)
    ]


def greedy(drafter: str, depth: int) -> AuditCase:
    return AuditCase(drafter=drafter, depth=depth, sampling=Sampling(temperature=0.0), composition="greedy")


def covering(factors: Sequence[Sequence[Any]], strength: int) -> list[tuple[Any, ...]]:
    """Return few combinations of one value per factor that cover every `strength` values of different factors.

    >>> covering(["ab", "xyz"], 1)
    [('a', 'x'), ('b', 'y'), ('a', 'z')]
    """
    rows = list(product(*(range(len(values)) for values in factors)))
    pairs = {row: {tuple((f, row[f]) for f in at) for at in combinations(range(len(row)), strength)} for row in rows}
    missing = set().union(*pairs.values())
    used = [[0] * len(values) for values in factors]
    chosen = []
    while missing:
        # Most newly covered first; among equals the one with the least used values, so that all values are used.
        best = max(rows, key=lambda row: (len(pairs[row] & missing), -sum(used[f][v] for f, v in enumerate(row))))
        chosen.append(tuple(values[v] for values, v in zip(factors, best, strict=True)))
        missing -= pairs[best]
        for f, v in enumerate(best):
            used[f][v] += 1
    return chosen


def policy_of(case: AuditCase, drafting: AuditedDrafter, batch: int) -> Policy:
    """Return the policy of `case` on an engine with the drafters of `drafting`, at most `batch` requests running."""
    strategy = Strategy.chain(drafting.name, case.depth)
    if case.composition == "budgets":
        budget = AcceptanceBudgetSpec(min_tokens=0, max_draft_tokens=batch * 3 // 4)
        return Policy(selector=FixedSpec(strategy=strategy), budget=budget)
    if case.composition == "switching":
        second = next(name for name in DEFAULT_DRAFTERS if name != drafting.name)
        depths = sorted({case.depth, (case.depth + 1) // 2})
        arms = (*(Strategy.chain(drafting.name, d) for d in depths), Strategy.chain(second, case.depth), NO_SPECULATION)
        return Policy(selector=ExploreSpec(strategies=arms, hold_iterations=1))
    return Policy(selector=FixedSpec(strategy=strategy))


def tiny_drafters(policy: Policy, models: TinyModels) -> Mapping[str, DrafterSpec]:
    """Return the drafters that `policy` names, the learned one replaced by the audit's own of the same method."""
    specs: dict[str, DrafterSpec] = DEFAULT_DRAFTERS | policy.drafters
    for strategy in policy.strategies:
        if policy.registry.network_passes(strategy):
            specs.setdefault(strategy.drafter, LearnedSpec(method="eagle", model=str(models.eagle)))
    for name, spec in specs.items():
        if isinstance(spec, LearnedSpec):
            specs[name] = spec.model_copy(update={"model": str(getattr(models, spec.method))})
    return specs


class Auditor:
    """Audits an engine on the tiny target: `num_samples` responses a case, an eighth of them where that is slow.

    The engine runs at most `batch` requests at once. A correct one fails a check with a probability of `level`.
    `num_drafted` and `num_accepted` are the verified and accepted draft tokens of the case under way.
    """

    def __init__(self, engine: Engine, models: TinyModels, *, batch: int, num_samples: int, level: float, seed: int):
        self.engine, self.batch, self.num_samples, self.level = engine, batch, num_samples, level
        self._round = self.num_drafted = self.num_accepted = 0
        self.before, self.after = ExactModel(models.target), ExactModel(models.updated)
        self.weights = [load_file(folder / "model.safetensors") for folder in (models.target, models.updated)]
        self.history = [
            sample(self.before.model, [prompt] * 32, temperature=1.0, max_tokens=RESPONSE_TOKENS, seed=seed + number)
            for number, prompt in enumerate(PROMPTS)
        ]

    def run(self, case: AuditCase, policy: Policy) -> Json:
        """Sample `case` under `policy` and judge it; return one row of the report."""
        self.engine.set_policy(policy, (self._round,))
        self.engine.forget()
        self.num_drafted = self.num_accepted = 0
        for prompt, responses in enumerate(self.history):
            self._round += 1
            keys = ((self._round, f"p{prompt}", n, 0) for n in range(len(responses)))
            self.engine.remember((key, PROMPTS[prompt], each) for key, each in zip(keys, responses, strict=True))
        if case.composition == "greedy":
            return self._greedy(case)
        answers: list[SampledAnswer] = []
        for number, requests in enumerate(rounds(case, self.batch, self.num_samples)):
            if case.composition == "updates":
                self.update_weights(number % 2)
            elif case.composition == "updates while running":
                self.update_weights(0)
            answers += self.ask(requests, updates=case.composition == "updates while running")
        if case.composition.startswith("updates"):
            self.update_weights(0)
        ranks, logprob_error = self.ranks(answers)
        figures, reasons = {"ranks": self._figures(ranks)}, []
        # A token's probability there depends on the time of the weight change: no joint distribution is known.
        if case.composition != "updates while running":
            figures = {"cells": self._figures(self.cells(answers)), **figures}
        for name, subject in (("cells", f"the first {JOINT_TOKENS} tokens"), ("ranks", "the tokens' ranks")):
            if name in figures and not figures[name]["passed"]:
                reasons.append(f"{subject} are off: p = {figures[name]['p_value']:.1e}")
        if not logprob_error <= LOGPROB_TOLERANCE:
            reasons.append(f"log-probs are off by up to {logprob_error:.1e}")
        main = {name: value for name, value in figures.get("cells", figures["ranks"]).items() if name != "passed"}
        return self._row(case, reasons, **main, ranks=figures["ranks"], logprob_error=finite(logprob_error))

    def update_weights(self, version: int) -> None:
        """Sample from the target's weights from now on, or with 1 from the updated ones."""
        self._round += 1
        self.engine.update_weights(self.weights[version].items(), self._round)

    def ask(
        self, requests: Sequence[AuditRequest], *, ignore_eos: bool = False, updates: bool = False
    ) -> list[SampledAnswer]:
        """Answer all requests; with `updates` the updated weights arrive while they run."""
        self._round += 1
        num_before: dict[Key, int] = {}
        iterations = 0

        def until(ended: Sequence[Key]) -> bool:
            nonlocal iterations
            iterations += 1
            if updates and iterations == _UPDATE_AFTER:
                self.update_weights(1)
                # It waited for an iteration in flight.
                num_before.update({live.key: len(live.output) for live in self.engine.control.live.values()})
            return False

        rollout = self.engine.generate(
            [
                GenerationRequest(
                    key=(self._round, f"p{request.prompt}", number, 0),
                    prompt_token_ids=list(PROMPTS[request.prompt]),
                    max_response_tokens=request.max_tokens,
                    ignore_eos=ignore_eos,
                    temperature=request.sampling.temperature,
                    top_p=request.sampling.top_p,
                    top_k=request.sampling.top_k,
                )
                for number, request in enumerate(requests)
            ],
            rl_step=self._round,
            temperature=1.0,
            until=until,
        )
        self.num_drafted += sum(rollout.iterations["num_drafted"].to_pylist())
        self.num_accepted += sum(rollout.iterations["num_accepted"].to_pylist())
        return [
            SampledAnswer(
                request=a, tokens=tuple(r.token_ids), logprobs=tuple(r.logprobs), num_before=num_before.get(r.key)
            )
            for a, r in zip(requests, rollout.responses, strict=True)
        ]

    def _figures(self, check: ChiSquare) -> Json:
        return {
            # JSON has no infinity: null is an outcome of probability 0.
            "statistic": finite(check.statistic),
            "dof": check.dof,
            "threshold": check.threshold(self.level),
            "p_value": check.p_value,
            "sample_size": check.num_samples,
            "detectable_tv": check.detectable_tv(self.level),
            "passed": check.p_value >= self.level,
        }

    def cells(self, answers: Sequence[SampledAnswer]) -> ChiSquare:
        """Test the joint distribution of the responses' first tokens."""
        checks = []
        for request, stratum in strata(answers).items():
            joint = self._model(request).joint(PROMPTS[request.prompt], request.sampling, JOINT_TOKENS)
            counts: Counter[tuple[int, ...]] = Counter()
            for answer in stratum:
                prefixes = (answer.tokens[:n] for n in range(1, JOINT_TOKENS + 1))
                counts[next((prefix for prefix in prefixes if prefix in joint), answer.tokens)] += 1
            checks.append(cells_check(counts, joint))
        return combined(checks)

    def ranks(self, answers: Sequence[SampledAnswer]) -> tuple[ChiSquare, float]:
        """Test the frequencies of the tokens' ranks by likelihood; also return the worst error of a log-prob."""
        parts = [self._conditionals(request, stratum) for request, stratum in strata(answers).items()]
        p, tokens, logprobs, positions, sure = (np.concatenate(part) for part in zip(*parts, strict=True))
        exact = p[np.arange(len(p)), tokens]
        possible = sure & (exact > 0.0)
        error = np.abs(logprobs[possible] - np.log(exact[possible])).max(initial=0.0)
        order = np.argsort(-p, axis=1, kind="stable")
        ranks = np.argmax(order == tokens[:, None], axis=1)
        check = ranks_check(ranks[sure], np.take_along_axis(p, order, 1)[sure], positions[sure])
        return check, float(error)

    def _conditionals(self, request: AuditRequest, answers: Sequence[SampledAnswer]) -> tuple[Array, ...]:
        """Return per token of the answers: distribution [N, V], id, log-prob, position, True for a certain cut."""
        prompt, model = PROMPTS[request.prompt], self._model(request)
        tokens = []
        for row, answer in zip(model.logits(prompt, [answer.tokens for answer in answers]), answers, strict=True):
            num_tokens = len(answer.tokens)
            if answer.num_before is not None and answer.num_before < num_tokens:
                new = self.after.logits_after_update(self.before, prompt, answer.tokens, answer.num_before)
                row[answer.num_before : num_tokens] = new
            p, sure = probabilities(row[:num_tokens], request.sampling)
            tokens.append((p, answer.tokens, answer.logprobs, np.arange(num_tokens), sure))
        return tuple(np.concatenate(column) for column in zip(*tokens, strict=True))

    def _model(self, request: AuditRequest) -> ExactModel:
        return self.after if request.updated else self.before

    def _greedy(self, case: AuditCase) -> Json:
        """Test that every token is the exact model's likeliest, as plain decoding's are."""
        requests = [AuditRequest(prompt=n % 2, sampling=case.sampling, max_tokens=40 + n) for n in range(8)]
        wrong = 0
        for answer in self.ask(requests, ignore_eos=True):
            logits = self.before.logits(PROMPTS[answer.request.prompt], [answer.tokens])[0].numpy()
            gaps = logits.max(1) - logits[np.arange(len(logits)), list(answer.tokens)]
            wrong += bool((gaps > LOGPROB_TOLERANCE).any()) or len(answer.tokens) != answer.request.max_tokens
        reasons = [f"{wrong} of {len(requests)} responses are not plain decoding's"] if wrong else []
        return self._row(case, reasons, statistic=float(wrong), sample_size=len(requests))

    def _row(self, case: AuditCase, reasons: Sequence[str], **figures: Any) -> Json:
        """Return the row of a sampled case. A case with too few drafts is not tested, which is no pass."""
        drafted, accepted = self.num_drafted, self.num_accepted
        tested = accepted > 0 if case.composition == "greedy" else min(accepted, drafted - accepted) >= LEAST_DRAFTS
        if reasons or tested:
            verdict, reason = ("failed" if reasons else "passed"), "; ".join(reasons) or None
        else:
            verdict = "not tested"
            reason = f"{drafted} tokens drafted and {accepted} accepted: too few for a test"
        return unsampled_row(case, verdict, reason) | {"num_drafted": drafted, "num_accepted": accepted, **figures}


def strata(answers: Sequence[SampledAnswer]) -> dict[AuditRequest, list[SampledAnswer]]:
    """Group answers to the same prompt with the same sampling by the same weights, of any length."""
    groups: dict[AuditRequest, list[SampledAnswer]] = {}
    for answer in answers:
        groups.setdefault(replace(answer.request, max_tokens=RESPONSE_TOKENS), []).append(answer)
    return groups


def unsampled_row(case: AuditCase, verdict: str, reason: str | None) -> Json:
    """Return the row of a case without samples."""
    return {
        "case": str(case),
        "drafter": case.drafter,
        "depth": case.depth or None,
        "temperature": case.sampling.temperature,
        "top_p": case.sampling.top_p,
        "top_k": case.sampling.top_k,
        "composition": case.composition,
        "passed": verdict == "passed",
        "verdict": verdict,
        "reason": reason,
        "num_drafted": 0,
        "num_accepted": 0,
        **dict.fromkeys(("statistic", "dof", "threshold", "p_value", "detectable_tv", "ranks", "logprob_error")),
        "sample_size": 0,
    }


def rounds(case: AuditCase, batch: int, num_samples: int) -> list[list[AuditRequest]]:
    """Return the requests of `case`, round by round; `batch` is the engine's largest batch."""
    sampling = case.sampling
    if case.composition == "alone":
        return [[AuditRequest(prompt=n % 2, sampling=sampling)] for n in range(max(num_samples // 8, 256))]
    if case.composition == "mixed":
        samplings = [Sampling(temperature=t) for t in TEMPERATURES if t != sampling.temperature][:2]
        samplings += [sampling, Sampling(temperature=sampling.temperature, top_p=0.8)]
        mix = [
            AuditRequest(prompt=n % 2, sampling=samplings[n // 2 % 4], max_tokens=JOINT_TOKENS + n % 13)
            for n in range(batch)
        ]
        return [mix] * max(num_samples // batch, 1)
    at_once = 4 * batch if case.composition == "queue" else batch
    num = num_samples // 8 if case.composition == "updates while running" else num_samples
    return [
        [
            AuditRequest(prompt=n % 2, sampling=sampling, updated=case.composition == "updates" and bool(number % 2))
            for n in range(at_once)
        ]
        for number in range(max(num // at_once, 1))
    ]


@frozen
class ChiSquare:
    """A statistic that is chi-square with `dof` where the samples follow their distribution.

    The statistic is infinite where an impossible outcome occurred. `num_samples` is the denominator of frequencies.
    """

    statistic: float
    dof: int
    num_samples: int

    @property
    def p_value(self) -> float:
        return float(chi2.sf(self.statistic, self.dof)) if self.dof else float(np.isfinite(self.statistic))

    def threshold(self, false_alarm_rate: float) -> float:
        """Return the statistic that a correct engine exceeds at this rate."""
        return float(chi2.isf(false_alarm_rate, self.dof)) if self.dof else 0.0

    def detectable_tv(self, false_alarm_rate: float) -> float:
        """Return the least total-variation distance that the test detects with power 0.9, in any form.

        The noncentrality is n * sum (q - p)^2 / p, and at a distance d = sum |q - p| / 2 it is at least 4 n d^2 (the
        worst case moves d from one half of the probability to the other). The distance is that of the pooled cells.
        """
        if not self.dof:
            return 1.0
        threshold = self.threshold(false_alarm_rate)
        needed = brentq(lambda nc: ncx2.sf(threshold, self.dof, nc) - POWER, 1e-6, 10 * threshold + 1e3)
        return min(1.0, float(np.sqrt(needed / (4 * self.num_samples))))


def combined(checks: Sequence[ChiSquare]) -> ChiSquare:
    """Combine checks of independent parts."""
    return ChiSquare(
        statistic=sum(check.statistic for check in checks),
        dof=sum(check.dof for check in checks),
        num_samples=sum(check.num_samples for check in checks),
    )


def cells_check(observed: Mapping[tuple[int, ...], int], joint: Mapping[tuple[int, ...], float]) -> ChiSquare:
    """Test counts of whole outcomes against `joint`, their exact probabilities, which sum to 1.

    The statistic is Cressie and Read's (1984) with lambda 2/3: at 1e-5 its tail agrees with chi-square, while Pearson's
    is exceeded two to three times too often.

    >>> cells_check({(0,): 60, (1,): 40}, {(0,): 0.5, (1,): 0.5}).dof
    1
    """
    num = sum(observed.values())
    if any(joint.get(cell, 0.0) <= 0.0 for cell in observed):
        return ChiSquare(statistic=float("inf"), dof=max(len(joint) - 1, 1), num_samples=num)
    cells = [cell for cell, p in joint.items() if p > 0.0]
    expected_counts = num * np.array([joint[cell] for cell in cells])
    groups = pooled(expected_counts)
    expected = np.bincount(groups, expected_counts)
    counts = np.bincount(groups, [observed.get(cell, 0) for cell in cells])
    statistic = power_divergence(counts, expected, lambda_="cressie-read").statistic
    return ChiSquare(statistic=float(statistic), dof=len(expected) - 1, num_samples=num)


def pooled(expected: Floats) -> Ints:
    """Return the group of each cell [K]: cells expecting fewer than 5 are one group, with the next rarest if needed.

    >>> pooled(np.array([50.0, 3.0, 2.0, 1.0]))
    array([1, 0, 0, 0])
    """
    order = np.argsort(expected, kind="stable")
    common = np.cumsum(expected[order]) >= LEAST_EXPECTED
    first = int(np.argmax(common)) if common.any() else len(order) - 1
    rare = int(np.searchsorted(expected[order], LEAST_EXPECTED))
    groups = np.maximum(np.arange(len(order)) - max(first, rare - 1), 0) if rare else np.arange(len(order))
    by_cell = np.empty(len(order), np.int64)
    by_cell[order] = groups
    return by_cell


def ranks_check(ranks: Ints, probabilities: Floats, positions: Ints) -> ChiSquare:
    """Test the frequencies of the tokens' ranks against the exact conditionals, position by position.

    For each token: its rank in its own conditional distribution (0 the likeliest) [N], that distribution from the
    likeliest down [N, V], and its position in the response [N]. At a position the excess of each rank over its
    expectation is a sum of martingale differences, so Rao's score statistic r' C^-1 r, with C the sum of the
    conditionals' covariances, is chi-square. A wrong temperature, a draft accepted too easily or a logit row of the
    wrong token all make ranks too frequent or too rare, at any depth in a draft.
    """
    tokens, num_ranks = probabilities.shape
    if (probabilities[np.arange(tokens), ranks] <= 0.0).any():
        return ChiSquare(statistic=float("inf"), dof=num_ranks - 1, num_samples=tokens)
    checks = []
    for position in np.unique(positions):
        at = positions == position
        p = probabilities[at]
        groups = pooled(p.sum(0))
        if groups.max() == 0:
            continue
        merge = np.eye(groups.max() + 1)[groups]
        p = p @ merge
        excess = (np.bincount(groups[ranks[at]], minlength=p.shape[1]) - p.sum(0))[1:]
        covariance = (np.diag(p.sum(0)) - p.T @ p)[1:, 1:]
        statistic = float(excess @ np.linalg.solve(covariance, excess))
        checks.append(ChiSquare(statistic=statistic, dof=len(excess), num_samples=len(p)))
    return combined(checks)
