"""Responses of the epoch before as prefixes (SPEC-RL, arXiv 2509.23232): verified under the policy, cut, carried on."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoConfig, GenerationConfig

from tltlab.errors import ConfigError
from tltlab.runtime.data.order import DataOrder
from tltlab.runtime.data.prompts import Prompt
from tltlab.runtime.drafter.offline.data import load_tokenizer
from tltlab.runtime.engine.engine import GenerationRequest
from tltlab.runtime.recipe.recipe import Recipe, ReuseConfig

from .collected import Collected, Key, RolloutTools, Rounds, left_behind, rewarded, rewards_by_key
from .samples import Trajectory, load_ragged, save_ragged

MAX_ROWS_BYTES = 2 << 30
"""What the distributions of all kept responses may take on the host."""
EARLIER_FILE = "earlier-responses.safetensors"

_NO_ROWS: np.ndarray = np.empty((0, 0), np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Earlier:
    """A response of N tokens, int32, with their log-probs, float32, under the policy that drew it.

    With residual "exact" `rows` are that policy's whole distributions, [N, V] float32 natural log-probs.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    truncated: bool
    rows: np.ndarray = field(default_factory=lambda: _NO_ROWS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """What is kept of an earlier response: N tokens with their log-probs under the policy in force.

    `num_kept` of them are the earlier ones, a last one more may be drawn from the residual. `whole`: it has ended.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    num_kept: int = 0
    whole: bool = False
    truncated: bool = False


def keep_chances(now: np.ndarray, then: np.ndarray, leniency: float) -> np.ndarray:
    """min(1, leniency * pi_now / pi_then) of each token, from natural log-probs [N] and [N]."""
    with np.errstate(over="ignore", invalid="ignore"):
        ratio: np.ndarray = np.exp(np.subtract(now, then, dtype=np.float64))
    return np.minimum(1.0, leniency * ratio)


def kept_prefix(now: np.ndarray, then: np.ndarray, leniency: float, draws: np.ndarray) -> int:
    """How many tokens are kept: up to the first whose uniform draw in [0, 1) is not below its chance."""
    rejected = ~(draws < keep_chances(now, then, leniency))
    return int(rejected.argmax()) if rejected.any() else len(rejected)


def residual(now: np.ndarray, then: np.ndarray) -> np.ndarray:
    """norm(max(0, pi_now - pi_then)), [V] probabilities from natural log-probs [V] and [V].

    With leniency 1 a rejected token drawn anew from it makes the outcome distributed as pi_now (Leviathan et al.,
    arXiv 2211.17192, theorem 1). pi_now itself where the two do not differ.
    """
    p, q = np.exp(now, dtype=np.float64), np.exp(then, dtype=np.float64)
    more: np.ndarray = np.maximum(p - q, 0.0)
    wanted = more if more.any() else p
    return np.divide(wanted, wanted.sum())


class ReusingRollouts:
    """Every RL step draws prompts_per_step groups; what was answered in an epoch before is carried on, not redrawn.

    The trainer scores the last response to the same prompt and sample under the policy in force, each token is kept
    by `keep_chances`, and an engine goes on behind the last one kept. With residual "exact" the token at the cut is
    drawn from `residual`, which makes leniency 1 on-policy. Without it, or with any other leniency, responses lean to
    what the policy before preferred. Draws depend on seed, RL step, prompt and sample.

    Kept tokens have the log-probs and the version of the policy in force. The trace holds what engines did: the new
    tokens, behind prompt and prefix as `prompt_token_ids`. A response that is kept whole, its end included, has no row.
    """

    def __init__(self, recipe: Recipe, prompts: Sequence[Prompt], order: DataOrder, config: ReuseConfig) -> None:
        self.recipe = recipe
        self.prompts = prompts
        self.order = order
        self.config = config
        self.exact = config.residual == "exact"
        self._earlier: dict[tuple[str, int], Earlier] = {}
        self._left_behind: list[str] = []
        if self.exact:
            self._check_exact()
            self._ends = end_tokens(recipe.model)

    @property
    def on_policy(self) -> bool:
        return self.exact and self.config.leniency == 1.0

    def collect(self, tools: RolloutTools) -> Collected:
        """Roll out one RL step."""
        rollout = self.recipe.rollout
        picked = self.order.take(rollout.prompts_per_step)
        slots = [(number, sample) for _, number in picked for sample in range(rollout.group_size)]
        epochs = {
            self._key(number, sample, tools): epoch for epoch, number in picked for sample in range(rollout.group_size)
        }

        start = time.perf_counter()
        known = {slot: self._earlier[name] for slot in slots if (name := self._name(slot)) in self._earlier}
        rows_now = self._scored({slot: earlier.token_ids.tolist() for slot, earlier in known.items()}, tools)
        prefixes = {slot: self._prefix(slot, earlier, rows_now[slot], tools) for slot, earlier in known.items()}
        score_s = time.perf_counter() - start

        rounds = Rounds(tools)
        requests = [
            GenerationRequest(
                key=self._key(*slot, tools),
                prompt_token_ids=[*self.prompts[slot[0]].token_ids, *prefix.token_ids],
                max_response_tokens=rollout.max_response_tokens - len(prefix.token_ids),
            )
            for slot in slots
            if not (prefix := prefixes.get(slot, Prefix())).whole
        ]
        responses = rounds.generate(tools.share(requests))
        drawn: list[Trajectory] = []
        for number, sample in slots:
            prefix = prefixes.get((number, sample), Prefix())
            key = self._key(number, sample, tools)
            token_ids, logprobs, truncated = prefix.token_ids, prefix.logprobs, prefix.truncated
            if not prefix.whole:
                token_ids = token_ids + responses[key].token_ids
                logprobs = logprobs + responses[key].logprobs
                truncated = responses[key].finish_reason == "length"
            drawn.append(
                Trajectory(
                    prompt=self.prompts[number],
                    epoch=epochs[key],
                    sample=sample,
                    token_ids=token_ids,
                    logprobs=logprobs,
                    token_versions=[tools.policy_version] * len(token_ids),
                    truncated=truncated,
                )
            )
        start = time.perf_counter()
        trajectories = rewarded(drawn, tools)
        reward_s = time.perf_counter() - start

        start = time.perf_counter()
        self._remember(dict(zip(slots, trajectories, strict=True)), prefixes, rows_now, tools)
        score_s += time.perf_counter() - start
        said, self._left_behind = self._left_behind, []
        return Collected(
            trajectories=trajectories,
            groups=[n for n in range(len(picked)) for _ in range(rollout.group_size)],
            requests=rounds.requests,
            parts=rounds.parts,
            epochs=epochs,
            rewards=rewards_by_key(trajectories, tools.rl_step),
            rollout_s=rounds.rollout_s,
            reward_s=reward_s,
            score_s=score_s,
            notes=said + _notes(known, prefixes),
        )

    def _name(self, slot: tuple[int, int]) -> tuple[str, int]:
        return self.prompts[slot[0]].prompt_id, slot[1]

    def _key(self, number: int, sample: int, tools: RolloutTools) -> Key:
        return tools.rl_step, self.prompts[number].prompt_id, sample, 0

    def _scored(
        self, responses: Mapping[tuple[int, int], list[int]], tools: RolloutTools
    ) -> dict[tuple[int, int], np.ndarray]:
        """Log-probs of responses under the policy in force: [N] each, with "exact" whole distributions [N, V]."""
        if not responses:
            return {}
        pairs = [(self.prompts[number].token_ids, tokens) for (number, _), tokens in responses.items()]
        return dict(zip(responses, tools.score(pairs, distributions=self.exact), strict=True))

    def _prefix(self, slot: tuple[int, int], earlier: Earlier, rows: np.ndarray, tools: RolloutTools) -> Prefix:
        """What of `earlier` the policy in force keeps, given its log-probs `rows` of it."""
        tokens = earlier.token_ids.tolist()
        rng = np.random.default_rng([self.recipe.seed, tools.rl_step, *slot])
        then = _of_tokens(earlier.rows, tokens) if self.exact else earlier.logprobs
        now = _of_tokens(rows, tokens) if self.exact else rows
        num = kept_prefix(now, then, self.config.leniency, rng.random(len(tokens)))
        kept, logprobs = tokens[:num], [float(logp) for logp in now[:num]]
        if num == len(tokens):
            return Prefix(token_ids=kept, logprobs=logprobs, num_kept=num, whole=True, truncated=earlier.truncated)
        if not self.exact:
            return Prefix(token_ids=kept, logprobs=logprobs, num_kept=num)
        drawn = int(rng.choice(rows.shape[1], p=residual(rows[num], earlier.rows[num])))
        ended = drawn in self._ends
        # A response that ended at its cap, or where the engine's context did, leaves no room behind its last token.
        full = num + 1 == self.recipe.rollout.max_response_tokens or (earlier.truncated and num + 1 == len(tokens))
        return Prefix(
            token_ids=[*kept, drawn],
            logprobs=[*logprobs, float(rows[num, drawn])],
            num_kept=num,
            whole=ended or full,
            truncated=full and not ended,
        )

    def _remember(
        self,
        trajectories: Mapping[tuple[int, int], Trajectory],
        prefixes: Mapping[tuple[int, int], Prefix],
        rows_now: Mapping[tuple[int, int], np.ndarray],
        tools: RolloutTools,
    ) -> None:
        """Keep the responses for the next visit; "exact" scores the new ones while their policy is in force."""
        rows: dict[tuple[int, int], np.ndarray] = {}
        if self.exact:
            same = {slot for slot, p in prefixes.items() if p.num_kept == len(trajectories[slot].token_ids)}
            new = {slot: t.token_ids for slot, t in trajectories.items() if slot not in same}
            rows = {slot: rows_now[slot] for slot in same} | self._scored(new, tools)
        for slot, t in trajectories.items():
            self._earlier[self._name(slot)] = Earlier(
                token_ids=np.array(t.token_ids, np.int32),
                logprobs=np.array(t.logprobs, np.float32),
                truncated=t.truncated,
                rows=np.asarray(rows.get(slot, _NO_ROWS), np.float32),
            )

    def _check_exact(self) -> None:
        rollout = self.recipe.rollout
        biased = (rollout.top_p, rollout.top_k, rollout.min_p) != (1.0, 0, 0.0)
        if biased:
            raise ConfigError(
                "rollout.reuse.residual = 'exact' knows the policy's whole distribution and not what top_p, top_k or "
                "min_p leave of it: leave them out, or set it to 'none'"
            )
        num_words = vocabulary_size(self.recipe.model)
        num_rows = len(self.prompts) * rollout.group_size * rollout.max_response_tokens
        if num_rows * num_words * 4 > MAX_ROWS_BYTES:
            raise ConfigError(
                f"rollout.reuse.residual = 'exact' keeps a distribution over {num_words:,} tokens for up to "
                f"{num_rows:,} tokens of all responses to all prompts, {num_rows * num_words * 4 / 2**30:,.1f} GiB: it "
                f"is for small vocabularies (up to {MAX_ROWS_BYTES >> 30} GiB); set it to 'none'"
            )

    def state_dict(self, folder: Path) -> dict[str, Any]:
        """Whose responses are known; they, with "exact" their distributions too, go to `EARLIER_FILE` in `folder`."""
        known = list(self._earlier.values())
        columns = {"token_ids": [e.token_ids for e in known], "logprobs": [e.logprobs for e in known]}
        if self.exact:
            columns["rows"] = [e.rows for e in known]
        save_ragged(folder / EARLIER_FILE, **columns)
        return {"earlier": [[*name, earlier.truncated] for name, earlier in self._earlier.items()]}

    def load_state_dict(self, state: Mapping[str, Any], folder: Path) -> None:
        """Go back to what `state_dict` gave, to nothing where it is of another way to roll out.

        ConfigError where it was made without the distributions "exact" needs, or with responses beyond the cap.
        """
        self._left_behind = left_behind(state, own="earlier")
        if "earlier" not in state:
            self._earlier = {}
            return
        columns = load_ragged(folder / EARLIER_FILE)
        if self.exact and "rows" not in columns:
            raise ConfigError(
                f"{folder / EARLIER_FILE} has no distributions: its run had no rollout.reuse.residual = 'exact'"
            )
        longest, cap = max(map(len, columns["token_ids"]), default=0), self.recipe.rollout.max_response_tokens
        if longest > cap:
            raise ConfigError(
                f"the checkpoint has a response of {longest} tokens to use again, and rollout.max_response_tokens is "
                f"{cap}: resume with as many"
            )
        rows = columns["rows"] if self.exact else [_NO_ROWS] * len(state["earlier"])
        self._earlier = {
            (prompt_id, sample): Earlier(token_ids=token_ids, logprobs=logprobs, truncated=truncated, rows=found)
            for (prompt_id, sample, truncated), token_ids, logprobs, found in zip(
                state["earlier"], columns["token_ids"], columns["logprobs"], rows, strict=True
            )
        }


def vocabulary_size(model: str) -> int:
    """How many logits a model has; ConfigError where its configuration does not load."""
    try:
        return int(AutoConfig.from_pretrained(model).get_text_config().vocab_size)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load a model's configuration from {model}: {str(error)[:200]}") from error


def end_tokens(model: str) -> frozenset[int]:
    """The tokens that end a response as vLLM ends it: the tokenizer's, and the generation configuration's."""
    try:
        generation = GenerationConfig.from_pretrained(model)
    except OSError:
        generation = GenerationConfig.from_model_config(AutoConfig.from_pretrained(model))
    ends = generation.eos_token_id
    listed = ends if isinstance(ends, list) else [ends]
    return frozenset(int(e) for e in (*listed, load_tokenizer(model).eos_token_id) if e is not None)


def _of_tokens(rows: np.ndarray, token_ids: Sequence[int]) -> np.ndarray:
    return rows[np.arange(len(token_ids)), list(token_ids)]


def _notes(known: Mapping[tuple[int, int], Earlier], prefixes: Mapping[tuple[int, int], Prefix]) -> list[str]:
    if not known:
        return []
    offered = sum(len(earlier.token_ids) for earlier in known.values())
    kept = sum(prefix.num_kept for prefix in prefixes.values())
    whole = sum(prefix.whole for prefix in prefixes.values())
    return [f"{kept} of {offered} tokens of earlier responses kept, {whole} of {len(known)} responses whole"]
