"""Training data of an update: samples, their advantages, mini-batches and ranks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tltlab.arrays import Tokens
from tltlab.errors import ConfigError, RunError
from tltlab.files import found_in
from tltlab.own import load_function, raised
from tltlab.records import frozen
from tltlab.runtime.recipe.recipe import Recipe
from tltlab.runtime.recipe.sections import TrainConfig

from .advantages import advantages, shape_rewards, token_weights
from .ranks import ranks_of

Pair = tuple[Sequence[int] | Tokens, Sequence[int] | Tokens]
"""Token ids of a prompt, one at least, and of its response."""


@frozen
class Sample:
    """One whole response of N tokens to train on.

    `logprobs` are the behaviour's as the engine returned them, N natural logarithms. `group` numbers its prompt;
    `truncated`: it ended at its cap. Tokens whose `from_tool` is 1 are a tool's: they are read, not trained on (empty:
    there are none). `name` identifies it in messages. A rank that does not compute it has only its length. `terms` are
    the values of the reward's terms, in the recipe's order; `advantage` is that of the user's own function.
    """

    prompt_token_ids: Sequence[int] | Tokens
    token_ids: Sequence[int] | Tokens
    logprobs: Sequence[float] | npt.NDArray[np.float32]
    reward: float
    group: int
    truncated: bool = False
    from_tool: Sequence[int] | npt.NDArray[np.int8] = ()
    name: str = "a response"
    terms: Sequence[float] = ()
    advantage: float | None = None

    @property
    def num_drawn(self) -> int:
        """Number of tokens that a policy drew."""
        return len(self.token_ids) - int(np.sum(self.from_tool, dtype=np.int64))

    def drawn(self) -> Tensor:
        """Return [N], bool: True for tokens that a policy drew."""
        if not len(self.from_tool):
            return torch.ones(len(self.token_ids), dtype=torch.bool)
        return torch.from_numpy(np.asarray(self.from_tool, np.int8) == 0)

    def in_arrays(self) -> Sample:
        """Return the sample as it is sent: arrays go to Ray's store as they lie in memory."""
        tokens, logprobs = np.asarray(self.token_ids, np.int32), np.asarray(self.logprobs, np.float32)
        return replace(self, token_ids=tokens, logprobs=logprobs, from_tool=np.asarray(self.from_tool, np.int8))

    def without_tokens(self) -> Sample:
        """Return the sample for ranks that do not compute it: equally long, of tokens that take no memory."""
        tokens = range(len(self.token_ids))
        return replace(self, prompt_token_ids=range(len(self.prompt_token_ids)), token_ids=tokens, logprobs=())


@frozen
class TrainingValues:
    """Training values of N responses, [N] each: `lengths` in tokens, and `num_drawn`, those that a policy drew.

    `counted` ones have a share in the means of their mini-batch. Those of them that have an advantage and a drawn token
    are `useful`. `trained` ones are computed: with a penalty for the distance to the reference, or a bonus for entropy,
    others too.
    """

    lengths: Tensor
    num_drawn: Tensor
    advantages: Tensor
    counted: Tensor
    useful: Tensor
    trained: Tensor

    @classmethod
    def of(cls, samples: Sequence[Sample], config: TrainConfig, max_response_tokens: int) -> TrainingValues:
        lengths, truncated, groups = _tensors(samples)
        own = [s.advantage for s in samples if s.advantage is not None]
        advantage = torch.tensor(own, dtype=torch.float32)
        if len(own) < len(samples):
            rewards = shaped(samples, config, max_response_tokens)
            advantage = advantages(rewards, groups, scale=config.advantage_scale, baseline=config.baseline)
        counted = ~truncated if config.overlong == "filter" else torch.ones(len(samples), dtype=torch.bool)
        num_drawn = torch.tensor([s.num_drawn for s in samples])
        computable = counted & num_drawn.gt(0)
        useful = computable & advantage.ne(0)
        trained = computable if config.kl_coef or config.entropy_coef else useful
        return cls(
            lengths=lengths, num_drawn=num_drawn, advantages=advantage, counted=counted, useful=useful, trained=trained
        )


