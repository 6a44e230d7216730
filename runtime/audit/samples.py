"""Is an engine's speculative decoding lossless? Sample it, and hold the samples against the exact distribution."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from safetensors.torch import load_file

from tltlab.arrays import Array, Flags, Floats
from tltlab.policies.policy import Policy

from .cases import TEMPERATURES, Case
from .exact import ExactModel, Sampling, probabilities
from .models import TinyModels
from .statistics import Check, cells_check, ranks_check, together

JOINT_TOKENS = 4
RESPONSE_TOKENS = 12
LEAST_DRAFTS = 30
"""A case with fewer drafted tokens accepted, or fewer not accepted, has tested nothing."""
LOGPROB_TOLERANCE = 5e-5

# Every pair of letters occurs, so whatever token comes first, n-grams know how it may go on.
_ALL_PAIRS = [0, 0, 1, 0, 2, 0, 3, 1, 1, 2, 1, 3, 2, 2, 3, 3]
PROMPTS = tuple(tuple(_ALL_PAIRS[i:] + _ALL_PAIRS[: i + 1]) for i in (0, 7))


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request of the audit; `updated` says which weights are to answer it."""

    prompt: int
    sampling: Sampling
    max_tokens: int = RESPONSE_TOKENS
    updated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the engine sampled; the first `num_before` tokens by the old weights where they changed meanwhile."""

    asked: Asked
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    num_before: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """A round's answers, and how many drafted tokens were verified and kept on the way."""

    answers: list[Answer]
    num_drafted: int
    num_accepted: int


class Audited(Protocol):
    """What an audit needs of an engine: see `audit_engine.AuditedEngine`."""

    max_num_seqs: int

    def prepare(self, policy: Policy) -> None: ...
    def remember(self, prompt: int, responses: Sequence[Sequence[int]]) -> None: ...
    def update_weights(self, weights: Mapping[str, torch.Tensor]) -> None: ...
    def ask(
        self, requests: Sequence[Asked], *, ignore_eos: bool = False, update: Callable[[], None] | None = None
    ) -> Answers: ...


