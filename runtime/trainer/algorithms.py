"""Published algorithms as settings of one loss: what `train.algorithm` sets where a recipe says nothing."""

from __future__ import annotations

from typing import Any

ALGORITHMS: dict[str, dict[str, Any]] = {
    # Shao et al. 2024, arXiv 2402.03300, Eq. 3; KL coefficient 0.04 (section 4.2). It names no clip range: PPO's 0.2.
    "grpo": {
        "advantage_scale": "group",
        "aggregation": "sequence",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "kl_coef": 0.04,
        "overlong": "keep",
        "sampling_rounds": 1,
    },
    # Liu et al. 2025, arXiv 2503.20783: neither standard deviation nor length in a denominator, no reference model.
    "dr-grpo": {
        "advantage_scale": "none",
        "aggregation": "constant",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "kl_coef": 0.0,
        "overlong": "keep",
        "sampling_rounds": 1,
    },
    # Yu et al. 2025, arXiv 2503.14476, Eqs. 8-13: clip-higher, token-level loss, soft overlong punishment, dynamic
    # sampling (at most 10 rollouts, as in its published scripts); overlong filtering is its other way: "filter".
    "dapo": {
        "advantage_scale": "group",
        "aggregation": "token",
        "clip_low": 0.2,
        "clip_high": 0.28,
        "kl_coef": 0.0,
        "overlong": "penalty",
        "sampling_rounds": 10,
    },
    # Liu et al. 2025, arXiv 2510.15110: DAPO's clip and dynamic sampling, rewards normalised over the batch, and
    # truncation as the only length penalty.
    "dler": {
        "advantage_scale": "batch",
        "aggregation": "token",
        "clip_low": 0.2,
        "clip_high": 0.28,
        "kl_coef": 0.0,
        "overlong": "zero",
        "sampling_rounds": 10,
    },
}
