"""batch-size: at each forced batch size, what every fixed strategy gives, and what the bandit picks and reaches.

One engine, arms and bandit in a new order in every round; the bandit continues learning. Requests continue from within
long responses that the model gave before, and past the end of the text, so that the batch stays what it is. Only
iterations of the whole batch without prefill count.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from pydantic import Field

from tltlab.charts import lines
from tltlab.drafters.base import Key
from tltlab.drafters.specs import DEFAULT_DRAFTERS
from tltlab.errors import ConfigError, RunError
from tltlab.policies.policy import load_policy
from tltlab.policies.simple import Fixed
from tltlab.stats import mean_of_few
from tltlab.strategy import NO_SPECULATION, Strategy

from .harness import Case, Experiment, Row
from .models import Count, own_model
from .result import with_interval

TEMPERATURE = 1.0
PLAIN = str(NO_SPECULATION)
_UNSETTLED = 2
"""Iterations after a prefill that do not count: the first has nothing to verify yet."""
_STALL = 3.0
"""An iteration that takes longer than so many medians waited for something else on the machine."""
_FEWEST = 4
"""Rounds below which no interval is given: Student's would hold anything."""
Ratio = tuple[float, float | None, float | None]


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


class BatchSize(Experiment[BatchSizeSettings]):
    """A reading is a visit: one arm, or the policy, at one batch size in one round."""

    Settings = BatchSizeSettings
    FAST: ClassVar = {
        "size": "tiny", "batches": (1, 4, 16), "depths": (2, 8), "rounds": 2, "tokens": 32, "requests": 2,
        "warm_up": 20,
    }  # fmt: skip

    def cases(self) -> Iterator[Case]:
        settings, policy = self.settings, load_policy(self.settings.policy)
        if len(policy.strategies) < 2:
            raise ConfigError(f"policy {settings.policy} has {len(policy.strategies)} strategy: it has nothing to pick")
        drafters = DEFAULT_DRAFTERS | policy.drafters
        if settings.drafter not in drafters:
            raise ConfigError(f"no drafter named {settings.drafter!r} here; there are: {', '.join(drafters)}")
        chains = [Strategy.chain(settings.drafter, depth) for depth in settings.depths]
        arms = dict.fromkeys([NO_SPECULATION, *chains, *policy.strategies])
        self.arms = sorted(arms, key=lambda arm: (arm.speculates, arm.draft_depth))
        self.batches = sorted(set(settings.batches))
        self.rng, self.number = np.random.default_rng(self.seed), 0
        self._open(drafters)
        self.learning: dict[int, Any] = {
            batch: (policy.build(np.random.default_rng([self.seed, batch])), policy.build_budget())
            for batch in self.batches
        }
        for batch in self.batches:
            self._visit(batch, None, -1, self.rng.permutation(len(self.starts)), iterations=settings.warm_up)
        for number in range(settings.rounds):
            yield Case(f"round {number + 1} of {settings.rounds}", "every arm at every batch size", number)

    def _open(self, drafters: dict[str, Any]) -> None:
        """Open the engine; `starts` are token ids to continue from: prompts, each with half of a long response."""
        import torch
        from transformers import AutoConfig

        from tltlab.runtime.engine.engine import Engine
        from tltlab.runtime.models.runs import prompts_of
        from tltlab.runtime.rollout.collected import requests_of

        model = own_model(self.settings.model, self.folder, size=self.settings.size, progress=self.progress)
        torch.set_num_threads(1)
        self.room = int(AutoConfig.from_pretrained(model).max_position_embeddings)
        widest = max(self.batches)
        engine = Engine(
            str(model),
            drafters=drafters,
            max_draft_depth=max(arm.draft_depth for arm in self.arms),
            seed=self.seed,
            vllm_args={"max_num_seqs": widest, "max_model_len": self.room, "gpu_memory_utilization": 0.4},
        )
        self.engine = self.stack.enter_context(closing(engine))
        engine.warm_up(TEMPERATURE)
        prompts = prompts_of(model, "train", 4 * widest)
        if len(prompts) < widest:
            raise ConfigError(f"{model / 'train.jsonl'} has {len(prompts)} prompts: a batch of {widest} needs more")
        cap = min(4 * self.settings.tokens, self.room // 2)
        requests = [request for prompt in prompts for request in requests_of(prompt, 0, 1, cap)]
        texts = engine.generate(requests, rl_step=0, temperature=TEMPERATURE).responses
        longest = sorted(zip(prompts, texts, strict=True), key=lambda pair: -len(pair[1].token_ids))
        starts = [[*prompt.token_ids, *text.token_ids[: len(text.token_ids) // 2]] for prompt, text in longest]
        self.starts: list[list[int]] = starts[: max(widest, self.settings.requests)]

    def measure(self, case: Case) -> Iterator[Row]:
        for batch in self.batches:
            order = self.rng.permutation(len(self.starts))
            arms = [*self.arms, None]
            for at in self.rng.permutation(len(arms)):
                yield self._visit(batch, arms[at], case.given, order)

    def _visit(self, batch: int, arm: Strategy | None, number: int, order: np.ndarray, iterations: int = 0) -> Row:
        """Generate at one batch size: for at least so many `iterations`, or where they are 0 for the visit's tokens.

        `pace` is the log of tokens per second: one slow round moves its mean less than the mean of paces. `drafts` were
        verified and `accepted` of their tokens kept, `ran` counts iterations by strategy.
        """
        self.engine.control.set_selector(*(self.learning[batch] if arm is None else (Fixed(arm), None)))
        # The history of drafters on these texts must not depend on the order of arms.
        self.engine.forget()
        rows: list[Row] = []
        num_requests = 0
        while len(rows) < iterations if iterations else num_requests < self.settings.requests:
            rows += self._generate([self.starts[order[(num_requests + n) % len(order)]] for n in range(batch)])
            num_requests += batch
        verifying = [row for row in rows if row["num_drafted"]]
        seconds, num_tokens = seconds_of(rows), sum(row["num_generated"] for row in rows)
        return {
            "batch": batch,
            "arm": self.settings.policy if arm is None else str(arm),
            "round": number,
            "seconds": seconds,
            "num_tokens": num_tokens,
            "pace": math.log(num_tokens / seconds),
            "drafts": sum(len(row["accepted_per_request"]) for row in verifying),
            "accepted": sum(row["num_accepted"] for row in verifying),
            "ran": Counter(_strategy(row) for row in rows),
        }

    def _generate(self, starts: Sequence[list[int]]) -> list[Row]:
        """Iterations that count of one batch, which ends after the settings' `tokens` for each request on average."""
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

        def enough(ended: Sequence[Key]) -> bool:
            # A request that has reached the model's context leaves a smaller batch.
            generated = sum(row["num_generated"] for row in self.engine.control.tracker.iterations)
            return bool(ended) or generated >= len(starts) * self.settings.tokens

        rollout = self.engine.generate(requests, rl_step=self.number, temperature=TEMPERATURE, until=enough)
        rows = [dict(row) for row in rollout.iterations if row["batch"] == len(starts) and not row["prefill_tokens"]]
        if len(rows) <= _UNSETTLED:
            raise RunError(f"no iteration ran all {len(starts)} requests: take fewer tokens or smaller batches")
        return rows[_UNSETTLED:]

    def table(self, readings: Sequence[Row]) -> list[Row]:
        self.visits = pd.DataFrame(list(readings))
        return table(self.visits, [str(arm) for arm in self.arms], self.settings.policy)

    def verdict(self, rows: pd.DataFrame) -> str:
        return verdict(rows, self.settings.policy, overall(self.visits, self.settings.policy))

    def picture(self, rows: pd.DataFrame) -> Figure:
        by_arm = {str(name): of for name, of in rows.groupby("arm", sort=False) if name != PLAIN}
        return lines(
            {name: (of["batch"], of["speedup"]) for name, of in by_arm.items()},
            bands={name: (of["low"], of["high"]) for name, of in by_arm.items()},
            xlabel="batch size", ylabel="times as fast", title="Tokens per second, plain decoding = 1", doubling=True,
        )  # fmt: skip

    def notes(self, rows: pd.DataFrame) -> Iterable[str]:
        return (
            "requests go on from within the model's longest responses and past the end of the text; drafters forget "
            "before each visit, iterations with prefill do not count",
            "intervals are Student's of mean log ratios over rounds, of 95 % one by one, not all at once",
            f"{self.settings.policy} learned for {self.settings.warm_up} iterations at each batch size before the "
            "first round, apart for each; what it explores counts against it",
        )


def table(visits: pd.DataFrame, arms: Sequence[str], policy: str) -> list[Row]:
    """A row per batch size and arm, then one of the policy.

    `speedup` is over plain decoding at the same batch size, `share` how often the policy ran the arm. `best` is the
    fastest arm, `level` is True for an arm not significantly slower. `of_best`: the policy's tokens per second over
    those of the arm that is fastest in the other rounds, so that the noise of a round does not select its own
    reference.
    """
    rows = []
    for batch, at_batch in visits.groupby("batch"):
        logs = at_batch.pivot(index="round", columns="arm", values="pace")
        best = logs[list(arms)].mean().idxmax()
        ran: Counter[str] = sum(at_batch.loc[at_batch["arm"] == policy, "ran"], Counter())
        for arm in [*arms, policy]:
            ours, plain, fixed = at_batch[at_batch["arm"] == arm], arm == PLAIN, arm != policy
            speedup, low, high = _ratio(logs[arm] - logs[PLAIN])
            to_best = _ratio(logs[arm] - logs[best])[2]
            of_best: Ratio | tuple[None, ...] = (None,) * 3 if fixed else _ratio(of_best_by_round(logs, policy))
            drafts = int(ours["drafts"].sum())
            rows.append(
                {
                    "batch": batch,
                    "arm": arm,
                    "tokens_per_s": float(ours["num_tokens"].sum() / ours["seconds"].sum()),
                    "speedup": speedup,
                    "low": None if plain else low,
                    "high": None if plain else high,
                    "accept_length": 1 + float(ours["accepted"].sum()) / drafts if drafts else None,
                    "share": ran[arm] / max(ran.total(), 1) if fixed else None,
                    "best": arm == best if fixed else None,
                    "level": arm == best or to_best is None or to_best >= 1 if fixed else None,
                    **dict(zip(("of_best", "of_best_low", "of_best_high"), of_best, strict=True)),
                }
            )
    return rows


def of_best_by_round(logs: pd.DataFrame, policy: str) -> pd.Series:
    """Log ratio of the policy's speed to that of the arm fastest in the other rounds, by round."""
    fixed = logs.drop(columns=policy).to_numpy()
    best = (fixed.sum(axis=0) - fixed if len(fixed) > 1 else fixed).argmax(axis=1)
    return pd.Series(logs[policy].to_numpy() - fixed[np.arange(len(fixed)), best], index=logs.index)


def overall(visits: pd.DataFrame, policy: str) -> Ratio:
    """The policy's pace over the best arm's, the geometric mean over batch sizes, with its interval over rounds."""
    by_batch = {
        batch: of_best_by_round(at_batch.pivot(index="round", columns="arm", values="pace"), policy)
        for batch, at_batch in visits.groupby("batch")
    }
    return _ratio(pd.DataFrame(by_batch).mean(axis=1))


def _ratio(logs: pd.Series) -> Ratio:
    """The geometric mean of ratios given as logarithms, with Student's interval, None where they are too few."""
    interval = mean_of_few(logs.to_numpy())
    ends = (interval.low, interval.high) if len(logs) >= _FEWEST else ()
    low, high = (float(np.exp(end)) for end in ends) if ends else (None, None)
    return float(np.exp(interval.estimate)), low, high


def verdict(rows: pd.DataFrame, policy: str, of_best: Ratio) -> str:
    """Where drafts pay, where the policy picks an arm that is level with the best, and what it loses to the best."""
    fixed = rows[rows["arm"] != policy].astype({"low": float, "share": float})
    drafts = fixed[fixed["arm"] != PLAIN]
    paying = drafts[drafts["low"] > 1].sort_values("speedup")
    gain = "no draft was shown to be faster than plain decoding"
    if drafts["low"].isna().all():
        gain = "in too few rounds to decide where drafts pay"
    elif len(paying):
        at, top = sorted(set(paying["batch"])), paying.iloc[-1]
        every = len(at) == rows["batch"].nunique()
        extent = "every batch size tried" if every else f"batch sizes {', '.join(map(str, at))}"
        times = with_interval(top["speedup"], top["low"], top["high"])
        gain = f"drafts pay at {extent} ({top['arm']} at {top['batch']}: {times} times plain decoding)"
    picks = fixed.loc[fixed.groupby("batch")["share"].idxmax()]
    missed = [f"{row['batch']} ({row['arm']})" for row in picks.to_dict("records") if not row["level"]]
    not_at = f", not at {', '.join(missed)}" if missed else ""
    return (
        f"measured here, {gain}; the arm that {policy} picks most does not differ measurably from the best one at "
        f"{len(picks) - len(missed)} of {len(picks)} batch sizes{not_at}, and it generates {with_interval(*of_best)} "
        "times the tokens per second of the best fixed arm of each batch size."
    )


def seconds_of(iterations: Sequence[Row]) -> float:
    """The sum of durations, each at most `_STALL` times the median of its strategy's in the visit."""
    durations = pd.Series([row["duration"] for row in iterations])
    most = _STALL * durations.groupby([_strategy(row) for row in iterations]).transform("median")
    return float(np.minimum(durations, most).sum())


def _strategy(row: Row) -> str:
    """Return the strategy of an iteration as text."""
    if not row["draft_depth"]:
        return PLAIN
    return str(Strategy(row["drafter"], row["draft_depth"], row["top_k"], row["tokens_to_verify"]))
