"""One optimizer step on a drafter: what it does, and what it never does."""

import threading
from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.refused import refused
from tltlab.errors import ConfigError, RunError
from tltlab.runtime.drafter.group import GroupLost
from tltlab.runtime.drafter.heads.loss import drafter_loss
from tltlab.runtime.drafter.offline.chains import kept_along
from tltlab.runtime.drafter.sequences import pack
from tltlab.runtime.drafter.training import MAX_BAD, PART_ROWS, HeadTraining, pooled
from tltlab.runtime.recipe.drafter import LossConfig, OptimConfig

from . import small_heads
from .drafting_text import VOCAB, frozen, head, same, sequence, together

LOSS = LossConfig(token_weight=1.0)


class Threads:
    """Members in one process: whoever comes last adds up and lets all continue."""

    def __init__(self, world):
        self.world = world
        self._given = []
        self._meet = threading.Barrier(world, timeout=300)

    def sum(self, tensor):
        self._given.append(tensor.clone())
        self._meet.wait()
        total = torch.stack(sorted(self._given, key=lambda t: t.tolist())).sum(0)
        self._meet.wait()
        self._given.clear()
        self._meet.wait()
        tensor.copy_(total)

    def broadcast(self, tensor):
        raise AssertionError("not needed here")


class Lost:
    """A group whose other member dies while gradients are added up."""

    world = 2

    def sum(self, tensor):
        tensor.fill_(12345.0)
        raise GroupLost("a member died")

    broadcast = sum


def training(folder, loss=LOSS, **optim):
    return HeadTraining(head(folder), frozen(), loss, OptimConfig(**{"lr": 3e-3, **optim}))


class Pair:
    """Two members of a group, each with its own drafter."""

    def __init__(self, folder):
        self.left, self.right = (training(folder / name) for name in ("left", "right"))
        self._group = Threads(2)

    def update(self, left, right, leave=lambda: False):
        """An update with the data of each; `leave` is asked of the right one."""
        members = (partial(self.left.update, left), partial(self.right.update, right, leave=leave))
        return together([partial(member, group=self._group) for member in members])


@pytest.fixture
def pair(tmp_path):
    return Pair(tmp_path)


def broken(good):
    hidden = good.hidden.clone()
    hidden[7] = torch.nan
    return replace(good, hidden=hidden)


@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_the_acceptance_is_what_sampling_keeps(tmp_path, temperature):
    made = HeadTraining(head(tmp_path), frozen(), LossConfig(), OptimConfig(lr=3e-3), temperature=temperature)
    for n in range(12):
        made.update([sequence(n)])
    unseen = [sequence(100 + n, rows=100, temperature=temperature) for n in range(40)]
    kept = torch.cat([kept_along(made.head, frozen(), each, 1) for each in unseen]).float()
    assert made.predict(unseen).chances == [pytest.approx(float(kept.mean()), abs=1.5 / len(kept) ** 0.5)]


@pytest.mark.parametrize("kind", ["eagle", "hass"])
def test_a_drafters_prediction_holds_on_unseen_text(tmp_path, kind):
    made = training(tmp_path, LossConfig(kind=kind, token_weight=1.0), lr=6e-3, warmup=5)
    unseen = [sequence(100 + n) for n in range(8)]
    before = made.predict(unseen).chances
    for n in range(30):
        made.update([sequence(4 * n + i) for i in range(4)])
    after = made.predict(unseen)
    assert made.updates == 30
    assert after.chances[0] > 0.9 > 0.5 > before[0]
    assert len(after.chances) == made.loss.num_unrolled
    assert after.rows[0] == 8 * 21


def test_an_update_is_what_plain_torch_does(tmp_path):
    made = training(tmp_path / "a", warmup=4)
    plain = head(tmp_path / "b")
    adam = torch.optim.AdamW(plain.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.01)
    for n in range(6):
        texts = [sequence(3 * n + i, rows=10 + 5 * i) for i in range(3)]
        report = made.update(texts)
        adam.zero_grad()
        loss = drafter_loss(plain, frozen(), pack(texts), LOSS).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        adam.param_groups[0]["lr"] = 3e-3 * min(1.0, (n + 1) / 4)
        adam.step()
        assert report.loss == pytest.approx(float(loss.detach()), rel=1e-5)
    assert same(dict(made.head.named_parameters()), dict(plain.named_parameters()), atol=1e-5)


def test_only_what_is_trained_is_state(tmp_path):
    made = training(tmp_path)
    state = made.live_state()
    weights = sum(value.numel() for value in made.head.parameters())
    assert sum(value.numel() for value in state.values()) == 3 * weights + state["counters"].numel()
    assert not any(VOCAB in value.shape for value in state.values())


def test_the_state_of_another_head_is_refused(tmp_path):
    state = training(tmp_path).state_dict()
    state.pop("exp_avg.fc.weight")
    with refused(ConfigError, naming=("exp_avg.fc.weight",)):
        training(tmp_path).load_state_dict(state)


def test_a_member_without_data_has_no_weight(tmp_path, pair):
    alone = training(tmp_path / "alone")
    prompt_only = sequence(1, rows=6, prompt=7)
    alone.update([sequence(0)])
    pair.update([sequence(0)], [prompt_only])
    assert same(alone.state_dict(), pair.right.state_dict(), atol=1e-6)


def test_without_any_data_nothing_moves(tmp_path):
    made = training(tmp_path)
    before = made.state_dict()
    report = made.update([])
    assert (report.tokens, report.skipped, made.updates) == (0, False, 0)
    assert same(before, made.state_dict())
    assert pooled([made.predict([])]) == []


