"""Hidden states taken out of live engines: they are those of Hugging Face's forward pass on the same tokens."""

from contextlib import nullcontext
from dataclasses import asdict, replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from tltlab.drafters.specs import LearnedSpec
from tltlab.runtime.drafter.sequences import TrainingSequence
from tltlab.runtime.engine.engine import Engine
from tltlab.runtime.engine.vllm.capture import RowStore, _Batch, _PinnedCopies
from tltlab.strategy import Strategy

from ...small_models import loaded
from ..asking import BLOCK, CONTEXT, fixed, groups_of_four, kept_and_refused, request, switching, texts


@pytest.fixture(scope="module")
def target(random_model):
    """A test could not fail whose model gave the same states whatever came before."""
    model, texts = loaded(random_model), torch.tensor([[1, 9, 5, 6, 7], [1, 8, 5, 6, 7]])
    with torch.no_grad():
        one, other = model.model(texts).last_hidden_state[:, -1]
    assert (one - other).abs().max() > 1e-2
    return model


@pytest.fixture
def engine(cramped):
    """Under a policy of suffix drafts."""
    cramped.set_policy(fixed("suffix", 6))
    return cramped


def changing(drafter):
    return switching(Strategy.chain(drafter, 6), Strategy.chain(drafter, 2))


def requests(num, tokens, prompt_tokens=6):
    """Groups of four samples of one prompt; some may end by themselves, and not all at once."""
    return [
        replace(asked, max_response_tokens=tokens - n % 3, ignore_eos=n % 2 == 0)
        for n, asked in enumerate(groups_of_four(num, tokens, prompt_tokens))
    ]


def rollout_of(engine, asked, **more):
    found = []
    engine.capture(found.append)
    rollout = engine.generate(asked, rl_step=0, **{"temperature": 1.0} | more)
    engine.capture(None)
    return rollout, found


def check(
    found,
    rollout,
    asked,
    target,
    aux_layers=(),
):
    """Every response once, its text, and its states."""
    ended = [r.key for r in rollout.responses if r.finish_reason in ("stop", "length")]
    assert sorted(s.key for s in found) == sorted(ended)
    prompts = {request.key: request.prompt_token_ids for request in asked}
    responses = {response.key: response.token_ids for response in rollout.responses}
    for s in found:
        text = prompts[s.key] + responses[s.key]
        first = s.first_position
        assert s.token_ids.tolist() == text[first:]
        assert s.prompt_tokens == max(len(prompts[s.key]) - first, 0)
        with torch.no_grad():
            states = target.model(torch.tensor([text[:-1]]), output_hidden_states=True)
        torch.testing.assert_close(s.hidden, states.last_hidden_state[0, first:], atol=1e-4, rtol=0)
        assert not s.hidden.is_inference(), "what is captured is trained on"
        if aux_layers:
            aux = torch.cat([states.hidden_states[layer][0, first:] for layer in aux_layers], -1)
            torch.testing.assert_close(s.aux, aux, atol=1e-4, rtol=0)
        else:
            assert s.aux is None


@pytest.mark.engine
@pytest.mark.parametrize("policy", [None, fixed("suffix", 6), changing("ngram")])
def test_states_are_hugging_faces(engine, target, policy, preempted):
    engine.set_policy(policy)
    asked = requests(16, 55, prompt_tokens=36)
    rollout, found = rollout_of(engine, asked)
    check(found, rollout, asked, target)
    assert any(s.first_position == BLOCK for s in found), "the test needs a cached prefix"
    assert any(s.first_position == 0 for s in found)
    rows = rollout.iterations.to_pylist()
    assert max(row["prefill_tokens"] for row in rows[:12]) <= 40, "the test needs prefill in chunks"
    assert preempted, "the test needs preemption"
    if policy is not None:
        assert min(kept_and_refused(rollout)) > 20
        assert policy.selector.kind == "fixed" or len({row["draft_depth"] for row in rows}) == 3
    assert engine.captured.sequences == 16
    assert engine.captured.rows == sum(s.num_rows for s in found)
    assert (engine.captured.skipped, engine.captured.lost) == (0, 0)


@pytest.mark.engine
def test_sequence_comes_with_iteration_after_its_last(engine, target):
    """One that is aborted never does."""
    found = []
    ended = []
    engine.capture(found.append)

    def until(keys):
        ended.append((len(keys), len(found)))
        return len(keys) >= 7

    asked = requests(12, 80)
    rollout = engine.generate(asked, rl_step=0, temperature=1.0, until=until)
    engine.capture(None)
    assert all(captured == responses for (responses, _), (_, captured) in pairwise(ended))
    assert any(r.finish_reason == "abort" for r in rollout.responses)
    check(found, rollout, asked, target)


@pytest.mark.engine
def test_only_rollouts_are_captured_until_it_is_off(engine):
    found = []
    engine.capture(found.append)
    engine.evaluate(requests(2, 5), temperature=1.0)
    engine.warm_up(1.0)
    with engine.uncaptured():
        engine.generate(requests(2, 5), rl_step=0, temperature=1.0)
    assert found == []
    for _ in range(2):
        engine.generate(requests(2, 5), rl_step=0, temperature=1.0)
        assert len(found) == engine.captured.sequences == 2
        engine.capture(None)


@pytest.mark.engine
def test_capture_changes_nothing_that_is_reported(engine):
    asked = requests(12, 40)
    before = engine.snapshot()
    captured, found = rollout_of(engine, asked)
    engine.restore(before)
    plain = engine.generate(asked, rl_step=0, temperature=1.0)
    assert texts(captured) == texts(plain)
    assert len(found) == 12


