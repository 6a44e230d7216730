"""Learned drafters replayed over recorded text: against a chain drafted token by token, and against vLLM itself."""

from contextlib import closing

import numpy as np
import pytest
import torch

import tltlab
from tests.refused import refused
from tltlab.calibration.annotate import DraftedBy, ReplayedDrafter, annotate
from tltlab.cli.annotate import parse_drafter
from tltlab.drafters.specs import LearnedSpec, NgramSpec, SuffixSpec
from tltlab.errors import ConfigError
from tltlab.policies.simple import Fixed
from tltlab.runtime.drafter.heads.kinds import new_head
from tltlab.runtime.drafter.offline.annotate import kept_by_head, kept_by_model, learned_annotator
from tltlab.runtime.engine.engine import Engine
from tltlab.runtime.engine.generation import GenerationRequest
from tltlab.runtime.rollout.worker import packed
from tltlab.runtime.run.rows import StepReport, step_rows
from tltlab.strategy import Strategy
from tltlab.traces.drafts import RecordedResponse
from tltlab.traces.recorder import Recorder
from tltlab.traces.schema import Manifest

from ....annotation_agreement import agreement
from ...small_models import loaded
from .easy_target import changed_model, easy_target, naive

WORDS = 24


@pytest.fixture(scope="module")
def target_folder(random_model, tmp_path_factory):
    """The random model with weak attention."""
    return easy_target(random_model, tmp_path_factory.mktemp("target"), sharper=1.0)


@pytest.fixture(scope="module")
def target(target_folder):
    return loaded(target_folder)


@pytest.fixture(scope="module")
def draft_model(target_folder, tmp_path_factory):
    """The target with noise on its weights: it is often right, and often wrong."""
    generator = torch.Generator().manual_seed(1)
    return changed_model(
        target_folder,
        tmp_path_factory.mktemp("draft-model"),
        lambda name, weight: weight + 0.1 * weight.std() * torch.randn(weight.shape, generator=generator),
    )


@pytest.fixture(scope="module")
def eagle_head(target_folder, tmp_path_factory):
    return new_head(target_folder, "eagle", seed=7).save(tmp_path_factory.mktemp("eagle"))


def response_of(prompt, *token_ids):
    return RecordedResponse(
        key=(0, "p", 0, 0), worker=0, prompt_token_ids=prompt, token_ids=list(token_ids), opened_s=0.0,
        times_s=np.zeros(len(token_ids)),
    )  # fmt: skip


def greedy_chain(model):
    def propose(text, depth):
        chain = list(text)
        for _ in range(depth):
            chain.append(int(model(torch.tensor([chain])).logits[0, -1].argmax()))
        return chain[len(text) :]

    return propose


def text_of(propose, num_tokens, seed):
    """Text that a drafter gets right for a while, again and again: 5 random tokens, then chains and odd tokens."""
    rng = np.random.default_rng(seed)
    text = rng.integers(4, WORDS, 5).tolist()
    while len(text) < 5 + num_tokens:
        text += [*propose(text, int(rng.integers(0, 10))), int(rng.integers(4, WORDS))]
    return text[: 5 + num_tokens]


@pytest.mark.parametrize("depth", [1, 3, 8])
def test_one_pass_keeps_what_chains_keep(draft_model, depth):
    model = loaded(draft_model)
    with torch.inference_mode():
        text = text_of(greedy_chain(model), 32, seed=depth)
        expected = naive(text, 5, depth, greedy_chain(model))
        assert kept_by_model(model, text[:5], text[5:], depth).tolist() == expected
    assert min(expected) == 0
    assert max(expected) == depth


def test_without_enough_text_before_it_nothing_is_drafted(draft_model, eagle_head, target_folder):
    for method, folder, least in (("draft_model", draft_model, 1), ("eagle", eagle_head, 2)):
        annotator = learned_annotator(method, str(folder), str(target_folder))
        for prompt in ([], [5], [5, 6]):
            (row,) = annotator.annotate([response_of(prompt, 7)], 4)
            assert row.shape == (1,)
            assert len(prompt) >= least or row.tolist() == [0]


