"""Fresh drafter heads, and their initial fit: `fit_inputs`.

The first task of a fresh EAGLE head is nearly linear: the target's next state given its last one and the token between.
Least squares solves it in one pass over a few sequences, before any update. EAGLE-3 heads start from random weights and
the target's own final norm.
"""

from pathlib import Path

import torch
from torch.nn import functional

from tltlab.errors import ConfigError
from tltlab.runtime.drafter.sequences import PackedBatch
from tltlab.runtime.recipe.drafter import Method

from .head import DrafterHead, Eagle3Head, EagleHead, default_aux_layers, layer_config, mtp_of_model
from .target import FINAL_NORM, FrozenTarget, is_mimo, read_config, read_weights

GAIN = 0.5
"""Standard deviation of random weights, times 1 / sqrt(inputs)."""
RIDGE = 1e-2
"""Ridge penalty relative to the inputs' mean square."""


def new_head(target_folder: str | Path, method: Method, seed: int) -> DrafterHead:
    """Return a head to train for the target in a folder, determined by the seed; for "mtp" the target's own.

    ConfigError for a folder without a model, or a model without the parts that a head needs.
    """
    if method == "mtp":
        return mtp_of_model(target_folder)
    target = read_config(target_folder)
    if method == "eagle" and is_mimo(target):
        raise ConfigError(
            f"{target_folder} is a MiMo, whose states come before its final norm, and an EAGLE head reads those after "
            'it: take loss.kind = "eagle3", or "mtp" for its own MTP layer'
        )
    config, layers = layer_config(target), default_aux_layers(target.num_hidden_layers)
    head: DrafterHead = (
        EagleHead(config) if method == "eagle" else Eagle3Head(config, layers, verifier=str(target_folder))
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, value in sorted(head.named_parameters()):
            if value.dim() == 2:
                value.normal_(0.0, GAIN * value.shape[1] ** -0.5, generator=generator)
        if isinstance(head, Eagle3Head):
            norm = read_weights(target_folder, [FINAL_NORM])
            if FINAL_NORM in norm:
                head.norm.weight.copy_(norm[FINAL_NORM])
    return head


@torch.no_grad()
def fit_inputs(head: DrafterHead, frozen: FrozenTarget, batch: PackedBatch) -> None:
    """Set a fresh EAGLE head's `fc` to the best linear predictor of the target's next states, and damp its layer.

    Ridge regression of next states (T, H) on embeddings and states (T, 2 H). For untrained heads only: it shrinks the
    layer's output projections to a tenth. An EAGLE-3 head, whose `fc` reads no embedding, is left unchanged.
    """
    if not isinstance(head, EagleHead) or not batch.num_rows:
        return
    embeddings = functional.embedding(batch.token_ids, frozen.embedding)
    x = torch.cat([embeddings.float(), batch.hidden.float()], -1)
    gram = x.T @ x
    gram.diagonal().add_(RIDGE * gram.diagonal().mean())
    head.fc.weight.copy_(torch.linalg.solve(gram, x.T @ batch.next_hidden.float()).T)
    head.layer.self_attn.o_proj.weight.mul_(0.1)
    head.layer.mlp.down_proj.weight.mul_(0.1)
