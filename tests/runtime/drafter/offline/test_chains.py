"""What a drafter would have had accepted along a text, against chains drafted one by one."""

import pytest
import torch

from tltlab.runtime.drafter.offline.chains import kept_along

from ..small_heads import HALF, made_head, made_sequence, made_target, one_pass
from .easy_target import naive


def draft(head, frozen, sequence, known, depth):
    """The tokens drafted after the first `known` of a text, each by a pass over everything before it."""
    text = sequence.token_ids[:known].tolist()
    states = head.first_states(sequence.hidden, sequence.aux)[: known - 1]
    for _ in range(depth):
        out = one_pass(head, frozen, text[1:], states, sequence.first_position)[-1:]
        text.append(int(head.likeliest(head.logits(out, frozen))))
        states = torch.cat([states, out])
    return text[known:]


def agreeable(head, frozen, sequence):
    """The same with its text rewritten to runs of what the head drafts, of several lengths, and odd tokens between."""
    at, run = 2, 0
    while at < len(sequence.token_ids):
        for token in draft(head, frozen, sequence, at, run % 6):
            if at < len(sequence.token_ids):
                sequence.token_ids[at] = token
            at += 1
        at, run = at + 1, run + 1
    return sequence


@pytest.mark.parametrize(("method", "vocabulary"), [("eagle", None), ("eagle3", None), ("eagle3", HALF)])
@pytest.mark.parametrize("depth", [1, 4])
def test_kept_is_that_of_single_chains(method, vocabulary, depth, monkeypatch):
    head, frozen = made_head(method, vocabulary=vocabulary), made_target()
    with torch.inference_mode():
        sequence = agreeable(head, frozen, made_sequence(40, first_position=11, prompt_tokens=3))
        text = sequence.token_ids.tolist()
        expected = naive(text, 3, depth, lambda known, depth: draft(head, frozen, sequence, len(known), depth))
    for chunk in (5, 256):
        monkeypatch.setattr("tltlab.runtime.drafter.offline.chains.CHUNK", chunk)
        kept = kept_along(head, frozen, sequence, depth)
        assert kept.dtype == torch.uint8
        assert kept.tolist() == expected
    assert (min(expected), max(expected)) == (0, depth)


@pytest.mark.parametrize(("rows", "prompt", "expected"), [(0, 0, 1), (1, 0, 2), (5, 6, 0), (5, 9, 0), (2, 1, 2)])
def test_tokens_without_two_before_them_keep_0(rows, prompt, expected):
    kept = kept_along(made_head("eagle"), made_target(), made_sequence(rows, prompt_tokens=prompt), 4)
    assert len(kept) == expected
    assert kept[: max(2 - prompt, 0)].tolist() == [0] * min(max(2 - prompt, 0), expected)
