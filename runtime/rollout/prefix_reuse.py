"""Responses of the previous epoch as prefixes (SPEC-RL, arXiv 2509.23232): verified, cut, continued."""

import time
from array import array
from collections.abc import Sequence
from dataclasses import field, replace
from pathlib import Path

import numpy as np
from transformers import AutoConfig, GenerationConfig

from tltlab.config import counted
from tltlab.errors import ConfigError
from tltlab.records import Fields, Json, frozen
from tltlab.runtime.data.order import DataOrder
from tltlab.runtime.data.prompts import Prompt
from tltlab.runtime.drafter.heads.target import read_config
from tltlab.runtime.drafter.offline.data import load_tokenizer
from tltlab.runtime.recipe.recipe import Recipe
from tltlab.runtime.recipe.sections import ReuseConfig

from .collected import (
    Collected,
    Rollouts,
    RolloutTools,
    Rounds,
    Trajectory,
    load_ragged,
    rewarded,
    rewards_by_key,
    save_ragged,
)

MAX_ROWS_BYTES = 2 << 30
"""Most bytes of the distributions of all kept responses on the host."""
EARLIER_FILE = "earlier-responses.safetensors"

_NO_ROWS: np.ndarray = np.empty((0, 0), np.float32)


@frozen
class EarlierResponse:
    """A response of N tokens, int32, with their log-probs, float32, under the policy that drew it.

    With residual "exact" `rows` are that policy's whole distributions, [N, V] float32 natural log-probs.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    truncated: bool
    rows: np.ndarray = field(default_factory=lambda: _NO_ROWS)


@frozen
class Prefix:
    """The kept part of a response, with log-probs under the active policy.

    The first `num_kept` tokens are those of the response `earlier`, whose log-probs are now `now`, as the trainer
    scores them; one more may be drawn from the residual. With a `finish_reason` it has ended.
    """

    response: Trajectory
    num_kept: int = 0
    earlier: EarlierResponse | None = None
    now: np.ndarray = field(default_factory=lambda: _NO_ROWS)


def keep_chances(now: np.ndarray, then: np.ndarray, leniency: float) -> np.ndarray:
    """Return min(1, leniency * pi_now / pi_then) of each token, from natural log-probs [N] and [N]."""
    with np.errstate(over="ignore", invalid="ignore"):
        ratio: np.ndarray = np.exp(np.subtract(now, then, dtype=np.float64))
    return np.minimum(1.0, leniency * ratio)


def kept_prefix(now: np.ndarray, then: np.ndarray, leniency: float, draws: np.ndarray) -> int:
    """Return the number of kept tokens: up to the first whose uniform draw is not below its keep probability."""
    rejected = ~(draws < keep_chances(now, then, leniency))
    return int(rejected.argmax()) if rejected.any() else len(rejected)


def residual(now: np.ndarray, then: np.ndarray) -> np.ndarray:
    """Return norm(max(0, pi_now - pi_then)), [V] probabilities from natural log-probs [V] and [V].

    With leniency 1, a rejected token redrawn from this distribution makes the outcome distributed as pi_now (Leviathan
    et al., arXiv 2211.17192, theorem 1). pi_now itself where the two do not differ.
    """
    p, q = np.exp(now, dtype=np.float64), np.exp(then, dtype=np.float64)
    more: np.ndarray = np.maximum(p - q, 0.0)
    chances: np.ndarray = more / more.sum() if more.any() else p / p.sum()
    return chances


class ReusingRollouts(Rollouts):
    """Every RL step draws prompts_per_step groups; responses of an earlier epoch are continued, not redrawn.

    The trainer scores the last response to the same prompt and sample under the active policy, each token is kept by
    `keep_chances`, and an engine continues after the last kept one. With residual "exact" the token at the cut is drawn
    from `residual`, which makes leniency 1 on-policy. Without it, or with any other leniency, responses are biased
    towards the previous policy. Draws depend on seed, RL step, prompt and sample.

    Kept tokens have the log-probs and the version of the active policy. The trace holds the engines' work: the new
    tokens, with prompt and prefix as `prompt_token_ids`. A response that is kept whole, its end included, has no row.
    """

    carries = "earlier"

    def __init__(self, recipe: Recipe, prompts: Sequence[Prompt], order: DataOrder, config: ReuseConfig):
        super().__init__(recipe, prompts, order)
        self.config = config
        self.exact = config.residual == "exact"
        self._earlier: dict[tuple[str, int], EarlierResponse] = {}
        if self.exact:
            self._check_exact()
            self._ends = end_tokens(recipe.model)

    def collect(self, tools: RolloutTools) -> Collected:
        """Roll out one RL step."""
        rollout = self.recipe.rollout
        batch = self.order.take(rollout.prompts_per_step)
        size = rollout.group_size
        slots = [(number, sample) for _, number in batch for sample in range(size)]
        blank = [t for epoch, number in batch for t in self._blank(number, epoch)]

        start = time.perf_counter()
        earlier = [self._earlier.get((t.prompt.prompt_id, t.sample)) for t in blank]
        visited = [(t.prompt.token_ids, e.token_ids.tolist()) for t, e in zip(blank, earlier, strict=True) if e]
        scored = iter(self._scored(visited, tools))
        prefixes = [
            Prefix(response=t) if e is None else self._prefix(slot, t, e, next(scored), tools)
            for slot, t, e in zip(slots, blank, earlier, strict=True)
        ]
        score_s = time.perf_counter() - start

        rounds = Rounds(tools)
        unfinished = [prefix.response for prefix in prefixes if prefix.response.finish_reason is None]
        requests = [t.request(tools.rl_step, rollout.max_response_tokens) for t in unfinished]
        responses = rounds.generate(tools.share(requests))
        start = time.perf_counter()
        trajectories = rewarded(self._extended([prefix.response for prefix in prefixes], responses, tools), tools)
        reward_s = time.perf_counter() - start

        start = time.perf_counter()
        self._remember(trajectories, prefixes, tools)
        score_s += time.perf_counter() - start
        return Collected(
            groups=[trajectories[i : i + size] for i in range(0, len(trajectories), size)],
            requests=rounds.requests,
            parts=rounds.parts,
            epochs={t.key(tools.rl_step): t.epoch for t in trajectories},
            rewards=rewards_by_key(trajectories, tools.rl_step),
            rollout_s=rounds.rollout_s,
            reward_s=reward_s,
            score_s=score_s,
            notes=self._take_drop_notes() + _notes(prefixes),
        )

    def _scored(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], tools: RolloutTools) -> list[np.ndarray]:
        """Score responses under the active policy: [N] each, with "exact" whole distributions [N, V]."""
        return tools.score(pairs, distributions=self.exact) if pairs else []

    def _prefix(
        self,
        slot: tuple[int, int],
        blank: Trajectory,
        earlier: EarlierResponse,
        scored: np.ndarray,
        tools: RolloutTools,
    ) -> Prefix:
        """Return the part of `earlier` that the active policy keeps, given its log-probs `scored`."""
        tokens = earlier.token_ids.tolist()
        rng = np.random.default_rng([self.recipe.seed, tools.rl_step, *slot])
        then = _of_tokens(earlier.rows, tokens) if self.exact else earlier.logprobs
        now = _of_tokens(scored, tokens) if self.exact else scored
        num = kept_prefix(now, then, self.config.leniency, rng.random(len(tokens)))
        token_ids, logprobs, reason = tokens[:num], [float(logp) for logp in now[:num]], None
        if num == len(tokens):
            reason = "length" if earlier.truncated else "stop"
        elif self.exact:
            drawn = int(rng.choice(scored.shape[1], p=residual(scored[num], earlier.rows[num])))
            token_ids, logprobs = [*token_ids, drawn], [*logprobs, float(scored[num, drawn])]
            # A response that ended at its cap, or at the engine's context, has no room after its last token.
            full = num + 1 == self.recipe.rollout.max_response_tokens or (earlier.truncated and num + 1 == len(tokens))
            reason = "stop" if drawn in self._ends else "length" if full else None
        response = replace(
            blank,
            token_ids=array("i", token_ids),
            logprobs=array("f", logprobs),
            token_versions=array("i", [tools.policy_version]) * len(token_ids),
            finish_reason=reason,
        )
        return Prefix(response=response, num_kept=num, earlier=earlier, now=scored)

    def _remember(self, trajectories: Sequence[Trajectory], prefixes: Sequence[Prefix], tools: RolloutTools) -> None:
        """Store the responses for the next epoch; "exact" scores new ones while their policy is active."""
        rows = [_NO_ROWS] * len(trajectories)
        if self.exact:
            rows = [prefix.now for prefix in prefixes]
            # A whole response may have all but its last token kept and the last one redrawn.
            new = [n for n, t in enumerate(trajectories) if prefixes[n].num_kept < len(t.token_ids)]
            pairs = [(trajectories[n].prompt.token_ids, trajectories[n].token_ids) for n in new]
            for n, scored in zip(new, self._scored(pairs, tools), strict=True):
                rows[n] = scored
        for t, row in zip(trajectories, rows, strict=True):
            self._earlier[t.prompt.prompt_id, t.sample] = EarlierResponse(
                token_ids=np.array(t.token_ids, np.int32),
                logprobs=np.array(t.logprobs, np.float32),
                truncated=t.truncated,
                rows=np.asarray(row, np.float32),
            )

    def _check_exact(self) -> None:
        rollout = self.recipe.rollout
        biased = (rollout.top_p, rollout.top_k, rollout.min_p) != (1.0, 0, 0.0)
        if biased:
            raise ConfigError(
                "rollout.reuse.residual = 'exact' needs whole distributions: leave out top_p, top_k, min_p"
            )
        num_words = int(read_config(self.recipe.model).get_text_config().vocab_size)
        num_rows = len(self.prompts) * rollout.group_size * rollout.max_response_tokens
        if num_rows * num_words * 4 > MAX_ROWS_BYTES:
            raise ConfigError(
                f"rollout.reuse.residual = 'exact' keeps a distribution over {num_words:,} tokens for up to "
                f"{num_rows:,} tokens of all responses to all prompts, {num_rows * num_words * 4 / 2**30:,.1f} GiB: it "
                f"is for small vocabularies (up to {MAX_ROWS_BYTES >> 30} GiB); set it to 'none'"
            )

    def state_dict(self, folder: Path) -> Json:
        """Return the keys of known responses; token arrays, and distributions of "exact", go to a file in `folder`."""
        earlier = list(self._earlier.values())
        columns = {"token_ids": [e.token_ids for e in earlier], "logprobs": [e.logprobs for e in earlier]}
        if self.exact:
            columns["rows"] = [e.rows for e in earlier]
        save_ragged(folder / EARLIER_FILE, **columns)
        return {"earlier": [[*name, earlier.truncated] for name, earlier in self._earlier.items()]}

    def _load(self, state: Fields, folder: Path) -> None:
        """Raise ConfigError for a state without the distributions of "exact", or with responses beyond the cap."""
        self._earlier = {}
        if "earlier" not in state:
            return
        columns = load_ragged(folder / EARLIER_FILE)
        if self.exact and "rows" not in columns:
            raise ConfigError(f"{folder / EARLIER_FILE} has no distributions: rollout.reuse.residual was 'none'")
        longest, cap = max(map(len, columns["token_ids"]), default=0), self.recipe.rollout.max_response_tokens
        if longest > cap:
            raise ConfigError(f"rollout.max_response_tokens = {cap} is below a response to use again, {longest}")
        rows = columns["rows"] if self.exact else [_NO_ROWS] * len(state["earlier"])
        self._earlier = {
            (prompt_id, sample): EarlierResponse(
                token_ids=token_ids, logprobs=logprobs, truncated=truncated, rows=of_response
            )
            for (prompt_id, sample, truncated), token_ids, logprobs, of_response in zip(
                state["earlier"], columns["token_ids"], columns["logprobs"], rows, strict=True
            )
        }


def end_tokens(model: str) -> frozenset[int]:
    """Return the tokens that end a response in vLLM: the tokenizer's, and the generation configuration's."""
    try:
        generation = GenerationConfig.from_pretrained(model)
    except OSError:
        generation = GenerationConfig.from_model_config(AutoConfig.from_pretrained(model))
    ends = generation.eos_token_id
    listed = ends if isinstance(ends, list) else [ends]
    return frozenset(int(e) for e in (*listed, load_tokenizer(model).eos_token_id) if e is not None)


def _of_tokens(rows: np.ndarray, token_ids: Sequence[int]) -> np.ndarray:
    return rows[np.arange(len(token_ids)), list(token_ids)]


def _notes(prefixes: Sequence[Prefix]) -> list[str]:
    visited = [(prefix, prefix.earlier) for prefix in prefixes if prefix.earlier is not None]
    if not visited:
        return []
    offered = sum(len(earlier.token_ids) for _, earlier in visited)
    num_kept = sum(prefix.num_kept for prefix, _ in visited)
    whole = sum(prefix.response.finish_reason is not None for prefix, _ in visited)
    return [
        f"{num_kept} of {counted(offered, 'token')} of earlier responses kept, {whole} of "
        f"{counted(len(visited), 'response')} whole"
    ]
