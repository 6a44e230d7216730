"""Published algorithms as settings of one loss: what `train.algorithm` sets where a recipe says nothing."""

from __future__ import annotations

from typing import Any

ALGORITHMS: dict[str, dict[str, Any]] = {
    # Shao et al. 2024, arXiv 2402.03300.
    "grpo": {"advantage_scale": "group", "aggregation": "sequence", "clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.04},
    # Liu et al. 2025, arXiv 2503.20783.
    "dr-grpo": {"advantage_scale": "none", "aggregation": "constant", "clip_low": 0.2, "clip_high": 0.2},
    # Yu et al. 2025, arXiv 2503.14476.
    "dapo": {
        "advantage_scale": "group",
        "aggregation": "token",
        "clip_low": 0.2,
        "clip_high": 0.28,
        "overlong": "penalty",
        "sampling_rounds": 10,
    },
    # Liu et al. 2025, arXiv 2510.15110.
    "dler": {
        "advantage_scale": "batch",
        "aggregation": "token",
        "clip_low": 0.2,
        "clip_high": 0.28,
        "overlong": "zero",
        "sampling_rounds": 10,
    },
}
