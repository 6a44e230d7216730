"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon): momentum whose matrix steps are orthogonalised.

It is what lets a model of our own learn a reasoning task from scratch in two minutes of one CPU core.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class Muon(torch.optim.Optimizer):
    """For the matrices inside transformer blocks; embeddings, heads and norms want AdamW.

    Each step moves a matrix by lr * sqrt(max(1, rows / columns)) along the nearest semi-orthogonal matrix to its
    Nesterov momentum, so every direction of the update has the same length.

    `torch.optim.Muon` has the same rule, but orthogonalises in bfloat16: its steps are 1 to 2 % off, and a seed
    would make another model.
    """

    def __init__(self, params: Iterable[torch.Tensor], *, lr: float = 0.02, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; `closure` is not used."""
        for group in self.param_groups:
            updates: dict[torch.Size, list[tuple[torch.Tensor, torch.Tensor]]] = {}
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["momentum"] = torch.zeros_like(param)
                state["momentum"].lerp_(param.grad, 1 - group["momentum"])
                update = param.grad.lerp(state["momentum"], group["momentum"])
                updates.setdefault(param.shape, []).append((param, update))
            for (rows, columns), alike in updates.items():
                scale = group["lr"] * max(1.0, rows / columns) ** 0.5
                steps = orthogonalise(torch.stack([update for _, update in alike]))
                for (param, _), step in zip(alike, steps, strict=True):
                    param.add_(step, alpha=-scale)


def orthogonalise(matrices: torch.Tensor, *, iterations: int = 5) -> torch.Tensor:
    """Return about U V^T of each matrix [N, R, C] = U S V^T, by a quintic Newton-Schulz iteration.

    The coefficients trade accuracy for speed: singular values end between about 0.7 and 1.2.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    x: torch.Tensor = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x