def test_the_folder_states_what_a_learned_drafter_is(eagle_head, draft_model, target_folder):
    assert learned_annotator("learned", str(eagle_head), str(target_folder)).kept.func is kept_by_head
    assert learned_annotator("learned", str(draft_model), None).kept.func is kept_by_model
    named, annotator, traits = parse_drafter(f"eagle:{eagle_head}@2", target_folder)
    assert (named, annotator.kept.func, traits.has_network) == (("learned", 2), kept_by_head, True)


def test_what_cannot_be_replayed_is_refused(eagle_head, draft_model, tmp_path):
    for method, folder, target, naming in (
        ("eagle", eagle_head, None, ("--model",)),
        ("draft_model", tmp_path / "none", None, (tmp_path / "none",)),
        ("draft_model", tmp_path, None, (tmp_path,)),
        ("medusa", eagle_head, None, ("'medusa'",)),
        ("eagle3", eagle_head, str(draft_model), ("'eagle'", "'eagle3'")),
    ):
        with refused(ConfigError, naming=naming):
            learned_annotator(method, str(folder), target)
    with refused(ConfigError, naming=("99", "23")):
        learned_annotator("draft_model", str(draft_model), None).annotate([response_of([5], 99)], 4)


def recorded(folder, engine, strategy, *, rl_step, temperature):
    """Four groups of four responses under one strategy, as a trace."""
    rng = np.random.default_rng(rl_step)
    prompts = [rng.integers(4, WORDS, 12).tolist() for _ in range(4)]
    requests = [
        GenerationRequest(
            key=(rl_step, f"p{n // 4}", n % 4, 0), prompt_token_ids=prompts[n // 4], max_response_tokens=40 + 4 * n
        )
        for n in range(16)
    ]
    engine.set_policy(Fixed(strategy))
    rollout = engine.generate(requests, rl_step=rl_step, temperature=temperature)
    metrics = {"drift_kl": 0.0}
    step = StepReport(rl_step=rl_step, policy="", reward_mean=0.0, num_tokens=0, rollout_s=1.0, metrics=metrics)
    epochs = {request.key: 0 for request in requests}
    at = {"rewards": {}, "epochs": epochs, "policy_version": 0, "t_start": 0.0, "drafter": {}}
    with Recorder(folder, Manifest(kind="recorded", num_workers=1)) as recorder:
        for table, rows in step_rows(step, [requests], [packed(rollout)], **at).items():
            recorder.append(table, rows)
    return tltlab.read(folder)


def drafts_of(trace, name, annotator):
    ((step, rows),) = annotate(trace, {DraftedBy(name): annotator}, 6)
    return agreement(step.replace(acceptance=rows), name)


@pytest.mark.engine
def test_annotated_acceptance_is_what_the_engine_accepted(draft_model, target_folder, tmp_path):
    """One engine with all drafters; that of an EAGLE head is beside the heads' own tests."""
    specs = {"ngram": NgramSpec(), "suffix": SuffixSpec(scopes=("request", "group"))}
    learned = LearnedSpec(method="draft_model", model=str(draft_model))
    cases = [
        ("learned", 0.0, learned_annotator("draft_model", str(draft_model), None)),
        ("learned", 0.4, learned_annotator("draft_model", str(draft_model), None)),
        *((name, 0.4, ReplayedDrafter(spec.make)) for name, spec in specs.items()),
    ]
    args = {"max_num_seqs": 16, "max_model_len": 128, "kv_cache_memory_bytes": 64 << 20}
    drafters = specs | {"learned": learned}
    with closing(Engine(str(target_folder), drafters=drafters, max_draft_depth=6, vllm_args=args)) as engine:
        for rl_step, (name, temperature, annotator) in enumerate(cases):
            folder, strategy = tmp_path / str(rl_step), Strategy.chain(name, 6)
            trace = recorded(folder, engine, strategy, rl_step=rl_step, temperature=temperature)
            drafts = drafts_of(trace, name, annotator)
            assert len(drafts) > 100
            assert 0.05 < drafts["recorded"].mean() < 5.5
            equal_share = (drafts["annotated"] == drafts["recorded"]).mean()
            # Close to its cap a request's drafts are shorter, and a suffix drafter's shorter draft may be another one.
            assert equal_share > 0.99 if name == "suffix" else equal_share == 1.0, (name, equal_share)
