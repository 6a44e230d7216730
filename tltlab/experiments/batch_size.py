"""batch-size: at each forced batch size, what every fixed strategy gives, and what the bandit picks and reaches.

One engine, arms and bandit in a new order in every round; the bandit goes on learning. Speed-ups over plain decoding at
the same batch size are means of log ratios over rounds, with Student's interval. Requests go on from within long
responses that the model gave before, and past the end of the text where they come to it, so that the batch stays what
it is. Only iterations of the whole batch without prefill count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from pydantic import Field

from tltlab.charts import COLORS, DASHES, MARKERS, finish
from tltlab.drafters.base import Key
from tltlab.drafters.specs import DEFAULT_DRAFTERS
from tltlab.errors import ConfigError, RunError
from tltlab.policies.policy import Policy, load_policy
from tltlab.policies.simple import Fixed
from tltlab.stats import mean_of_few
from tltlab.strategy import NO_SPECULATION, Strategy

from . import Progress
from .models import Count, own_model
from .result import ExperimentResult, with_interval

TEMPERATURE = 1.0
_UNSETTLED = 2
"""Iterations after a prefill that do not count: the first has nothing to verify yet."""
_STALL = 3.0
"""An iteration that takes longer than so many medians waited for something else on the machine."""
_FEWEST = 4
"""Rounds below which no interval is given: Student's would hold anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizeSettings:
    """`model` is a folder of `tltlab make-model`, else one of `size` is trained. Arms are no speculation, chains of
    `depths` by `drafter`, and what `policy` chooses from: a shipped one by name, or a policy file.

    A visit is `tokens` for each request on average, of at least `requests` of them, batch after batch; there are
    `rounds` of each batch size and arm. The policy learns for `warm_up` iterations at each batch size before.
    """

    model: Path | None = None
    size: str = "small"
    batches: tuple[Count, ...] = (1, 2, 4, 8, 16, 32, 64)
    drafter: str = "ngram"
    depths: tuple[Count, ...] = (1, 2, 4, 8)
    policy: str = "beg-mab"
    rounds: Count = 8
    tokens: Annotated[int, Field(ge=32)] = 64
    requests: Count = 8
    warm_up: Annotated[int, Field(ge=0)] = 200


FAST: Mapping[str, Any] = {
    "size": "tiny", "batches": (1, 4, 16), "depths": (2, 8), "rounds": 2, "tokens": 32, "requests": 2, "warm_up": 20,
}  # fmt: skip


def run(settings: BatchSizeSettings, *, folder: Path, seed: int, progress: Progress) -> ExperimentResult:
    """The experiment; a model that is trained stays in `folder`/models."""
    policy = load_policy(settings.policy)
    if len(policy.strategies) < 2:
        raise ConfigError(f"policy {settings.policy} has {len(policy.strategies)} strategy: it has nothing to pick")
    drafters = DEFAULT_DRAFTERS | policy.drafters
    if settings.drafter not in drafters:
        raise ConfigError(f"no drafter named {settings.drafter!r} here; there are: {', '.join(drafters)}")
    chains = [Strategy.chain(settings.drafter, depth) for depth in settings.depths]
    arms = tuple(dict.fromkeys([NO_SPECULATION, *chains, *policy.strategies]))
    model = own_model(settings.model, folder, size=settings.size, progress=progress)
    visits = measure(model, Work(settings=settings, arms=arms, policy=policy), seed=seed, progress=progress)
    rows = table(visits, settings.policy)
    frame = pd.DataFrame(rows)
    return ExperimentResult(
        verdict=verdict(rows, settings.policy, overall(visits)),
        rows=frame,
        figure=_picture(frame, settings.policy),
        prediction=False,
        notes=_notes(settings, model, visits),
    )


