"""Traces from response lengths alone: a CSV of lengths from anyone's run, or a synthetic long tail."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from .errors import ConfigError
from .lengths_csv import tables_from_csv, tables_of_lengths
from .schema import Manifest
from .trace import Trace


def from_csv(
    path: str | Path,
    *,
    column: str | None = None,
    workers: int | None = None,
    group_size: int | None = None,
    max_response_tokens: int | None = None,
) -> Trace:
    """Read a CSV with one response length (tokens) per row as a trace; see `lengths_csv.tables_from_csv`."""
    return Trace.from_tables(
        *tables_from_csv(
            path, column=column, workers=workers, group_size=group_size, max_response_tokens=max_response_tokens
        )
    )


def generate(
    *,
    prompts: int = 64,
    group_size: int = 8,
    rl_steps: int = 4,
    median: float = 800.0,
    sigma: float = 1.0,
    prompt_share: float = 0.05,
    cap: int = 16384,
    prompt_tokens: int = 128,
    workers: int | None = None,
    seed: int = 0,
) -> Trace:
    """Draw a synthetic trace with log-normal response lengths.

    log L = log(median) + sigma * (sqrt(share) * z_prompt + sqrt(1 - share) * z_sample), z standard normal, rounded,
    at least 1 token, cut at `cap` ("length"). `prompt_share` is the share of the variance of log L that the prompt
    explains (its intraclass correlation before the cut): about 0.05 for a base model early in RL, 0.9 for reasoning
    models. Every RL step has prompts of its own. Same arguments, same trace. Raises ConfigError.

    >>> generate(prompts=2, group_size=2, rl_steps=1, seed=0).outcomes.response_tokens.tolist()
    [1536, 911, 461, 1105]
    """
    counts = {
        "prompts": prompts,
        "group_size": group_size,
        "rl_steps": rl_steps,
        "cap": cap,
        "workers": 1 if workers is None else workers,
    }
    for name, value in counts.items():
        if value < 1:
            raise ConfigError(f"{name} is {value}, it must be at least 1")
    if not median > 0 or not sigma >= 0 or not 0 <= prompt_share <= 1 or prompt_tokens < 0:
        raise ConfigError(
            f"got median {median}, sigma {sigma}, prompt share {prompt_share}, prompt tokens {prompt_tokens}; "
            "wanted median > 0, sigma >= 0, 0 <= prompt share <= 1, prompt tokens >= 0"
        )
    rng = np.random.default_rng(seed)
    shape = (rl_steps, prompts, group_size)
    spread = np.sqrt(prompt_share) * rng.standard_normal((*shape[:2], 1))
    spread = spread + np.sqrt(1.0 - prompt_share) * rng.standard_normal(shape)
    raw = np.exp(np.log(median) + sigma * spread).ravel()
    lengths = np.clip(np.rint(np.minimum(raw, cap)), 1, cap).astype(np.int64)
    step, prompt, sample = (axis.ravel() for axis in np.indices(shape))
    key = pd.DataFrame(
        {"rl_step": step, "prompt_id": [f"s{s}-p{p}" for s, p in zip(step, prompt, strict=True)], "sample": sample}
    )
    manifest = Manifest(
        kind="synthetic",
        name="log-normal",
        num_workers=workers,
        max_response_tokens=cap,
        group_size=group_size,
        seed=seed,
        notes=f"log-normal lengths: median {median:g}, sigma {sigma:g}, prompt share {prompt_share:g}, cap {cap}",
    )
    return Trace.from_tables(manifest, tables_of_lengths(key, lengths, np.asarray(prompt_tokens), cap, raw >= cap))
