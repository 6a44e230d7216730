"""Sampled behaviour of a model: reward, lengths, entropy, repetition."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tltlab.runtime.rollout.rewards import load_reward
from tltlab.stats import intraclass_correlation

from .tasks import TaskProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """One response. `token_ids` ends in eos unless it was `clipped`; `entropies` are nats, one for each token."""

    token_ids: list[int]
    entropies: list[float]
    clipped: bool


@torch.inference_mode()
def sample(
    model: Any, prompts: Sequence[Sequence[int]], *, temperature: float, max_tokens: int, seed: int
) -> list[Sampled]:
    """Sample one response per prompt, all at once: each token costs one pass over the responses still running.

    `prompts` are token ids. The entropy at a position is of the sampling distribution, at `temperature`.
    """
    eos, pad = model.config.eos_token_id, model.config.pad_token_id
    generator = torch.Generator().manual_seed(seed)
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    running = torch.arange(len(prompts))
    tokens: list[list[int]] = [[] for _ in prompts]
    entropies: list[list[float]] = [[] for _ in prompts]
    cache = None
    for _ in range(max_tokens):
        result = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache = result.past_key_values
        logp = torch.log_softmax(result.logits[:, -1].float() / temperature, dim=-1)
        ids = torch.multinomial(logp.exp(), 1, generator=generator)
        entropy = -(logp.exp() * logp).sum(-1)
        for i, token, nats in zip(running.tolist(), ids[:, 0].tolist(), entropy.tolist(), strict=True):
            tokens[i].append(token)
            entropies[i].append(nats)
        going = torch.nonzero(ids[:, 0] != eos)[:, 0]
        if not len(going):
            break
        if len(going) < len(running):
            cache.batch_select_indices(going)
            running, ids, mask, positions = running[going], ids[going], mask[going], positions[going]
        positions = positions[:, -1:] + 1
        mask = torch.cat([mask, torch.ones((len(mask), 1), dtype=mask.dtype)], dim=1)
    return [
        Sampled(token_ids=ids, entropies=nats, clipped=ids[-1] != eos)
        for ids, nats in zip(tokens, entropies, strict=True)
    ]


def measure(
    model: Any,
    tokenizer: Any,
    problems: Sequence[TaskProblem],
    *,
    reward: str,
    samples_per_prompt: int,
    temperature: float,
    max_tokens: int,
    seed: int,
) -> dict[str, float]:
    """Sample `samples_per_prompt` responses of each problem and describe them.

    Lengths are in tokens, eos included. `length_share_prompt` is the share of the variance of log length that the
    prompt explains (`prompt_share`), `length_share_within` the rest. `entropy_nats` is the mean over all tokens of the
    entropy of the distribution sampled from. `repeated_4gram_share` is the share of 4-grams that occurred earlier in
    the same response, pooled over responses: an upper bound for a prompt-lookup drafter.
    """
    started = time.perf_counter()
    check = load_reward(reward)
    copies = [problem for problem in problems for _ in range(samples_per_prompt)]
    prompts = [tokenizer(problem.prompt)["input_ids"] for problem in copies]
    responses = sample(model, prompts, temperature=temperature, max_tokens=max_tokens, seed=seed)
    texts = [tokenizer.decode(response.token_ids, skip_special_tokens=True) for response in responses]
    rewards = [check(p.prompt, text, p.answer) for p, text in zip(copies, texts, strict=True)]
    lengths = np.array([len(response.token_ids) for response in responses])
    percentiles = {f"length_p{q}": float(np.percentile(lengths, q)) for q in (50, 90, 95, 99)}
    share = prompt_share(np.log(lengths).reshape(len(problems), samples_per_prompt))
    grams = [(repeated_ngrams(r.token_ids), max(len(r.token_ids) - 3, 0)) for r in responses]
    figures = {
        "reward_mean": float(np.mean(rewards)),
        "length_mean": float(lengths.mean()),
        **percentiles,
        "length_max": float(lengths.max()),
        "length_p95_over_p50": percentiles["length_p95"] / percentiles["length_p50"],
        "length_share_prompt": share,
        "length_share_within": 1 - share,
        "entropy_nats": float(np.mean(np.concatenate([r.entropies for r in responses]))),
        "repeated_4gram_share": sum(repeats for repeats, _ in grams) / max(sum(total for _, total in grams), 1),
        "clipped_share": float(np.mean([r.clipped for r in responses])),
    }
    return {name: round(value, 4) for name, value in figures.items()} | {
        "temperature": temperature,
        "num_prompts": len(problems),
        "samples_per_prompt": samples_per_prompt,
        "seconds": round(time.perf_counter() - started, 1),
    }


def prompt_share(values: np.ndarray) -> float:
    """Return the intraclass correlation ICC(1) of `values` [prompts, samples], not below 0. All values equal: 0.

    >>> prompt_share(np.array([[1.0, 1.0], [2.0, 2.0]]))
    1.0
    """
    samples = values.shape[1]
    between = samples * values.mean(axis=1).var(ddof=1)
    within = values.var(axis=1, ddof=1).mean()
    return float(intraclass_correlation(between, within, samples) or 0.0)


def repeated_ngrams(tokens: Sequence[int], n: int = 4) -> int:
    """Return the number of the len(tokens) - n + 1 n-grams that occurred before in `tokens`.

    >>> repeated_ngrams([1, 2, 3, 1, 2, 3], n=3)
    1
    """
    grams = list(zip(*(tokens[i:] for i in range(n)), strict=False))
    return len(grams) - len(set(grams))
