"""Spot training: updates in closed form against a loop over updates, checkpoints, losses and bad settings."""

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tltlab.coordination.progress import CHECKPOINT_S, Progress, SpotTraining, Trained

SIMPLE = SpotTraining(
    samples_per_s=4, samples_per_update=8, sample_tokens=100, scaling_efficiency=1,
    start_s=5, join_s=1, checkpoint_every=10, checkpoint_s=0.5,
)  # fmt: skip
"""An update of one worker takes 2 s, a cycle of ten with its checkpoint 20.5 s."""


def changed(**fields):
    return SpotTraining(**(SIMPLE.model_dump() | fields))


def train(model, groups, end_s, *, data_s=0.0, kill=False):
    """One training period: `groups` are (from when, members), and there are data from `data_s` on."""
    progress = Progress(setup_left_s=model.start_s)
    for i, ((begin_s, members), (until_s, _)) in enumerate(pairwise([*groups, (end_s, 0)])):
        if i and members != groups[i - 1][1]:
            progress = progress.regrouped(model.join_s)
        from_s = min(max(begin_s, data_s), until_s)
        progress = model.advance(progress, from_s - begin_s, members, has_data=False)
        progress = model.advance(progress, until_s - from_s, members)
    return model.killed(progress) if kill else model.stopped(progress)


def one_by_one(model, groups, end_s, data_s, kill):
    """The slow oracle: every update, pause and wait on its own, in exact arithmetic."""
    updates = unsaved = checkpoints = 0
    share, setup = Fraction(0), Fraction(model.start_s)
    changes = sorted({at for at, _ in groups} | {data_s, end_s})
    members = groups[0][1]
    for begin, end in pairwise(changes):
        if begin < groups[0][0] or begin >= end_s:
            continue
        now_members = [m for at, m in groups if at <= begin][-1]
        if now_members != members:
            members, setup = now_members, max(setup, Fraction(model.join_s))
        left, update = Fraction(end) - Fraction(begin), Fraction(model.update_s(members))
        if model.checkpoint_every:
            update += Fraction(model.checkpoint_s) / model.checkpoint_every
        while left > 0:
            if setup > 0:
                step = min(left, setup)
                setup -= step
            elif begin < data_s:
                step = left
            else:
                step = min(left, (1 - share) * update)
                share += step / update
                if share == 1:
                    share, updates, unsaved = Fraction(0), updates + 1, unsaved + 1
                    if unsaved == model.checkpoint_every:
                        unsaved, checkpoints = 0, checkpoints + 1
            left -= step
    if kill:
        return (updates - unsaved, unsaved, checkpoints)
    return (updates, 0, checkpoints + (unsaved > 0))


ENDS_S = 5 + 2 * 20.5 + 3 * 2.0 + 1.0
"""The setup, two cycles and three updates, and half of a fourth."""


def test_stopped_it_loses_nothing_killed_what_was_not_saved():
    stopped, killed = (train(SIMPLE, [(0.0, 1)], ENDS_S, kill=kill) for kill in (False, True))
    assert stopped == Trained(updates=23, checkpoints=3, tokens=18400)
    assert killed == Trained(updates=20, updates_lost=3, checkpoints=2, tokens=16000)


def test_the_checkpoint_that_blocks_less_leaves_more_updates():
    often = {"checkpoint_every": 1, "samples_per_update": 8}
    updates = [train(SpotTraining(checkpoint_s=s, **often), [(0.0, 1)], 605.0).updates for s in CHECKPOINT_S.values()]
    assert updates == sorted(updates)
    assert updates[2] > 2 * updates[0]


def test_the_time_without_data_and_that_of_checkpoints_is_no_training():
    progress = SIMPLE.advance(Progress(), 30.0, 1, has_data=False)
    progress = SIMPLE.advance(progress, 3 * 2.05, 1)
    assert (progress.updates, progress.trained_s) == (3, pytest.approx(6.0))


EIGHTHS = st.integers(0, 400).map(lambda n: n / 8)


@given(
    times=st.lists(EIGHTHS, min_size=2, max_size=6),
    members=st.lists(st.sampled_from([1, 2, 4]), min_size=5, max_size=5),
    start_s=st.sampled_from([0.0, 0.125, 5.0]),
    join_s=st.sampled_from([0.0, 0.5]),
    every=st.sampled_from([None, 1, 3, 10]),
    checkpoint_s=st.sampled_from([0.0, 0.25, 3.0]),
    update_samples=st.sampled_from([1, 2, 8]),
    data_s=EIGHTHS,
    kill=st.booleans(),
)
def test_the_closed_form_is_the_loop_over_updates(
    times, members, start_s, join_s, every, checkpoint_s, update_samples, data_s, kill
):
    model = changed(
        start_s=start_s, join_s=join_s, checkpoint_every=every, checkpoint_s=checkpoint_s,
        samples_per_update=update_samples,
    )  # fmt: skip
    *starts, end_s = sorted(set(times)) if len(set(times)) > 1 else [0.0, times[0] + 1.0]
    groups = list(zip(starts, members, strict=False))
    end_s = max(end_s, groups[-1][0])
    found = train(model, groups, end_s, data_s=data_s, kill=kill)
    assert (found.updates, found.updates_lost, found.checkpoints) == one_by_one(model, groups, end_s, data_s, kill)


@given(cuts=st.lists(st.floats(0, 200), max_size=8), members=st.integers(1, 64))
def test_it_does_not_matter_how_often_progress_is_looked_at(cuts, members):
    model = SpotTraining(checkpoint_every=7)
    whole = model.advance(Progress(setup_left_s=5.0), 200.0, members)
    pieces, now = Progress(setup_left_s=5.0), 0.0
    for cut in sorted([*cuts, 200.0]):
        pieces = model.advance(pieces, cut - now, members)
        now = cut
    assert abs(pieces.updates - whole.updates) <= 1, "an update may end within rounding of the last look"
    assert pieces.updates + pieces.share == pytest.approx(whole.updates + whole.share, abs=1e-6)
    assert pieces.trained_s == pytest.approx(whole.trained_s, abs=1e-6)
