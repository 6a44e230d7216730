"""Training objectives of a drafter: `drafter_loss`, over one step or several unrolled ones, on packed sequences.

Step 0 drafts token t + 2 from the target's state at t, for every row. From row s on step i continues as at inference:
it reads the text's next token and the state of step i - 1, and attends to the keys of the target's states up to s and
its own since. EAGLE (arXiv 2401.15077) trains step 0 alone; HASS (arXiv 2408.15766) and EAGLE-3's training-time test
(arXiv 2503.01840) train the later ones too. The target's distributions follow from its captured states and LM head, so
no pass of the target is needed.
"""

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tltlab.records import frozen
from tltlab.runtime.drafter.sequences import PackedBatch
from tltlab.runtime.recipe.drafter import LossConfig
from tltlab.runtime.trainer.attention import causal_attention, chain_attention

from .head import DrafterHead
from .target import FrozenTarget

TOP_K = 10
"""HASS's K: the target's likeliest tokens that its distillation weighs more."""
MAX_LOGITS = 1 << 26
"""Logits held at a time, of drafter and target each; those beyond are recomputed instead of kept."""


@frozen
class DrafterLoss:
    """Scalars of one batch: `loss` to go backward from, and the acceptance.

    `accept[i]`: mean target probability of the greedy token of step i, over the rows whose earlier drafted tokens were
    the text's; this is the share that rejection sampling accepts. `reached[i]` is the number of those rows; where it is
    0 `accept[i]` is 0. `rows` is the number of rows that counted on step 0, whose token is the response's; with none
    the loss is 0.
    """

    loss: Tensor
    accept: list[float]
    reached: list[int]
    rows: int


def drafter_loss(
    head: DrafterHead, frozen: FrozenTarget, batch: PackedBatch, config: LossConfig, *, temperature: float = 1.0
) -> DrafterLoss:
    """The loss of one packed batch: a mean over rows whose token is the response's, then over weighted steps.

    "eagle" and "hass" weigh steps alike, and a step is hidden_weight * SmoothL1(drafted state, target's next state) +
    token_weight * CE(target's distribution, drafter's). "hass" adds top_weight * the terms of CE of the target's
    `TOP_K` likeliest tokens, and no gradient goes from one step to the one before. "eagle3" and "mtp" are CE alone,
    step i weighing decay ** i. A drafter of a part of the vocabulary learns the target's distribution within that part;
    rows whose likeliest token is not in it have a CE of 0. `temperature`, of the sampling, only counts in `accept`.

    Unlike here, the published trainers of HASS and EAGLE-3 add the steps' losses up, EAGLE-3's divides by the prompt's
    rows too, and EAGLE's and HASS's add noise to the target's states.
    """
    hass = config.kind == "hass"
    chains = Chains(head, frozen, batch)
    losses, weights = [], []
    accept, reached = [], []
    rows = 0
    kept = torch.ones(batch.num_rows, dtype=torch.bool, device=batch.mask.device)
    for step in range(config.num_unrolled):
        states, at, inside = chains.step()
        if hass:
            chains.states = states.detach()
        counted = inside & batch.mask[at]
        chosen = counted.nonzero()[:, 0]
        rows = len(chosen) if step == 0 else rows
        drafted, target = states[chosen], batch.next_hidden[at[chosen]]
        token_loss, top_loss, probability, greedy = _token_loss(head, frozen, drafted, target, temperature, hass)
        if config.kind in ("eagle3", "mtp"):
            losses.append(token_loss)
            weights.append(config.decay**step)
        else:
            hidden_loss = functional.smooth_l1_loss(drafted.float(), target.float()) if len(chosen) else drafted.sum()
            of_tokens = config.token_weight * token_loss + config.top_weight * top_loss
            losses.append(config.hidden_weight * hidden_loss + of_tokens)
            weights.append(1.0)
        alive = kept[chosen]
        reached.append(int(alive.sum()))
        accept.append(float(probability[alive].mean()) if reached[-1] else 0.0)
        hits = torch.zeros_like(kept)
        hits[chosen] = greedy == batch.next_token_ids[at[chosen]]
        kept &= hits
    total = torch.stack([w * loss for w, loss in zip(weights, losses, strict=True)]).sum() / sum(weights)
    return DrafterLoss(loss=total, accept=accept, reached=reached, rows=rows)


