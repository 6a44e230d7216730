"""Sampled behaviour of a model: reward and lengths."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tltlab.runtime.rollout.rewards import load_reward

from .tasks import TaskProblem


@torch.inference_mode()
def sample(
    model: Any, prompts: Sequence[Sequence[int]], *, temperature: float, max_tokens: int, seed: int
) -> list[list[int]]:
    """Sample one response per prompt, all at once: each token costs one pass over the responses still running.

    Prompts and responses are token ids; a response that was not clipped ends in eos.
    """
    eos, pad = model.config.eos_token_id, model.config.pad_token_id
    generator = torch.Generator().manual_seed(seed)
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    running = torch.arange(len(prompts))
    tokens: list[list[int]] = [[] for _ in prompts]
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
        for i, token in zip(running.tolist(), ids[:, 0].tolist(), strict=True):
            tokens[i].append(token)
        going = torch.nonzero(ids[:, 0] != eos)[:, 0]
        if not len(going):
            break
        if len(going) < len(running):
            cache.batch_select_indices(going)
            running, ids, mask, positions = running[going], ids[going], mask[going], positions[going]
        positions = positions[:, -1:] + 1
        mask = torch.cat([mask, torch.ones((len(mask), 1), dtype=mask.dtype)], dim=1)
    return tokens


def measure(
    model: Any,
    tokenizer: Any,
    problems: Sequence[TaskProblem],
    *,
    reward: str,
    samples_per_prompt: int,
    max_tokens: int,
    seed: int,
) -> dict[str, float]:
    """Sample `samples_per_prompt` responses of each problem and describe them.

    Lengths are in tokens, eos included.
    """
    started = time.perf_counter()
    check = load_reward(reward)
    copies = [problem for problem in problems for _ in range(samples_per_prompt)]
    prompts = [tokenizer(problem.prompt)["input_ids"] for problem in copies]
    responses = sample(model, prompts, temperature=1.0, max_tokens=max_tokens, seed=seed)
    texts = [tokenizer.decode(response, skip_special_tokens=True) for response in responses]
    rewards = [check(p.prompt, text, p.answer) for p, text in zip(copies, texts, strict=True)]
    lengths = np.array(list(map(len, responses)))
    percentiles = {f"length_p{q}": float(np.percentile(lengths, q)) for q in (50, 90, 95, 99)}
    figures = {
        "reward_mean": float(np.mean(rewards)),
        "length_mean": float(lengths.mean()),
        **percentiles,
        "length_max": float(lengths.max()),
        "length_p95_over_p50": percentiles["length_p95"] / percentiles["length_p50"],
        "clipped_share": float(np.mean([response[-1] != model.config.eos_token_id for response in responses])),
    }
    return {name: round(value, 4) for name, value in figures.items()} | {
        "num_prompts": len(problems),
        "samples_per_prompt": samples_per_prompt,
        "seconds": round(time.perf_counter() - started, 1),
    }
