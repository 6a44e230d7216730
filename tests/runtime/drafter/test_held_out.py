"""What judges a drafter: responses to prompts that no trainer learns from, at the rollout's temperature."""

import contextlib
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tltlab.coordination.schedule import Attempt, ScheduleConfig, TrainingSchedule
from tltlab.runtime.drafter.offline.chains import kept_along
from tltlab.runtime.drafter.run import DrafterRun
from tltlab.runtime.drafter.sequences import HELD_OUT, TrainingSequence, prompt_draw
from tltlab.runtime.drafter.training import Acceptance, HeadTraining, pooled
from tltlab.runtime.drafter.worker import SpotTrainer, TrainerReport
from tltlab.runtime.recipe.drafter import LossConfig, OptimConfig
from tltlab.runtime.run.state import RunEvents

from .drafting_text import VOCAB, frozen, head, sequence
from .test_worker import CONFIG, Bench


@pytest.fixture
def bench(tmp_path, sockets):
    bench = Bench(tmp_path, sockets)
    with contextlib.closing(bench):
        yield bench


def prompts(sequences):
    return {sequence.key[1] for sequence in sequences}


def test_what_is_trained_on_anywhere_judges_nowhere(bench, tmp_path):
    """Samples of a prompt go to several workers in any order, come in later RL steps, and from a checkpoint."""
    one, two = bench.add(1), bench.add(2)
    for rl_step in range(3):
        some = [replace(sequence(n), key=(rl_step, f"p{n}", m, 0)) for n in range(64) for m in range(2)]
        for trainer, share in ((one, some), (two, reversed(some))):
            for each in share:
                trainer._on_sequence(each)
        trained = prompts([*one.buffer.sequences(), *two.buffer.sequences()])
        judging = prompts([*one._heldout, *two._heldout])
        assert not trained & judging
        assert len(trained) > 48
        assert len(judging) > 3
    one.save_data(tmp_path)
    again = SpotTrainer(replace(one.place, feed=f"{one.place.feed}-again"), CONFIG)
    again.start(frozen(), data=tmp_path)
    again.close()
    again.run()
    for of in (lambda trainer: trainer.buffer.sequences(), lambda trainer: trainer._heldout):
        assert [each.key for each in of(again)] == [each.key for each in of(one)]


def test_about_a_share_of_the_prompts_is_held_out():
    for seed in range(3):
        held = sum(prompt_draw(str(n), seed) < HELD_OUT for n in range(4000))
        assert abs(held - 500) < 5 * (4000 * HELD_OUT * (1 - HELD_OUT)) ** 0.5


def noise(prompt, sample=0):
    """A response whose tokens and states say nothing of another prompt's, and all of their own prompt's samples."""
    generator = torch.Generator().manual_seed(int(prompt[1:]))
    tokens = torch.randint(VOCAB, (26,), generator=generator)
    states = 8.0 * frozen().lm_head[tokens[1:]]
    return TrainingSequence(key=(0, prompt, sample, 0), token_ids=tokens, hidden=states, prompt_tokens=4)


def test_training_on_noise_shows_no_gain(bench):
    trainer = bench.add(1)
    names = [f"p{n}" for n in range(400)]
    drawn = {held: [p for p in names if (prompt_draw(p, 0) < HELD_OUT) is held] for held in (False, True)}
    for prompt in (*drawn[False][:8], *drawn[True][:32]):
        for sample in range(4 if prompt in drawn[False] else 1):
            trainer._on_sequence(noise(prompt, sample))
    for _ in range(80):
        trainer.training.update(trainer.buffer.sample(200, trainer.rng))
    report = trainer.report(compare=True)
    gain = pooled([report.candidate])[0] - pooled([report.served])[0]
    # 704 independent rows, each kept with a chance of 1 / 24: three standard errors of a difference.
    assert report.candidate.rows == [704]
    assert abs(gain) < 3 * (2 * 0.04 / 704) ** 0.5
    other_samples = [noise(prompt, 9) for prompt in drawn[False][:8]]
    assert trainer.training.predict(other_samples).chances[0] > 0.5, "other samples of what it learned are no judges"


@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_the_acceptance_is_what_sampling_keeps(tmp_path, temperature):
    made = HeadTraining(head(tmp_path), frozen(), LossConfig(), OptimConfig(lr=3e-3), temperature=temperature)
    for n in range(12):
        made.update([sequence(n)])
    unseen = [sequence(100 + n, rows=100, temperature=temperature) for n in range(40)]
    kept = torch.cat([kept_along(made.head, frozen(), each, 1) for each in unseen]).float()
    assert made.predict(unseen).chances == [pytest.approx(float(kept.mean()), abs=3 * 0.5 / len(kept) ** 0.5)]


def test_without_a_held_out_prompt_the_next_rl_steps_decide(tmp_path):
    schedule, events = (
        TrainingSchedule(ScheduleConfig(kind="gated"), pretrained=True),
        RunEvents(tmp_path / "events.jsonl"),
    )
    better, worse = (Acceptance(chances=[chance], rows=[10]) for chance in (0.6, 0.5))
    judged, not_judged = (
        TrainerReport(rows=[], failures=[], updates=9, candidate=better, served=worse),
        TrainerReport(rows=[], failures=[], updates=9),
    )

    def passes(rl_step, updates, *reports):
        run = SimpleNamespace(
            schedule=schedule, events=events, _rows={"spot_training": [{"updates": updates, "yield_s": 0.5}]}
        )
        found = DrafterRun._passes_gate(run, rl_step, reports)
        return found, [attempt.candidate for attempt in schedule.attempts]

    assert passes(0, 0, judged) == (False, []), "nothing was trained"
    assert passes(1, 9, not_judged) == (False, [None])
    assert passes(2, 0, not_judged) == (False, [None])
    assert passes(3, 0, not_judged, judged) == (True, [1.6]), "one worker's held-out prompts are enough"
    assert [attempt.rl_step for attempt in schedule.attempts] == [1]
    judged = replace(judged, candidate=worse, served=better)
    assert passes(4, 9, judged) == (False, [1.6, 1.5])
    assert passes(5, 0, replace(judged, candidate=better, served=worse)) == (False, [1.6, 1.5]), "judged already"
    assert not TrainingSchedule(ScheduleConfig(kind="gated")).serves(Attempt(rl_step=0)), (
        "replaced by what nobody knows"
    )
    said = [json.loads(line)["event"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert sum("next RL step" in event for event in said) == 2