def table(visits: Sequence[Visit], policy: str) -> list[dict[str, Any]]:
    """A row per batch size and arm, then one of the policy.

    `speedup` is over plain decoding at the same batch size, `share` how often the policy ran the arm. `best` is the
    fastest arm, `level` says that an arm cannot be told from it. `of_best`: the policy's tokens per second over those
    of the arm that is fastest in the other rounds, so that luck does not choose what it is held against.
    """
    rows = []
    for batch in sorted({visit.batch for visit in visits}):
        by_arm = {arm: _of(visits, batch, arm) for arm in dict.fromkeys(v.arm for v in visits if v.batch == batch)}
        arms = sorted((arm for arm in by_arm if arm is not None), key=lambda arm: (arm.speculates, arm.draft_depth))
        ran: Counter[Strategy] = sum((Counter(visit.ran) for visit in by_arm[None]), Counter())
        best = max(arms, key=lambda arm: _log_pace(by_arm[arm]))
        for arm in [*arms, None]:
            ours = by_arm[arm]
            drafts = sum(visit.drafts for visit in ours)
            against, to_best = _speedup(by_arm[NO_SPECULATION], ours), _speedup(by_arm[best], ours)
            plain = arm == NO_SPECULATION
            of_best = _ratio(of_best_by_round(visits, batch)) if arm is None else (None, None, None)
            rows.append(
                {
                    "batch": batch,
                    "arm": policy if arm is None else str(arm),
                    "tokens_per_s": _pace(ours),
                    "speedup": against[0],
                    "low": None if plain else against[1],
                    "high": None if plain else against[2],
                    "accept_length": 1 + sum(visit.accepted for visit in ours) / drafts if drafts else None,
                    "share": None if arm is None else ran[arm] / max(ran.total(), 1),
                    "best": None if arm is None else arm == best,
                    "level": None if arm is None else arm == best or to_best[2] is None or to_best[2] >= 1,
                    "of_best": of_best[0],
                    "of_best_low": of_best[1],
                    "of_best_high": of_best[2],
                }
            )
    return rows


def of_best_by_round(visits: Sequence[Visit], batch: int) -> list[float]:
    """The log of the policy's pace over that of the arm that is fastest in the other rounds, round by round."""
    arms = [arm for arm in dict.fromkeys(visit.arm for visit in visits) if arm is not None]
    by_round = {arm: {v.round: v for v in _of(visits, batch, arm)} for arm in [*arms, None]}
    logs = []
    for round_, ours in sorted(by_round[None].items()):
        other_rounds = [n for n in by_round[None] if n != round_] or [round_]
        best = max(arms, key=lambda arm: _log_pace([by_round[arm][n] for n in other_rounds]))
        logs.append(_log_pace([ours]) - _log_pace([by_round[best][round_]]))
    return logs


def overall(visits: Sequence[Visit]) -> tuple[float, float | None, float | None]:
    """The policy's pace over the best arm's, the geometric mean over batch sizes, with its interval over rounds."""
    logs = np.array([of_best_by_round(visits, batch) for batch in sorted({visit.batch for visit in visits})])
    return _ratio(logs.mean(0).tolist())


def _of(visits: Sequence[Visit], batch: int, arm: Strategy | None) -> list[Visit]:
    return sorted((v for v in visits if (v.batch, v.arm) == (batch, arm)), key=lambda visit: visit.round)


def _pace(visits: Sequence[Visit]) -> float:
    return sum(visit.num_tokens for visit in visits) / sum(visit.seconds for visit in visits)


def _log_pace(visits: Sequence[Visit]) -> float:
    """The mean of the visits' log tokens per second: one slow round moves it less than the tokens per second of all."""
    return float(np.mean([np.log(visit.num_tokens / visit.seconds) for visit in visits]))


def _speedup(slow: Sequence[Visit], fast: Sequence[Visit]) -> tuple[float, float | None, float | None]:
    return _ratio([_log_pace([b]) - _log_pace([a]) for a, b in zip(slow, fast, strict=True)])


def _ratio(logs: Sequence[float]) -> tuple[float, float | None, float | None]:
    """The geometric mean of ratios given as logarithms, with Student's interval, None where they are too few."""
    interval = mean_of_few(logs)
    if len(logs) < _FEWEST:
        return float(np.exp(interval.estimate)), None, None
    return float(np.exp(interval.estimate)), float(np.exp(interval.low)), float(np.exp(interval.high))


