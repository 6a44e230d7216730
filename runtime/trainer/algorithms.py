"""Published algorithms as settings of one loss: values of `train.algorithm` for fields that a recipe leaves out."""

from __future__ import annotations

from typing import Any

_SETTINGS = ("advantage_scale", "aggregation", "clip_low", "clip_high", "kl_coef", "overlong", "sampling_rounds")
_VALUES: dict[str, tuple[Any, ...]] = {
    # Shao et al. 2024, arXiv 2402.03300, Eq. 3; KL coefficient 0.04 (section 4.2). No clip range given: PPO's 0.2.
    "grpo": ("group", "sequence", 0.2, 0.2, 0.04, "keep", 1),
    # Liu et al. 2025, arXiv 2503.20783: neither standard deviation nor length in a denominator, no reference model.
    "dr-grpo": ("none", "constant", 0.2, 0.2, 0.0, "keep", 1),
    # Yu et al. 2025, arXiv 2503.14476, Eqs. 8-13: clip-higher, token-level loss, soft overlong punishment, dynamic
    # sampling (at most 10 rollouts, as in its published scripts); overlong filtering is its other way: "filter".
    "dapo": ("group", "token", 0.2, 0.28, 0.0, "penalty", 10),
    # Liu et al. 2025, arXiv 2510.15110: DAPO's clip and dynamic sampling, rewards normalised over the batch, and
    # truncation as the only length penalty.
    "dler": ("batch", "token", 0.2, 0.28, 0.0, "zero", 10),
}
ALGORITHMS: dict[str, dict[str, Any]] = {
    name: dict(zip(_SETTINGS, values, strict=True)) for name, values in _VALUES.items()
}