def _tensors(samples: Sequence[Sample]) -> tuple[Tensor, Tensor, Tensor]:
    """Return lengths in tokens, whether truncated, and groups, [N] each."""
    return (
        torch.tensor([len(s.token_ids) for s in samples]),
        torch.tensor([s.truncated for s in samples], dtype=torch.bool),
        torch.tensor([s.group for s in samples], dtype=torch.int64),
    )


def shaped(samples: Sequence[Sample], config: TrainConfig, max_response_tokens: int) -> Tensor:
    """Return the training rewards [N], float32, after `train.overlong` (`shape_rewards`)."""
    lengths, truncated, _ = _tensors(samples)
    return shape_rewards(
        torch.tensor([s.reward for s in samples], dtype=torch.float32),
        lengths,
        truncated,
        overlong=config.overlong,
        buffer=config.overlong_buffer,
        max_response_tokens=max_response_tokens,
    )


def useful_groups(samples: Sequence[Sample], config: TrainConfig, max_response_tokens: int) -> set[int]:
    """Return the groups that can train: one of their responses has an advantage and a share in the loss."""
    useful = TrainingValues.of(samples, config, max_response_tokens).useful.tolist()
    return {sample.group for sample, of_use in zip(samples, useful, strict=True) if of_use}


class OwnAdvantage:
    """The user's own advantages, by `train.advantage`, a `module:function` searched last in the recipe's `code`.

    The function is called once an RL step, in the run's driver, as function(rewards, groups, lengths, truncated, terms)
    on the N responses to train on: `rewards` [N] float32, after `train.overlong`; `groups` [N], labels of prompts;
    `lengths` [N] in tokens; `truncated` [N], bool; `terms`, a mapping from the name of a reward term to its values [N].
    It returns their advantages, a tensor [N] of finite floats. ConfigError where it cannot be imported or breaks that,
    on a few made-up responses already here.
    """

    def __init__(self, recipe: Recipe):
        self._recipe, self._path = recipe, f"train.advantage {recipe.train.advantage}"
        with found_in(recipe.code):
            self._function = load_function(
                str(recipe.train.advantage), self._path, "rewards, groups, lengths, truncated, terms"
            )
        num = 2 * recipe.rollout.group_size
        self([
            Sample(
                prompt_token_ids=[0], token_ids=[0] * (1 + n % 3), logprobs=[], reward=float(n % 2), group=2 * n // num,
                truncated=n % 3 == 2, terms=[float(n % 2)] * len(recipe.reward_terms),
            )
            for n in range(num)
        ])  # fmt: skip

    def __call__(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples with their advantages."""
        if not samples:
            return []
        rollout, labels = self._recipe.rollout, [term.label for term in self._recipe.reward_terms]
        values = zip(*(sample.terms for sample in samples), strict=True)
        lengths, truncated, groups = _tensors(samples)
        arguments = (
            shaped(samples, self._recipe.train, rollout.max_response_tokens),
            groups,
            lengths,
            truncated,
            {label: torch.tensor(each, dtype=torch.float32) for label, each in zip(labels, values, strict=True)},
        )
        # Standard output is for results.
        with redirect_stdout(sys.stderr), found_in(self._recipe.code):
            try:
                found = self._function(*arguments)
            except Exception as error:  # whatever a user's function raises
                raise raised(error, self._path) from error
        fault = f"a {type(found).__name__}"
        if isinstance(found, Tensor):
            fault = f"{found.dtype} {list(found.shape)}"
            if found.is_floating_point() and found.shape == (len(samples),):
                found = found.detach().float().cpu()
                fault = "" if bool(found.isfinite().all()) else "NaN or infinity"
        if fault:
            raise ConfigError(f"{self._path} returned {fault}, not a tensor of finite floats, [{len(samples)}]")
        return [replace(sample, advantage=value) for sample, value in zip(samples, found.tolist(), strict=True)]


def check(samples: Sequence[Sample], config: TrainConfig, max_response_tokens: int, rl_step: int) -> str | None:
    """Check an update's samples beforehand; return a sentence where no response has an advantage.

    RunError where a log-prob of the engine or an advantage is not finite.
    """
    for sample in samples:
        logprobs = np.asarray(sample.logprobs, np.float32)
        if not np.isfinite(logprobs).all():
            place = int(np.argmin(np.isfinite(logprobs)))
            raise RunError(
                f"RL step {rl_step}: the engine gave token {place} of {sample.name} the log-prob {logprobs[place]:g}, "
                "and nothing was trained on it: look for NaN in the model's weights, and at dtype and quantization in "
                "rollout.vllm"
            )
    values = TrainingValues.of(samples, config, max_response_tokens)
    finite = values.advantages.isfinite()
    if not bool(finite.all()):
        sample = samples[int(finite.int().argmin())]
        raise RunError(
            f"RL step {rl_step}: the advantage of {sample.name}, whose reward is {sample.reward:g}, is not finite with "
            f'train.advantage_scale = "{config.advantage_scale}", and nothing was trained on it: let the reward '
            "function give smaller numbers"
        )
    if not samples or bool(values.useful.any()):
        return None
    rewards = [sample.reward for sample in samples]
    why = f"{len(samples)} rewards of {min(rewards):g} to {max(rewards):g}, and none differs from others of its prompt"
    if not bool(values.counted.any()):
        why = f"all {len(samples)} responses are truncated, and filtered out by train.overlong"
    moves = "only train.kl_coef or train.entropy_coef moves" if bool(values.trained.any()) else "nothing moves"
    return f"{why}: no response that counts has an advantage, and {moves} the weights"


def minibatches_of(num: int, config: TrainConfig, seed: int, rl_step: int, number: int = 0) -> list[Tensor]:
    """Return the responses of each mini-batch of pass `number` of the update of `rl_step`, in random order."""
    # numpy pads seeds with zeros: the first pass has the order of a single one.
    order = torch.from_numpy(np.random.default_rng([seed, rl_step, number]).permutation(num))
    return list(order.tensor_split(config.minibatches))


def share_out(
    samples: Sequence[Sample], config: TrainConfig, ranks: int, *, seed: int, rl_step: int, max_response_tokens: int
) -> list[int]:
    """Return the data rank of each sample, with equal work for all in each mini-batch of `rl_step`'s first pass.

    Untrained samples are dealt out by themselves: only their log-probs are computed.
    """
    if ranks == 1:
        return [0] * len(samples)
    trained = TrainingValues.of(samples, config, max_response_tokens).trained
    parts = []
    for rows in minibatches_of(len(samples), config, seed, rl_step):
        parts += [rows[trained[rows]].tolist(), rows[~trained[rows]].tolist()]
    lengths = [sum(map(len, pair)) for pair in pairs_of(samples)]
    return ranks_of(lengths, parts, ranks, config.tokens_per_microbatch)


@frozen
class UpdateBatch:
    """N responses to train on. Lists have an entry for each of them, of its n tokens.

    `drawn` is True for tokens that a policy drew. `columns` are fields of `losses.LossTokens`: denominators of ratios,
    the engine's log-probs, importance weights, and with a penalty the reference's log-probs ([0] where untrained).
    """

    pairs: list[Pair]
    values: TrainingValues
    drawn: list[Tensor]
    columns: dict[str, list[Tensor]]

    def token_weights(self, rows: Tensor, config: TrainConfig, max_response_tokens: int) -> Tensor:
        """Return [N]: the weight of each token of a response in the mini-batch of `rows`; 0 for all others."""
        weights = torch.zeros(len(self.pairs))
        weights[rows] = token_weights(
            self.values.num_drawn[rows],
            self.values.counted[rows],
            aggregation=config.aggregation,
            max_response_tokens=max_response_tokens,
        )
        return weights


def pairs_of(samples: Sequence[Sample]) -> list[Pair]:
    """Return the token ids of prompt and response of each."""
    return [(s.prompt_token_ids, s.token_ids) for s in samples]
