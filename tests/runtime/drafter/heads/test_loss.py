"""Losses against the same computed one chain at a time."""

import pytest
import torch

from tltlab.runtime.drafter.heads.loss import drafter_loss
from tltlab.runtime.drafter.sequences import pack
from tltlab.runtime.recipe.drafter import LossConfig

from ..small_heads import HALF, drafted_states, made_head, made_sequence, made_target

KINDS = ["eagle", "hass", "eagle3"]


def slow_loss(head, frozen, sequences, config, temperature):
    """The loss, accept and reached: every chain drafted on its own, every row's terms written out."""
    terms = [[] for _ in range(config.num_unrolled)]
    kept = [[] for _ in range(config.num_unrolled)]
    ids = list(range(len(frozen.lm_head))) if head.draft_ids is None else head.draft_ids.tolist()
    for sequence in sequences:
        last = sequence.num_rows - 2
        for start in range(last + 1):
            alive = True
            steps = min(config.num_unrolled, last - start + 1)
            states = drafted_states(head, frozen, sequence, start, steps, detached=config.kind == "hass")
            for step, state in enumerate(states):
                row = start + step
                if row + 2 < sequence.prompt_tokens:
                    alive = False
                    continue
                target = sequence.hidden[row + 1]
                wanted = frozen.lm_head @ target
                logits = head.logits(state, frozen)
                within = torch.softmax(wanted[ids], 0)
                entropy = -within * (logits - logits.logsumexp(0))
                token = entropy.sum() if int(wanted.argmax()) in ids else 0.0 * entropy.sum()
                likeliest = sorted(range(len(ids)), key=lambda word: -within[word])[:10]
                top = sum(entropy[word] for word in likeliest) if config.kind == "hass" else 0.0
                distance = (state - target).abs()
                smooth = torch.where(distance < 1, distance**2 / 2, distance - 0.5).mean()
                eagle = config.hidden_weight * smooth + config.token_weight * token + config.top_weight * top
                terms[step].append(token if config.kind == "eagle3" else eagle)
                greedy = ids[int(logits.argmax())]
                if alive:
                    kept[step].append(float(torch.softmax(wanted / temperature, 0)[greedy]))
                alive = alive and greedy == int(sequence.token_ids[row + 2])
    weights = [config.decay**i if config.kind == "eagle3" else 1.0 for i in range(config.num_unrolled)]
    per_step = [torch.stack(rows).mean() if rows else torch.zeros(()) for rows in terms]
    total = torch.stack([w * value for w, value in zip(weights, per_step, strict=True)]).sum() / sum(weights)
    return total, [sum(rows) / len(rows) if rows else 0.0 for rows in kept], [len(rows) for rows in kept]


def obedient(head, frozen, sequence):
    """The same with its tokens rewritten, from left to right, to what the head would draft, except every fifth."""
    for row in range(sequence.num_rows - 1):
        if row % 5 < 4:
            state = drafted_states(head, frozen, sequence, row, 1)[0]
            sequence.token_ids[row + 2] = head.likeliest(head.logits(state, frozen))
    return sequence


@pytest.mark.parametrize(("kind", "vocabulary"), [*((kind, None) for kind in KINDS), ("eagle3", HALF)])
def test_the_loss_is_that_of_single_chains(kind, vocabulary, monkeypatch):
    """What is packed beside a chain, or comes after it, is not in it, whole or in parts."""
    monkeypatch.setattr("tltlab.runtime.trainer.attention.CHUNK", 5)
    config = LossConfig(kind=kind, unroll=3, hidden_weight=0.7, token_weight=0.3, top_weight=0.6)
    head, frozen = made_head(config.method, vocabulary=vocabulary), made_target()
    sequences = [made_sequence(n, seed=n, first_position=n, prompt_tokens=p) for n, p in ((14, 0), (9, 5), (3, 20))]
    sequences = [obedient(head, frozen, sequence) for sequence in sequences]
    fast = drafter_loss(head, frozen, pack(sequences), config, temperature=0.5)
    fast.loss.backward()
    gradients = {name: value.grad.clone() for name, value in head.named_parameters()}
    assert all(gradient.any() for gradient in gradients.values())
    head.zero_grad()
    slow, accept, reached = slow_loss(head, frozen, sequences, config, 0.5)
    slow.backward()
    assert float(fast.loss.detach()) == pytest.approx(float(slow.detach()), rel=1e-5)
    assert fast.accept == pytest.approx(accept, rel=1e-4)
    assert fast.reached == reached
    assert reached[0] == fast.rows == 13 + 5
    assert 0 < reached[2] < reached[1] < reached[0]
    for name, value in head.named_parameters():
        assert (gradients[name] - value.grad).norm() < 1e-3 * value.grad.norm(), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_without_a_response_token_teaches_nothing(kind):
    config = LossConfig(kind=kind, unroll=2)
    head, frozen = made_head(config.method), made_target()
    for sequence in (made_sequence(6, prompt_tokens=99), made_sequence(1), made_sequence(0)):
        found = drafter_loss(head, frozen, pack([sequence]), config)
        found.loss.backward()
        assert (float(found.loss.detach()), found.rows, found.accept, found.reached) == (0.0, 0, [0.0, 0.0], [0, 0])
        assert all(value.grad is None or not value.grad.any() for value in head.parameters())
    head.zero_grad()


def test_logits_in_parts_change_nothing(monkeypatch):
    head, frozen, batch = made_head("eagle3"), made_target(), pack([made_sequence(40)])
    found = {}
    for limit in (1 << 26, 13 * 7):
        monkeypatch.setattr("tltlab.runtime.drafter.heads.loss.MAX_LOGITS", limit)
        head.zero_grad()
        loss = drafter_loss(head, frozen, batch, LossConfig(kind="eagle3", unroll=2))
        loss.loss.backward()
        found[limit] = (loss, head.get_parameter("fc.weight").grad.clone())
    (whole, gradient), (parts, in_parts) = found.values()
    assert float(whole.loss.detach()) == pytest.approx(float(parts.loss.detach()), rel=1e-6)
    assert whole.accept == pytest.approx(parts.accept)
    assert torch.allclose(gradient, in_parts, atol=1e-6)
