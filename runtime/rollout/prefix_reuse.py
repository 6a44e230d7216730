"""Responses of the previous epoch as prefixes (SPEC-RL, arXiv 2509.23232): verified, cut, continued."""

import time
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from tltlab.config import counted
from tltlab.errors import ConfigError
from tltlab.records import Fields, Json, frozen
from tltlab.runtime.data.order import DataOrder
from tltlab.runtime.data.prompts import Prompt
from tltlab.runtime.recipe.recipe import Recipe
from tltlab.runtime.recipe.sections import ReuseConfig

from .collected import Collected, RolloutTools, SynchronousRollouts, Trajectory, load_ragged, save_ragged

EARLIER_FILE = "earlier-responses.safetensors"


@frozen
class EarlierResponse:
    """A response of N tokens, int32, with their log-probs, float32, under the policy that drew it."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    truncated: bool


def keep_chances(now: np.ndarray, then: np.ndarray, leniency: float) -> np.ndarray:
    """Return min(1, leniency * pi_now / pi_then) of each token, from natural log-probs [N] and [N]."""
    with np.errstate(over="ignore", invalid="ignore"):
        ratio: np.ndarray = np.exp(np.subtract(now, then, dtype=np.float64))
    return np.minimum(1.0, leniency * ratio)


def kept_prefix(now: np.ndarray, then: np.ndarray, leniency: float, draws: np.ndarray) -> int:
    """Return the number of kept tokens: up to the first whose uniform draw is not below its keep probability."""
    rejected = ~(draws < keep_chances(now, then, leniency))
    return int(rejected.argmax()) if rejected.any() else len(rejected)


class ReusingRollouts(SynchronousRollouts):
    """Every RL step draws prompts_per_step groups; responses of an earlier epoch are continued, not redrawn.

    The trainer scores the last response to the same prompt and sample under the active policy, each token is kept by
    `keep_chances`, and an engine continues after the last kept one. Responses are biased towards the previous policy.
    Draws depend on seed, RL step, prompt and sample.

    Kept tokens have the log-probs and the version of the active policy. The trace holds the engines' work: the new
    tokens, with prompt and prefix as `prompt_token_ids`. A response that is kept whole, its end included, has no row.
    """

    carries = "earlier"

    def __init__(self, recipe: Recipe, prompts: Sequence[Prompt], order: DataOrder, config: ReuseConfig):
        super().__init__(recipe, prompts, order)
        self.config = config
        self._earlier: dict[tuple[str, int], EarlierResponse] = {}

    def collect(self, tools: RolloutTools) -> Collected:
        """Roll out one RL step."""
        collected = super().collect(tools)
        for t in collected.trajectories:
            self._earlier[t.prompt.prompt_id, t.sample] = EarlierResponse(
                token_ids=np.array(t.token_ids, np.int32),
                logprobs=np.array(t.logprobs, np.float32),
                truncated=t.truncated,
            )
        # It scored after the rollout began, before the first round.
        return replace(collected, rollout_s=collected.rollout_s - self._score_s, score_s=self._score_s)

    def _begun(self, batch: Sequence[tuple[int, int]], tools: RolloutTools) -> list[Trajectory]:
        """Return what the active policy keeps of the earlier responses, and empty ones where there are none."""
        start = time.perf_counter()
        blank = super()._begun(batch, tools)
        earlier = [self._earlier.get((t.prompt.prompt_id, t.sample)) for t in blank]
        visited = [(t.prompt.token_ids, e.token_ids.tolist()) for t, e in zip(blank, earlier, strict=True) if e]
        scored = iter(tools.score(visited) if visited else [])
        numbers = [number for _, number in batch for _ in range(self.recipe.rollout.group_size)]
        prefixes = [
            t if e is None else self._prefix(number, t, e, next(scored), tools)
            for number, t, e in zip(numbers, blank, earlier, strict=True)
        ]
        self._kept = _notes(earlier, prefixes)
        self._score_s = time.perf_counter() - start
        return prefixes

    def _notes(self, num_kept: int, num_asked: int, num_rounds: int) -> list[str]:
        return self._kept

    def _prefix(
        self, number: int, blank: Trajectory, earlier: EarlierResponse, now: np.ndarray, tools: RolloutTools
    ) -> Trajectory:
        """Return the part of `earlier` that the active policy keeps, given its log-probs `now`, [N]."""
        rng = np.random.default_rng([self.recipe.seed, tools.rl_step, number, blank.sample])
        num_tokens = len(earlier.token_ids)
        num = kept_prefix(now, earlier.logprobs, self.config.leniency, rng.random(num_tokens))
        whole = "length" if earlier.truncated else "stop"
        return replace(
            blank,
            token_ids=array("i", earlier.token_ids[:num].tolist()),
            logprobs=array("f", now[:num].tolist()),
            token_versions=array("i", [tools.policy_version]) * num,
            finish_reason=whole if num == num_tokens else None,
        )

    def state_dict(self, folder: Path) -> Json:
        """Return the keys of known responses; their arrays go to a file in `folder`."""
        earlier = list(self._earlier.values())
        columns = {"token_ids": [e.token_ids for e in earlier], "logprobs": [e.logprobs for e in earlier]}
        save_ragged(folder / EARLIER_FILE, **columns)
        return {"earlier": [[*name, earlier.truncated] for name, earlier in self._earlier.items()]}

    def _load(self, state: Fields, folder: Path) -> None:
        """Raise ConfigError for a state with responses beyond the cap."""
        self._earlier = {}
        if "earlier" not in state:
            return
        columns = load_ragged(folder / EARLIER_FILE)
        longest, cap = max(map(len, columns["token_ids"]), default=0), self.recipe.rollout.max_response_tokens
        if longest > cap:
            raise ConfigError(f"rollout.max_response_tokens = {cap} is below a response to use again, {longest}")
        self._earlier = {
            (prompt_id, sample): EarlierResponse(token_ids=token_ids, logprobs=logprobs, truncated=truncated)
            for (prompt_id, sample, truncated), token_ids, logprobs in zip(
                state["earlier"], columns["token_ids"], columns["logprobs"], strict=True
            )
        }


def _notes(earlier: Sequence[EarlierResponse | None], prefixes: Sequence[Trajectory]) -> list[str]:
    visited = [(e, t) for e, t in zip(earlier, prefixes, strict=True) if e is not None]
    if not visited:
        return []
    offered = sum(len(e.token_ids) for e, _ in visited)
    num_kept = sum(len(t.token_ids) for _, t in visited)
    whole = sum(t.finish_reason is not None for _, t in visited)
    return [
        f"{num_kept} of {counted(offered, 'token')} of earlier responses kept, {whole} of "
        f"{counted(len(visited), 'response')} whole"
    ]