class Auditor:
    """Audits engines of one set of models: `num_samples` responses a case, an eighth of them where that is slow.

    A sound engine fails any of `num_checks` checks with a probability of `false_alarm_rate` (Bonferroni).
    """

    def __init__(
        self, models: TinyModels, *, num_samples: int, num_checks: int, false_alarm_rate: float, seed: int
    ) -> None:
        self.num_samples = num_samples
        self.level = false_alarm_rate / max(num_checks, 1)
        self.before, self.after = ExactModel(models.target), ExactModel(models.updated)
        self.weights = [load_file(folder / "model.safetensors") for folder in (models.target, models.updated)]
        rng = np.random.default_rng(seed)
        everything = Sampling(temperature=1.0)
        self.history = [self.before.sample(prompt, everything, 32, RESPONSE_TOKENS, rng) for prompt in PROMPTS]

    def run(self, case: Case, engine: Audited, policy: Policy) -> dict[str, Any]:
        """Sample `case` and judge it: one row of the report."""
        engine.prepare(policy)
        for prompt, responses in enumerate(self.history):
            engine.remember(prompt, responses)
        if case.composition == "greedy":
            return self._greedy(case, engine)
        drafted = accepted = 0
        answers: list[Answer] = []
        for number, requests in enumerate(rounds(case, engine.max_num_seqs, self.num_samples)):
            update = None
            if case.composition == "updates":
                engine.update_weights(self.weights[number % 2])
            elif case.composition == "updates while running":
                engine.update_weights(self.weights[0])
                update = lambda: engine.update_weights(self.weights[1])  # noqa: E731
            answered = engine.ask(requests, update=update)
            answers += answered.answers
            drafted += answered.num_drafted
            accepted += answered.num_accepted
        if case.composition.startswith("updates"):
            engine.update_weights(self.weights[0])
        return self._judged(case, answers, drafted, accepted)

    def _judged(self, case: Case, answers: list[Answer], drafted: int, accepted: int) -> dict[str, Any]:
        checks = {"cells": self.cells(answers)} if case.composition != "updates while running" else {}
        checks["ranks"], logprob_error = self.ranks(answers)
        found = {name: self._check(check) for name, check in checks.items()}
        reasons = [
            f"{WHAT[name]} are off: p = {row['p_value']:.1e}" for name, row in found.items() if not row["passed"]
        ]
        if not logprob_error <= LOGPROB_TOLERANCE:
            reasons.append(f"log-probs are off by up to {logprob_error:.1e}")
        row = row_of(case, drafted, accepted, reasons)
        main = dict(found.get("cells", found["ranks"]))
        main.pop("passed")
        return (
            row
            | main
            | {"ranks": found["ranks"], "logprob_error": logprob_error if np.isfinite(logprob_error) else None}
        )

    def _check(self, check: Check) -> dict[str, Any]:
        return {
            # JSON knows no infinity: null is an outcome that has probability 0.
            "statistic": check.statistic if np.isfinite(check.statistic) else None,
            "dof": check.dof,
            "threshold": check.threshold(self.level),
            "p_value": check.p_value,
            "sample_size": check.num_samples,
            "detectable_tv": check.detectable_tv(self.level),
            "passed": check.p_value >= self.level,
        }

    def cells(self, answers: Sequence[Answer]) -> Check:
        """Whether the first tokens of the responses are jointly distributed as they should be."""
        counts: dict[tuple[int, Sampling, bool], Counter[tuple[int, ...]]] = {}
        joints: dict[tuple[int, Sampling, bool], dict[tuple[int, ...], float]] = {}
        for answer in answers:
            asked = answer.asked
            stratum = asked.prompt, asked.sampling, asked.updated
            if stratum not in joints:
                model = self.after if asked.updated else self.before
                joints[stratum] = model.joint(PROMPTS[asked.prompt], asked.sampling, JOINT_TOKENS)
                counts[stratum] = Counter()
            prefixes = (answer.tokens[:n] for n in range(1, JOINT_TOKENS + 1))
            cell = next((prefix for prefix in prefixes if prefix in joints[stratum]), answer.tokens)
            counts[stratum][cell] += 1
        return together([cells_check(counts[stratum], joint) for stratum, joint in joints.items()])

    def ranks(self, answers: Sequence[Answer]) -> tuple[Check, float]:
        """Whether tokens are as often the likeliest, the second, ... as they should be; worst error of a log-prob."""
        strata: dict[tuple[int, Sampling, bool], list[Answer]] = {}
        for answer in answers:
            strata.setdefault((answer.asked.prompt, answer.asked.sampling, answer.asked.updated), []).append(answer)
        parts = [self._conditionals(asked[1], found) for asked, found in strata.items()]
        p, tokens, logprobs, positions, sure = (np.concatenate(part) for part in zip(*parts, strict=True))
        given = p[np.arange(len(p)), tokens]
        possible = sure & (given > 0.0)
        error = np.abs(logprobs[possible] - np.log(given[possible])).max(initial=0.0)
        order = np.argsort(-p, axis=1, kind="stable")
        ranks = np.argmax(order == tokens[:, None], axis=1)
        check = ranks_check(ranks[sure], np.take_along_axis(p, order, 1)[sure], positions[sure])
        return check, float(error)

    def _conditionals(self, sampling: Sampling, answers: Sequence[Answer]) -> tuple[Array, ...]:
        """Per token of the answers: its distribution [N, V], itself, its log-prob, its position, whether it is sure."""
        prompt = PROMPTS[answers[0].asked.prompt]
        model = self.after if answers[0].asked.updated else self.before
        found: list[tuple[Floats, Flags]] = []
        logits = model.logits(prompt, [answer.tokens for answer in answers])
        for row, answer in zip(logits, answers, strict=True):
            if answer.num_before is not None and answer.num_before < len(answer.tokens):
                new = self.after.logits_after_update(self.before, prompt, answer.tokens, answer.num_before)
                row[answer.num_before : len(answer.tokens)] = new
            found.append(probabilities(row[: len(answer.tokens)], sampling))
        return (
            np.concatenate([p for p, _ in found]),
            np.concatenate([answer.tokens for answer in answers]),
            np.concatenate([answer.logprobs for answer in answers]),
            np.concatenate([np.arange(len(answer.tokens)) for answer in answers]),
            np.concatenate([sure for _, sure in found]),
        )

    def _greedy(self, case: Case, engine: Audited) -> dict[str, Any]:
        """Whether every token is the exact model's likeliest, as plain decoding's are."""
        asked = [Asked(prompt=n % 2, sampling=case.sampling, max_tokens=40 + n) for n in range(8)]
        answered = engine.ask(asked, ignore_eos=True)
        wrong = 0
        for answer in answered.answers:
            logits = self.before.logits(PROMPTS[answer.asked.prompt], [answer.tokens])[0].numpy()
            gaps = logits.max(1) - logits[np.arange(len(logits)), list(answer.tokens)]
            wrong += bool((gaps > LOGPROB_TOLERANCE).any()) or len(answer.tokens) != answer.asked.max_tokens
        reasons = [f"{wrong} of {len(asked)} responses are not plain decoding's"] if wrong else []
        row = row_of(case, answered.num_drafted, answered.num_accepted, reasons)
        return row | dict.fromkeys(MEASURED) | {"statistic": float(wrong), "sample_size": len(asked)}


