"""Judgement of an engine's speculative decoding: samples are compared with the exact distribution."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from safetensors.torch import load_file
from scipy.optimize import brentq
from scipy.stats import chi2, ncx2

from tltlab.arrays import Array, Floats, Ints
from tltlab.policies.policy import Policy
from tltlab.runtime.models.measure import sample
from tltlab.stats import finite

from .cases import TEMPERATURES, AuditCase
from .engine import PROMPTS, RESPONSE_TOKENS, Answer, Answers, AuditedEngine, AuditRequest
from .exact import ExactModel, Sampling, probabilities
from .models import TinyModels

JOINT_TOKENS = 4
LEAST_DRAFTS = 30
"""A case with fewer accepted draft tokens, or fewer rejected ones, has tested nothing."""
LOGPROB_TOLERANCE = 5e-5

LEAST_EXPECTED = 5.0
"""Cells that expect fewer samples are pooled: below about five the chi-square approximation is poor."""
POWER = 0.9

_CRESSIE_READ = 2 / 3


class Auditor:
    """Audits engines of one set of models: `num_samples` responses a case, an eighth of them where that is slow.

    A correct engine fails any of `num_checks` checks with a probability of `false_alarm_rate` (Bonferroni).
    """

    def __init__(
        self, models: TinyModels, *, num_samples: int, num_checks: int, false_alarm_rate: float, seed: int
    ) -> None:
        self.num_samples = num_samples
        self.level = false_alarm_rate / max(num_checks, 1)
        self.before, self.after = ExactModel(models.target), ExactModel(models.updated)
        self.weights = [load_file(folder / "model.safetensors") for folder in (models.target, models.updated)]
        drawn = [
            sample(self.before.model, [prompt] * 32, temperature=1.0, max_tokens=RESPONSE_TOKENS, seed=seed + number)
            for number, prompt in enumerate(PROMPTS)
        ]
        self.history = [[response.token_ids for response in responses] for responses in drawn]

    def run(self, case: AuditCase, engine: AuditedEngine, policy: Policy) -> dict[str, Any]:
        """Sample `case` and judge it; return one row of the report."""
        engine.prepare(policy)
        for prompt, responses in enumerate(self.history):
            engine.remember(prompt, responses)
        if case.composition == "greedy":
            return self._greedy(case, engine)
        rounds_answered: list[Answers] = []
        for number, requests in enumerate(rounds(case, engine.max_num_seqs, self.num_samples)):
            update = None
            if case.composition == "updates":
                engine.update_weights(self.weights[number % 2])
            elif case.composition == "updates while running":
                engine.update_weights(self.weights[0])
                update = lambda: engine.update_weights(self.weights[1])  # noqa: E731
            rounds_answered.append(engine.ask(requests, update=update))
        if case.composition.startswith("updates"):
            engine.update_weights(self.weights[0])
        total = Answers(
            answers=[answer for each in rounds_answered for answer in each.answers],
            num_drafted=sum(each.num_drafted for each in rounds_answered),
            num_accepted=sum(each.num_accepted for each in rounds_answered),
        )
        return self._judged(case, total)

    def _judged(self, case: AuditCase, sampled: Answers) -> dict[str, Any]:
        ranks, logprob_error = self.ranks(sampled.answers)
        figures, reasons = {"ranks": self._figures(ranks)}, []
        # A token's probability there depends on the time of the weight change: no joint distribution is known.
        if case.composition != "updates while running":
            figures = {"cells": self._figures(self.cells(sampled.answers)), **figures}
        for name, subject in (("cells", f"the first {JOINT_TOKENS} tokens"), ("ranks", "the tokens' ranks")):
            if name in figures and not figures[name]["passed"]:
                reasons.append(f"{subject} are off: p = {figures[name]['p_value']:.1e}")
        if not logprob_error <= LOGPROB_TOLERANCE:
            reasons.append(f"log-probs are off by up to {logprob_error:.1e}")
        row = sampled_row(case, sampled, reasons)
        main = figures.get("cells", figures["ranks"])
        row |= {name: value for name, value in main.items() if name != "passed"}
        return row | {"ranks": figures["ranks"], "logprob_error": finite(logprob_error)}

    def _figures(self, check: ChiSquare) -> dict[str, Any]:
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

    def cells(self, answers: Sequence[Answer]) -> ChiSquare:
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

    def ranks(self, answers: Sequence[Answer]) -> tuple[ChiSquare, float]:
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

    def _conditionals(self, request: AuditRequest, answers: Sequence[Answer]) -> tuple[Array, ...]:
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

    def _greedy(self, case: AuditCase, engine: AuditedEngine) -> dict[str, Any]:
        """Test that every token is the exact model's likeliest, as plain decoding's are."""
        requests = [AuditRequest(prompt=n % 2, sampling=case.sampling, max_tokens=40 + n) for n in range(8)]
        answers = engine.ask(requests, ignore_eos=True)
        wrong = 0
        for answer in answers.answers:
            logits = self.before.logits(PROMPTS[answer.request.prompt], [answer.tokens])[0].numpy()
            gaps = logits.max(1) - logits[np.arange(len(logits)), list(answer.tokens)]
            wrong += bool((gaps > LOGPROB_TOLERANCE).any()) or len(answer.tokens) != answer.request.max_tokens
        reasons = [f"{wrong} of {len(requests)} responses are not plain decoding's"] if wrong else []
        return sampled_row(case, answers, reasons) | {"statistic": float(wrong), "sample_size": len(requests)}


def strata(answers: Sequence[Answer]) -> dict[AuditRequest, list[Answer]]:
    """Group answers to the same prompt with the same sampling by the same weights, of any length."""
    groups: dict[AuditRequest, list[Answer]] = {}
    for answer in answers:
        groups.setdefault(replace(answer.request, max_tokens=RESPONSE_TOKENS), []).append(answer)
    return groups


def sampled_row(case: AuditCase, sampled: Answers, reasons: Sequence[str]) -> dict[str, Any]:
    """Return the row of a sampled case. A case with too few drafts is not tested, which is no pass."""
    drafted, accepted = sampled.num_drafted, sampled.num_accepted
    tested = accepted > 0 if case.composition == "greedy" else min(accepted, drafted - accepted) >= LEAST_DRAFTS
    if reasons or tested:
        verdict, reason = ("failed" if reasons else "passed"), "; ".join(reasons) or None
    else:
        verdict = "not tested"
        reason = f"{drafted} tokens drafted and {accepted} accepted: too few for a test"
    return unsampled_row(case, verdict, reason) | {"num_drafted": drafted, "num_accepted": accepted}


def unsampled_row(case: AuditCase, verdict: str, reason: str | None) -> dict[str, Any]:
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


@dataclass(frozen=True, slots=True, kw_only=True)
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
    terms = counts * ((counts / expected) ** _CRESSIE_READ - 1)
    statistic = 2 / (_CRESSIE_READ * (_CRESSIE_READ + 1)) * float(terms.sum())
    return ChiSquare(statistic=statistic, dof=len(expected) - 1, num_samples=num)


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
