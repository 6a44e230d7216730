import numpy as np
import pytest

from tltlab.policies.beg_mab import BegMab, paper_buckets
from tltlab.state import Choice, StepOutcome
from tltlab.strategy import NO_SPECULATION, Strategy

from .iterations import at, pick, play, ran, teach

D8, D4, D2, D1 = (Strategy.chain("ngram", depth) for depth in (8, 4, 2, 1))


def bandit(buckets, seed=0, **settings):
    return BegMab(buckets, rng=np.random.default_rng(seed), **settings)


def test_the_bucket_of_the_batch_limits_the_choice():
    mab = bandit([(2, [D8, D4]), (5, [D2]), (21, [D1, NO_SPECULATION])], epsilon=1.0)
    seen = {batch: {pick(mab, batch) for _ in range(60)} for batch in (1, 2, 4, 5, 20, 21, 4096)}
    assert seen[1] == seen[2] == seen[4] == {D8, D4}
    assert seen[5] == seen[20] == {D2}
    assert seen[21] == seen[4096] == {D1, NO_SPECULATION}


PICKS = {
    "ties go to the first": ({D4: 100.0, D8: 100.0, D2: 100.0}, 1, [D4, D8, D2, D4, D4, D4]),
    "each is tried as often as asked": ({D4: 100.0, D2: 50.0}, 3, [D4] * 3 + [D2] * 3 + [D4]),
}


@pytest.mark.parametrize(("rates", "tries", "picks"), PICKS.values(), ids=PICKS)
def test_unseen_arms_come_first_in_list_order(rates, tries, picks):
    mab = bandit([(1, list(rates))], epsilon=0.0, tries=tries)
    assert play(mab, rates, len(picks)) == picks


@pytest.mark.parametrize("batches", [(4,), (40,), (4, 40)])
def test_it_follows_better_arm_as_two_swap(batches):
    """Two arms a bucket; their rates swap in mid-run, with a tenth of noise."""
    mab = bandit([(1, [D8, D2]), (33, [D8, D2])], epsilon=0.2, window=20)
    before = play(mab, {D8: 200.0, D2: 100.0}, 400, batches, noise=0.1)
    after = play(mab, {D8: 100.0, D2: 200.0}, 400, batches, noise=0.1)
    assert before[200:].count(D8) > 0.8 * 200
    assert after[200:].count(D2) > 0.8 * 200


PLAIN = NO_SPECULATION
RELATIVE = [(1, [D8, PLAIN]), (9, [D2, D1, PLAIN])]
POOLED = [(arm, batch, rate) for batch in (1, 9, 16) for arm, rate in ((D8, 100.0), (D2, 200.0))]

LESSONS = {
    "pooled in a bucket": ([(1, [D8, D2]), (17, [D8, D2])], {}, POOLED, {1: D2, 5: D2, 16: D2, 17: D8}),
    "filed where it ran": ([(1, [D8, D2]), (17, [D2, D1])], {}, [(D2, 16, 100.0)], {17: D2}),
    "an arm of elsewhere": ([(1, [D8, D2]), (17, [D2, D1])], {}, [(D1, 3, 100.0)], {3: D8}),
    "prefill teaches nothing": ([(1, [D8, D2])], {"had_prefill": True}, [(D8, 4, 100.0)], {4: D8}),
    "a rate to be learned comes first": (RELATIVE, {}, [], {4: PLAIN, 9: PLAIN}),
    "in each bucket": (RELATIVE, {}, [(PLAIN, 4, 100.0)], {4: D8, 9: PLAIN}),
}


@pytest.mark.parametrize(("buckets", "fields", "told", "chosen"), LESSONS.values(), ids=LESSONS)
def test_outcomes_teach_the_bucket_of_their_batch(buckets, fields, told, chosen):
    mab = bandit(buckets, epsilon=0.0, reward="relative" if buckets is RELATIVE else "paper")
    for arm, batch, rate in told:
        teach(mab, arm, ran(arm, batch, batch / rate, **fields))
    assert {batch: pick(mab, batch) for batch in chosen} == chosen


def test_a_bucket_with_one_arm_needs_no_randomness():
    mab = bandit([(1, [D8])], epsilon=1.0)
    before = mab.state_dict()["rng"]
    assert mab.choose(at(1)) == Choice(D8, propensity=1.0, bucket=0)
    assert mab.state_dict()["rng"] == before


def test_propensity_is_how_often_arm_is_chosen():
    mab = bandit([(1, [D8, D4, D2])], epsilon=0.3)
    for arm, rate in ((D8, 100.0), (D4, 150.0), (D2, 120.0)):
        teach(mab, arm, ran(arm, 4, 4 / rate))
    picks, chance = [], {}
    for _ in range(10_000):
        choice = mab.choose(at(4))
        picks.append(choice.strategy)
        chance[choice.strategy] = choice.propensity
    assert chance == {D8: pytest.approx(0.1), D4: pytest.approx(0.8), D2: pytest.approx(0.1)}
    for arm, p in chance.items():
        assert picks.count(arm) / 10_000 == pytest.approx(p, abs=0.02)


def test_falling_batches_mislead_the_paper_reward_only():
    """Plain decoding takes 10 ms, a draft of 2 yields 2 tokens in 15 ms: always better. Tokens/s grow with the batch,
    so whatever ran while the batch was large has the better median."""

    def favourite(reward):
        mab = bandit([(1, [NO_SPECULATION, D2])], epsilon=0.0, reward=reward)
        for batch, strategy in ((32, NO_SPECULATION), (16, NO_SPECULATION), (8, D2), (4, D2)):
            accepted = (1,) * batch if strategy.speculates else ()
            elapsed_s = 0.015 if strategy.speculates else 0.010
            teach(mab, strategy, StepOutcome(elapsed_s=elapsed_s, batch=batch, accepted=accepted))
        return pick(mab, 2)

    assert favourite("paper") == NO_SPECULATION
    assert favourite("relative") == D2


TREES = [Strategy("learned", 8, 4, v) for v in (8, 48, 16, 32)]


def test_the_papers_grouping_gives_small_batches_most_tokens():
    """The released settings: 48 / 32 / 16 / 8 tokens at batches 1 / 2-4 / 5-20 / 21 and up."""
    mab = bandit(paper_buckets(TREES, [1, 2, 5, 21]))
    tokens = [pick(mab, batch).tokens_to_verify for batch in (1, 2, 4, 5, 20, 21, 300)]
    assert tokens == [48, 32, 32, 16, 16, 8, 8]
    deep, shallow = Strategy("learned", 10, 4, 48), Strategy("learned", 6, 4, 48)
    assert paper_buckets([deep, *TREES, shallow], [1, 2, 5, 21])[0] == (1, [deep, TREES[1], shallow])


@pytest.mark.parametrize(("statistic", "settles_on"), [("median", D2), ("mean", D4)])
def test_all_or_nothing_drafts_rank_by_mean(statistic, settles_on):
    mab = bandit([(1, [D4, D2])], epsilon=0.0, statistic=statistic, tries=10)
    for n in range(20):
        arm = pick(mab, 1)
        # Two of five drafts of four are kept whole, 1.6 tokens on average; the shorter ones keep one token each time.
        kept = (4 if n % 5 in (0, 2) else 0) if arm == D4 else 1
        teach(mab, arm, StepOutcome(elapsed_s=1.0, batch=1, drafted=(arm.draft_depth,), accepted=(kept,)))
    assert pick(mab, 1) == settles_on