def verdict(rows: Sequence[Mapping[str, Any]], policy: str, of_best: tuple[float, float | None, float | None]) -> str:
    """Where drafts pay, whether the policy picks an arm that is level with the best, and what it loses to the best."""
    fixed = [row for row in rows if row["arm"] != policy]
    batches = sorted({row["batch"] for row in rows})
    gains = {
        batch: max((r for r in fixed if r["batch"] == batch and r["arm"] != "none"), key=lambda r: r["low"] or 0.0)
        for batch in batches
    }
    paying = [batch for batch in batches if (gains[batch]["low"] or 0.0) > 1]
    if all(row["low"] is None for row in fixed):
        gain = "measured here, in too few rounds to tell where drafts pay"
    elif not paying:
        gain = f"measured here, no draft was shown to be faster than plain decoding at batch sizes {_listed(batches)}"
    else:
        top = max((gains[batch] for batch in paying), key=lambda row: row["speedup"])
        extent = "at every batch size tried" if paying == batches else f"at batch sizes {_listed(paying)}"
        stops = [batch for batch in batches if batch > paying[-1]]
        then = f" and no gain was shown from {stops[0]} on" if stops else ""
        gain = (
            f"measured here, drafts pay {extent} ({top['arm']} at {top['batch']}: "
            f"{with_interval(top['speedup'], top['low'], top['high'])} times plain decoding){then}"
        )
    picks = {b: max((r for r in fixed if r["batch"] == b), key=lambda r: r["share"]) for b in batches}
    missed = [f"{b} ({picks[b]['arm']})" for b in batches if not picks[b]["level"]]
    level_at = f"{len(batches) - len(missed)} of {len(batches)} batch sizes"
    not_at = f", not at {', '.join(missed)}" if missed else ""
    return (
        f"{gain}; the arm that {policy} picks most cannot be told from the best one at {level_at}{not_at}, and it "
        f"generates {with_interval(*of_best)} times the tokens per second of the best fixed arm of each batch size."
    )


def _listed(batches: Sequence[int]) -> str:
    return str(batches[0]) if len(batches) == 1 else f"{', '.join(map(str, batches[:-1]))} and {batches[-1]}"


def _notes(settings: BatchSizeSettings, model: Path, visits: Sequence[Visit]) -> tuple[str, ...]:
    past = sum(visit.past_end for visit in visits) / max(sum(visit.generated for visit in visits), 1)
    return (
        f"{model}: requests go on from within its longest responses and past the end of the text, which {past:.0%} of "
        "the tokens are; drafters forget before each visit, iterations with prefill do not count",
        f"{settings.rounds} rounds of all arms in turn; intervals are of 95 % over rounds, one by one, not all at once",
        f"{settings.policy} learned for {settings.warm_up} iterations at each batch size before the first round, apart "
        "for each; what it explores counts against it",
    )