def test_all_leave_together_when_one_wants_to(pair):
    texts = [sequence(0)]
    first, second = pair.update(texts, texts), pair.update(texts, texts, leave=lambda: True)
    assert [report.leave for report in first + second] == [False, False, True, True]
    assert pair.left.updates == pair.right.updates == 2
    assert pair.left.update(texts, leave=lambda: True).leave


def test_a_member_leaves_with_the_update_under_way(pair):
    told, fill_message = threading.Event(), pair.right._fill_message

    def told_meanwhile(*arguments):
        used = fill_message(*arguments)
        told.set()
        return used

    pair.right._fill_message = told_meanwhile
    texts = [sequence(0)]
    assert [report.leave for report in pair.update(texts, texts, leave=told.is_set)] == [True, True]


def test_nan_at_one_member_keeps_all_from_updating(pair):
    texts = [sequence(0)]
    pair.update(texts, texts)
    before = pair.left.state_dict()
    assert [report.skipped for report in pair.update(texts, [broken(texts[0])])] == [True, True]
    for made in (pair.left, pair.right):
        assert (made.updates, made.skipped) == (1, 1)
        after = made.state_dict()
        assert after.pop("counters").tolist() == [1, 1, 1, 1]
        assert same({name: before[name] for name in after}, after)
    assert [report.skipped for report in pair.update(texts, texts)] == [False, False]


def test_bad_updates_end_with_the_last_good_drafter(tmp_path, monkeypatch):
    made = training(tmp_path)
    monkeypatch.setattr("tltlab.runtime.drafter.training.KEEP_EVERY", 1)
    for n in range(5):
        made.update([sequence(n)])
    good = made.state_dict()
    made.update([sequence(5)])
    monkeypatch.setattr("tltlab.runtime.drafter.training.KEEP_EVERY", 1000)
    for n in range(3):
        made.update([sequence(50 + n)])
    for n in range(MAX_BAD - 1):
        assert made.update([broken(sequence(n))]).skipped
    with refused(RunError, naming=("5",)):
        made.update([broken(sequence(9))])
    after = made.state_dict()
    assert made.skipped == MAX_BAD
    assert same({n: v for n, v in good.items() if n != "counters"}, {n: v for n, v in after.items() if n != "counters"})
    assert not made.update([sequence(60)]).skipped


def test_what_is_not_finite_is_never_applied(tmp_path):
    """Weights, and a gradient whose norm overflows."""
    weights, gradient = training(tmp_path / "a"), training(tmp_path / "b", LossConfig(hidden_weight=1e30))
    weights.update([sequence(0)])
    weights.optim = weights.optim.model_copy(update={"lr": 3e38})
    for made, updates in ((weights, 0), (gradient, 0)):
        before = made.state_dict()
        assert made.update([sequence(1)]).skipped
        assert (made.updates, made.skipped) == (updates, 1)
        after = made.state_dict()
        assert all(bool(value.isfinite().all()) for value in after.values())
        assert made is weights or all(torch.equal(value, before[n]) for n, value in after.items() if n != "counters")
    assert weights.predict([sequence(2)]).chances[0] > 0


def test_a_lost_member_changes_no_state(tmp_path):
    made, alone = training(tmp_path / "a"), training(tmp_path / "b")
    for one in (made, alone):
        one.update([sequence(0)])
    before = made.state_dict()
    with pytest.raises(GroupLost):
        made.update([sequence(1)], Lost())
    with pytest.raises(GroupLost):
        made.share(Lost())
    assert same(before, made.state_dict())
    made.update([sequence(2)])
    alone.update([sequence(2)])
    assert same(made.state_dict(), alone.state_dict())


def test_it_learns_from_the_target_as_is(tmp_path):
    made = training(tmp_path)
    old = frozen()
    before = made.predict([sequence(0)])
    made.set_target(replace(old, lm_head=old.lm_head * 0.5))
    assert made.predict([sequence(0)]) != before


def alike(num, method="eagle"):
    """Trainings that are the same."""
    target, optim = small_heads.made_target(), OptimConfig(lr=0.1)
    return [HeadTraining(small_heads.made_head(method), target, LOSS, optim) for _ in range(num)]


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_warming_up_leaves_the_training_as_it_was(method):
    cold, warm = alike(2, method)
    warm.warm_up()
    for number in range(3):
        assert warm.updates == cold.updates == number
        assert warm.state_dict().keys() == cold.state_dict().keys()
        assert same(warm.state_dict(), cold.state_dict())
        for training in (cold, warm):
            assert training.update([small_heads.made_sequence(40)]).tokens
    assert warm.skipped == 0


def test_who_has_to_leave_gives_what_it_has(monkeypatch):
    """A rollout waits for one pass, not for an update, and nothing that was computed is lost."""
    leaving, parts, alone, whole = alike(4)
    texts = [small_heads.made_sequence(rows, seed=rows) for rows in (20, 25, 30, 10)]
    expected = whole.update(texts)
    monkeypatch.setitem(PART_ROWS, "cpu", 45)
    asked = []
    left = leaving.update(texts, leave=lambda: asked.append(0) is None)
    assert (left.own_sequences, left.own_rows, left.leave, leaving.updates) == (2, 45, True, 1)
    assert len(asked) == 2
    assert alone.update(texts[:2]).tokens == left.tokens
    assert same(leaving.state_dict(), alone.state_dict())
    found = parts.update(texts)
    assert (found.own_rows, found.own_sequences, found.tokens) == (85, 4, expected.tokens)
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)
    assert same(parts.state_dict(), whole.state_dict(), atol=1e-5), "parts add up"
    assert not same(leaving.state_dict(), whole.state_dict())