class Chains:
    """Chains from rows of a batch, side by side, at first from all: each `step` makes one state per chain."""

    def __init__(self, head: DrafterHead, frozen: FrozenTarget, batch: PackedBatch):
        self.head, self.embedding, self.batch = head, frozen.embedding, batch
        lengths = torch.tensor(batch.lengths, dtype=torch.long, device=batch.token_ids.device)
        ends = lengths.cumsum(0)
        self.rows = torch.arange(batch.num_rows, device=batch.token_ids.device)
        self.first, self.last = (torch.repeat_interleave(part, lengths) for part in (ends - lengths, ends - 1))
        self.num_steps = 0
        dtype = frozen.embedding.dtype
        self.states = head.first_states(batch.hidden.to(dtype), None if batch.aux is None else batch.aux.to(dtype))
        self._shared: tuple[Tensor, Tensor] | None = None
        self._own: list[tuple[Tensor, Tensor]] = []

    def keep(self, chosen: Tensor) -> None:
        """Go on with the chains where `chosen` (chains) is True."""
        self.rows, self.first, self.last = self.rows[chosen], self.first[chosen], self.last[chosen]
        self.states = self.states[chosen]
        self._own = [(k[:, :, chosen], v[:, :, chosen]) for k, v in self._own]

    def step(self) -> tuple[Tensor, Tensor, Tensor]:
        """Run one step of each chain from a row s; return states, rows and a mask, of T chains.

        The states (T, H), of step i, stand for the row after s + i. The rows s + i (T) are cut at the last one of the
        sequence. The mask (T) is True where s + i is within the sequence. Beyond its end a chain repeats the
        last row's token, and its states are meaningless.
        """
        batch = self.batch
        at = torch.minimum(self.rows + self.num_steps, self.last)
        inside = self.rows + self.num_steps <= self.last
        embeddings = functional.embedding(batch.token_ids[at], self.embedding)
        positions = (batch.positions[self.rows] + self.num_steps)[None]
        x, residual = self.head.inputs(embeddings[None], self.states[None], positions)
        q, k, v = self.head.layer.self_attn.project(x, self.head.rotation(positions))
        if self._shared is None:
            self._shared = k, v
            attended = causal_attention(q, k, v, batch.lengths)
        else:
            self._own.append((k, v))
            own_k, own_v = (torch.stack(parts, 3) for parts in zip(*self._own, strict=True))
            attended = chain_attention(q, *self._shared, own_k, own_v, self.rows, self.first)
        self.states = self.head.finish(residual, attended)[0]
        self.num_steps += 1
        return self.states, at, inside


def _token_loss(
    head: DrafterHead, frozen: FrozenTarget, drafted: Tensor, target: Tensor, temperature: float, ranked: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return mean cross-entropy and, if `ranked`, the part of the `TOP_K` likeliest tokens in it, else 0.

    Also, by row, the target's probability of the drafter's greedy token, and its id. Inputs are states drafted and the
    target's (N, H). The probability (N) is at a temperature; ids are (N).
    """

    def part(drafted: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        with torch.no_grad():
            expected = frozen.logits(target.to(frozen.lm_head.dtype)).float()
            within = expected if head.draft_ids is None else expected[:, head.draft_ids]
            probabilities = torch.softmax(within, -1)
            # A row whose likeliest token cannot be drafted teaches nothing.
            probabilities[within.amax(-1) < expected.amax(-1)] = 0.0
        logits = head.logits(drafted, frozen).float()
        with torch.no_grad():
            greedy = head.likeliest(logits)
            scaled = expected / temperature
            probability = (scaled.gather(1, greedy[:, None])[:, 0] - scaled.logsumexp(-1)).exp()
        cross = -(probabilities * torch.log_softmax(logits, -1))
        likeliest = probabilities.topk(min(TOP_K, probabilities.shape[-1]) if ranked else 0).indices
        return cross.sum(), cross.gather(1, likeliest).sum(), probability, greedy

    if not len(drafted):
        nothing = drafted.sum()
        return nothing, nothing, nothing.detach().expand(0), torch.zeros(0, dtype=torch.long, device=drafted.device)
    size = max(MAX_LOGITS // len(frozen.lm_head), 1)
    pairs = list(zip(drafted.split(size), target.split(size), strict=True))
    whole = len(pairs) == 1
    parts = [part(*pair) if whole else checkpoint(part, *pair, use_reentrant=False) for pair in pairs]
    cross, top, probability, greedy = zip(*parts, strict=True)
    cross_entropy, of_top = (torch.stack(sums).sum() / len(drafted) for sums in (cross, top))
    return cross_entropy, of_top, torch.cat(probability), torch.cat(greedy)