def _picture(frame: pd.DataFrame, policy: str) -> Figure:
    """Above, the speed-up of each arm and of the policy; below, how often the policy ran each arm."""
    batches = sorted(frame["batch"].unique())
    arms = [name for name in dict.fromkeys(frame["arm"]) if name != policy]
    at = np.arange(len(batches))
    figure = Figure(figsize=(7.2, 3.4 + 0.3 * len(arms) + 0.6), layout="constrained")
    top, below = figure.subplots(2, 1, height_ratios=[3.0, 0.3 * len(arms) + 0.5], sharex=True)
    for i, name in enumerate([*arms[1:], policy]):
        rows = frame[frame["arm"] == name].sort_values("batch")
        middle, low, high = (rows[column].to_numpy(np.float64) for column in ("speedup", "low", "high"))
        color = "#111111" if name == policy else COLORS[i % len(COLORS)]
        top.plot(at, middle, label=name, color=color, marker=MARKERS[i % len(MARKERS)], markersize=4,
                 linewidth=2.2 if name == policy else 1.3, linestyle=DASHES[i % len(DASHES)])  # fmt: skip
        top.fill_between(at, low, high, color=color, alpha=0.13, linewidth=0)
    best = frame[frame["best"] == True]  # noqa: E712
    top.plot(at, best.sort_values("batch")["speedup"], linestyle="none", marker="o", markersize=11, fillstyle="none",
             color="#a0452a", label="best fixed")  # fmt: skip
    # An interval may reach far beyond what there is to see.
    top.set_ylim(0, 1.25 * float(frame["speedup"].max()))
    top.axhline(1.0, color="#6f6f6f", linewidth=0.9, linestyle=(0, (4, 2)))
    top.legend(fontsize=8, frameon=False, ncols=2)
    finish(top, title="Tokens per second at a forced batch size, plain decoding = 1", xlabel="", ylabel="times as fast")
    fixed = frame[frame["arm"] != policy]
    shares = fixed.pivot(index="arm", columns="batch", values="share").loc[arms, batches].to_numpy(np.float64)
    below.imshow(shares, aspect="auto", cmap="Blues", vmin=0, vmax=1)
    for y, x in np.ndindex(*shares.shape):
        below.text(x, y, f"{100 * shares[y, x]:.0f}", ha="center", va="center", fontsize=8,
                   color="white" if shares[y, x] > 0.55 else "#333333")  # fmt: skip
    below.set_yticks(range(len(arms)), arms)
    below.set_xticks(at, [str(batch) for batch in batches])
    finish(below, title=f"What {policy} ran, % of iterations", xlabel="batch size", grid=None)
    return figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is measured: the settings' rounds of every batch size under every arm and the policy."""

    settings: BatchSizeSettings
    arms: tuple[Strategy, ...]
    policy: Policy

    @property
    def batches(self) -> list[int]:
        return sorted(set(self.settings.batches))


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One arm, or the policy, for which `arm` is None, at one batch size in one round.

    `seconds` are those of its iterations, stalls cut; `ran` counts them by strategy. `drafts` were verified and
    `accepted` of their tokens kept. Of `generated` tokens `past_end` came after the end of a text.
    """

    batch: int
    arm: Strategy | None
    round: int
    seconds: float
    num_tokens: int
    drafts: int
    accepted: int
    ran: Mapping[Strategy, int]
    past_end: int
    generated: int


def measure(model: Path, work: Work, *, seed: int, progress: Progress) -> list[Visit]:
    """All visits, on an engine that is closed afterwards. ConfigError where `model` has no prompts of its own."""
    import torch
    from transformers import AutoConfig

    from tltlab.runtime.engine.engine import Engine

    torch.set_num_threads(1)
    config = AutoConfig.from_pretrained(model)
    room = int(config.max_position_embeddings)
    progress(f"starting an engine on {model}")
    engine = Engine(
        str(model),
        drafters={**DEFAULT_DRAFTERS, **work.policy.drafters},
        max_draft_depth=max(arm.draft_depth for arm in work.arms),
        seed=seed,
        vllm_args={"max_num_seqs": max(work.batches), "max_model_len": room, "gpu_memory_utilization": 0.4},
    )
    try:
        engine.warm_up(TEMPERATURE)
        rng = np.random.default_rng(seed)
        bench = _BatchBench(engine, work, _starts(engine, model, work, room), room, config.eos_token_id, rng)
        return bench.run(seed, progress)
    finally:
        engine.close()


def _starts(engine: Any, model: Path, work: Work, room: int) -> list[list[int]]:
    """Token ids to go on from: prompts, each with the first half of a response among the longest."""
    from tltlab.runtime.models.runs import prompts_of
    from tltlab.runtime.rollout.collected import requests_of

    prompts = prompts_of(model, "train", 4 * max(work.batches))
    cap = min(4 * work.settings.tokens, room // 2)
    requests = [request for prompt in prompts for request in requests_of(prompt, 0, 1, cap)]
    texts = engine.generate(requests, rl_step=0, temperature=TEMPERATURE).responses
    starts = [
        prompt.token_ids + text.token_ids[: len(text.token_ids) // 2]
        for prompt, text in sorted(zip(prompts, texts, strict=True), key=lambda pair: -len(pair[1].token_ids))
    ]
    if len(starts) < max(work.batches):
        raise ConfigError(
            f"{model / 'train.jsonl'} has {len(starts)} prompts: a batch of {max(work.batches)} needs more"
        )
    return starts[: max(max(work.batches), work.settings.requests)]


class _BatchBench:
    """The engine, what is asked of it, and the number of the next batch of requests, which is its RL step."""

    def __init__(
        self, engine: Any, work: Work, starts: Sequence[list[int]], room: int, end: Any, rng: np.random.Generator
    ) -> None:
        self.engine, self.work, self.starts, self.room, self.rng = engine, work, starts, room, rng
        self.ends = set(end) if isinstance(end, list) else {end}
        self.number = 0

    def run(self, seed: int, progress: Progress) -> list[Visit]:
        """Every batch size in turn within a round, arms and policy in a new order at each."""
        work = self.work
        learning = {
            batch: (work.policy.build(np.random.default_rng([seed, batch])), work.policy.build_budget())
            for batch in work.batches
        }
        for batch in work.batches:
            self._visit(batch, None, learning[batch], self._order(), -1, iterations=work.settings.warm_up)
        progress(f"the policy has learned for {work.settings.warm_up} iterations at {len(work.batches)} batch sizes")
        visits = []
        for round_ in range(work.settings.rounds):
            for batch in work.batches:
                order = self._order()
                modes: list[Strategy | None] = [*work.arms, None]
                for at in self.rng.permutation(len(modes)):
                    visits.append(self._visit(batch, modes[at], learning[batch], order, round_))
            seconds = sum(visit.seconds for visit in visits if visit.round == round_)
            progress(f"round {round_ + 1} of {work.settings.rounds}: {seconds:.1f} s")
        return visits

    def _order(self) -> list[int]:
        return [int(n) for n in self.rng.permutation(len(self.starts))]

    def _visit(
        self, batch: int, arm: Strategy | None, learning: Any, order: Sequence[int], round_: int, iterations: int = 0
    ) -> Visit:
        """Generate at one batch size: for at least so many `iterations`, or where they are 0 for the visit's tokens."""
        control = self.engine.control
        control.set_selector(*(learning if arm is None else (Fixed(arm), None)))
        # What drafters know of these texts must not depend on who went first.
        self.engine.forget()
        rows: list[dict[str, Any]] = []
        past = generated = 0
        loops = 0
        while len(rows) < iterations if iterations else loops * batch < self.work.settings.requests:
            chosen = [self.starts[order[(loops * batch + n) % len(order)]] for n in range(batch)]
            more, responses = self._generate(batch, chosen)
            if not more:
                raise RunError(f"no iteration ran all {batch} requests: take fewer tokens or smaller batches")
            rows += more
            past += sum(self._past_end(response.token_ids) for response in responses)
            generated += sum(len(response.token_ids) for response in responses)
            loops += 1
        verifying = [row for row in rows if row["num_drafted"]]
        return Visit(
            batch=batch,
            arm=arm,
            round=round_,
            seconds=_seconds(rows),
            num_tokens=sum(row["num_generated"] for row in rows),
            drafts=sum(len(row["accepted_per_request"]) for row in verifying),
            accepted=sum(row["num_accepted"] for row in verifying),
            ran=Counter(_strategy(row) for row in rows),
            past_end=past,
            generated=generated,
        )

    def _generate(self, batch: int, starts: Sequence[list[int]]) -> tuple[list[dict[str, Any]], Sequence[Any]]:
        """Rows that count, and the responses; it ends after the `tokens` of the work for each request on average."""
        from tltlab.runtime.engine.generation import GenerationRequest

        self.number += 1
        requests = [
            GenerationRequest(
                key=(self.number, f"start-{n}", 0, 0),
                prompt_token_ids=start,
                max_response_tokens=self.room - len(start),
                ignore_eos=True,
            )
            for n, start in enumerate(starts)
        ]
        num_tokens = num_rows = 0

        def enough(ended: Sequence[Key]) -> bool:
            nonlocal num_tokens, num_rows
            rows = self.engine.control.ledger.iterations
            num_tokens += sum(row["num_generated"] for row in rows[num_rows:])
            num_rows = len(rows)
            # A request that has reached the model's context leaves a smaller batch.
            return bool(ended) or num_tokens >= batch * self.work.settings.tokens

        rollout = self.engine.generate(requests, rl_step=self.number, temperature=TEMPERATURE, until=enough)
        rows = [row for row in rollout.iterations if row["batch"] == batch and not row["prefill_tokens"]]
        return rows[_UNSETTLED:], rollout.responses

    def _past_end(self, tokens: Sequence[int]) -> int:
        end = next((n for n, token in enumerate(tokens) if token in self.ends), len(tokens) - 1)
        return len(tokens) - 1 - end


def _seconds(rows: Sequence[Mapping[str, Any]]) -> float:
    """The sum of durations, each at most `_STALL` times the median of its strategy's in the visit."""
    by_strategy: dict[Strategy, list[float]] = {}
    for row in rows:
        by_strategy.setdefault(_strategy(row), []).append(row["duration"])
    return float(sum(np.minimum(each, _STALL * np.median(each)).sum() for each in by_strategy.values()))


def _strategy(row: Mapping[str, Any]) -> Strategy:
    """What an iteration verified."""
    if not row["draft_depth"]:
        return NO_SPECULATION
    return Strategy(row["drafter"], row["draft_depth"], row["top_k"], row["tokens_to_verify"])