MEASURED = ("statistic", "dof", "threshold", "p_value", "sample_size", "detectable_tv", "ranks", "logprob_error")
WHAT = {"cells": f"the first {JOINT_TOKENS} tokens", "ranks": "the tokens' ranks"}


def row_of(case: Case, drafted: int, accepted: int, reasons: Sequence[str]) -> dict[str, Any]:
    """The part of a row that every sampled case has. What drafted too little is not tested, which is no pass."""
    tested = accepted > 0 if case.composition == "greedy" else min(accepted, drafted - accepted) >= LEAST_DRAFTS
    if reasons or tested:
        verdict, reason = ("failed" if reasons else "passed"), "; ".join(reasons) or None
    else:
        verdict = "not tested"
        reason = f"{drafted} tokens drafted and {accepted} accepted: too few to tell anything"
    return _described(case, verdict, reason) | {"num_drafted": drafted, "num_accepted": accepted}


def unsampled(case: Case, verdict: str, reason: str) -> dict[str, Any]:
    """The row of a case without samples."""
    return (
        _described(case, verdict, reason)
        | dict.fromkeys(MEASURED)
        | {"num_drafted": 0, "num_accepted": 0, "sample_size": 0}
    )


def _described(case: Case, verdict: str, reason: str | None) -> dict[str, Any]:
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
    }


def rounds(case: Case, batch: int, num_samples: int) -> list[list[Asked]]:
    """The requests of `case`, round by round; `batch` is what the engine runs at once."""
    sampling = case.sampling
    if case.composition == "alone":
        return [[Asked(prompt=n % 2, sampling=sampling)] for n in range(max(num_samples // 8, 256))]
    if case.composition == "mixed":
        samplings = [Sampling(temperature=t) for t in TEMPERATURES if t != sampling.temperature][:2]
        samplings += [sampling, Sampling(temperature=sampling.temperature, top_p=0.8)]
        row = [
            Asked(prompt=n % 2, sampling=samplings[n // 2 % 4], max_tokens=JOINT_TOKENS + n % 13) for n in range(batch)
        ]
        return [row] * max(num_samples // batch, 1)
    at_once = 4 * batch if case.composition == "queue" else batch
    num = num_samples // 8 if case.composition == "updates while running" else num_samples
    return [
        [
            Asked(prompt=n % 2, sampling=sampling, updated=case.composition == "updates" and bool(number % 2))
            for n in range(at_once)
        ]
        for number in range(max(num // at_once, 1))
    ]