@pytest.mark.engine
def test_after_weight_update_states_are_of_new_weights(engine, random_model):
    model = loaded(random_model)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "proj" in name:
                weight.add_(0.05 * weight.std() * torch.randn_like(weight))
    asked = requests(4, 30, prompt_tokens=36)
    engine.update_weights(model.state_dict().items(), 1)
    rollout, found = rollout_of(engine, asked)
    engine.update_weights(before.items(), 2)
    check(found, rollout, asked, model)


@pytest.mark.engine
def test_sink_that_fails_ends_capture_and_not_rollout(engine, caplog):
    found = []

    def sink(sequence):
        if len(found) == 2:
            raise OSError("no space left on device")
        found.append(sequence)

    engine.capture(sink)
    rollout = engine.generate(requests(8, 30), rl_step=0, temperature=1.0)
    assert len(rollout.responses) == 8
    assert all(texts(rollout))
    assert len(found) == engine.captured.sequences == 2
    assert "OSError: no space left on device" in engine.captured.failure
    assert engine.captured.failure in caplog.text


@pytest.mark.engine
def test_rows_without_room_are_counted(engine, target):
    asked = [request(f"p{n}", 0, [1, 4 + n], 80) for n in range(12)]
    found = []
    room = 4 * 32 * 64 * 4
    engine.capture(found.append, max_bytes=room)
    rollout = engine.generate(asked, rl_step=0, temperature=1.0)
    engine.capture(None)
    counts = engine.captured
    assert min(counts.skipped, counts.lost) > 0
    assert counts.skipped + counts.lost + counts.sequences == 12
    assert 0 < len(found) == counts.sequences
    assert counts.peak_bytes <= room
    there = {s.key for s in found}
    check(found, replace(rollout, responses=[r for r in rollout.responses if r.key in there]), asked, target)


class Files:
    """A sink for whatever process: each sequence becomes a file in a folder, which `read` empties."""

    def __init__(self, folder):
        self.folder = folder

    def __call__(self, sequence):
        torch.save(asdict(sequence), self.folder / f"{'-'.join(map(str, sequence.key))}.sequence")

    def read(self):
        files = sorted(self.folder.glob("*.sequence"))
        sequences = [TrainingSequence(**torch.load(file, weights_only=False)) for file in files]
        for file in files:
            file.unlink()
        return sequences


def few_words(asked):
    """The same for models that have four words."""
    return [replace(each, prompt_token_ids=[token % 4 for token in each.prompt_token_ids]) for each in asked]


def learned_rollouts(model, drafter):
    """At a fixed depth, at changing ones, and to the end of the context, where no draft fits."""
    args = {"max_model_len": CONTEXT, "max_num_seqs": 8, "block_size": BLOCK, "kv_cache_memory_bytes": 32 << 20}
    engine = Engine(str(model), drafters={"learned": drafter}, max_draft_depth=6, vllm_args=args)
    try:
        rollouts = []
        for policy, asked in LEARNED:
            engine.set_policy(policy)
            rollouts.append(rollout_of(engine, asked))
        counts = [kept_and_refused(rollout) for rollout, _ in rollouts]
        assert min(sum(column) for column in zip(*counts, strict=True)) > 20
        return rollouts
    finally:
        engine.close()


LEARNED = [
    (fixed("learned", 6), few_words(requests(12, 50))),
    (changing("learned"), few_words(requests(12, 25, prompt_tokens=70))),
    (fixed("learned", 6), few_words([request("long", n, [1, 4 + n], 200) for n in range(3)])),
]


@pytest.mark.engine
@pytest.mark.parametrize(("method", "aux_layers"), [("eagle", ()), ("eagle3", (1, 2, 3))])
def test_eagle_drafters_see_the_same(tiny_models, method, aux_layers):
    drafter = LearnedSpec(method=method, model=str(getattr(tiny_models, method)))
    rollouts, target = learned_rollouts(tiny_models.target, drafter), loaded(tiny_models.target)
    for (rollout, found), (_, asked) in zip(rollouts, LEARNED, strict=True):
        check(found, rollout, asked, target, aux_layers)
    assert any(s.first_position for s in rollouts[1][1]), "the test needs a cached prefix"
    assert all(s.num_rows == CONTEXT - 1 for s in rollouts[2][1])


class Stream:
    """Stands for a CUDA stream, and for its events: whatever is queued has been done."""

    def __init__(self, device=None): ...

    def __getattr__(self, name):
        return lambda *others: self


def test_on_cuda_iteration_lands_after_next_has_left(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(_PinnedCopies, "_pinned", lambda self, source: torch.empty((16, *source.shape[1:])).to(source))
    store = RowStore(1 << 20, CONTEXT)
    way = _PinnedCopies(torch.device("cpu"), 16)
    ids, bounds = ["a", "b"], np.array([0, 3, 5])
    positions, hidden = torch.tensor([0, 1, 2, 0, 1, 99]), torch.arange(12.0).view(6, 2)
    expected = {name: [] for name in ids}
    for name in ids:
        store.open(name)
    for iteration in range(6):
        if iteration == 3:
            # Nothing was wanted then.
            way.leave(store, None)
            way.land(store)
            continue
        way.leave(store, _Batch(ids, bounds, positions, hidden, [hidden * 2]))
        way.clear()
        expected["a"] += hidden[:3].tolist()
        expected["b"] += hidden[3:5].tolist()
        if iteration:
            way.land(store)
        hidden += 100
        positions[:3] += 3
        positions[3:] += 2
    way.land(store)
    way.land(store)
    for name, num_rows in (("a", 15), ("b", 10)):
        rows = store.close(name, num_rows)
        assert rows.hidden.tolist() == expected[name]
        assert rows.aux.tolist() == [[2 * x for x in row] for row in expected[name]]
