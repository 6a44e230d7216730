"""Rollouts of a real engine, played again by the simulator with their times and acceptance: the same decisions."""

from contextlib import closing, nullcontext
from pathlib import Path

import pandas as pd
import pytest

from tests.refused import refused
from tltlab.drafters.specs import DEFAULT_DRAFTERS, LearnedSpec
from tltlab.errors import ConfigError
from tltlab.policies.bandits import Ucb1
from tltlab.policies.policy import load_policy
from tltlab.sim.verification.decisions import RecordedDriver, replay_decisions
from tltlab.sim.verification.run_files import ActivePolicy
from tltlab.state import StepOutcome, StepState
from tltlab.strategy import Strategy
from tltlab.traces.schema import KEY, Manifest
from tltlab.traces.trace import Trace, read

TRACES = Path(__file__).resolve().parents[2] / "traces"
STATES = ("batch", "num_waiting", "context_tokens", "strategy")

BETWEEN = {
    "kind": "beg-mab",
    "buckets": [
        {"min_batch": 1, "strategies": ["learned:4", "suffix:4", "ngram:2", "none"]},
        {"min_batch": 9, "strategies": ["learned:2", "none"]},
    ],
    "reward": "relative",
}
POLICIES = {
    "n-grams": "ngram:4",
    "suffixes": "suffix:8",
    "a draft model": "learned:4",
    "a few at a time": "ngram:4@8",
    "a table": {
        "kind": "table",
        "rows": [{"min_batch": 1, "strategy": "learned:4"}, {"min_batch": 9, "strategy": "suffix:2"}],
    },
    "a ladder": {"kind": "ladder", "strategies": ["learned:1", "learned:3", "learned:6"], "warmup": 3, "hold": 2},
    "at random": "explore",
    "by times": "adaptive",
    "a bandit": BETWEEN,
    "by a cost model": {"kind": "goodput", "strategies": ["learned:2", "suffix:4"], "costs": "cpu-small"},
    "weights over drafters": {"kind": "hedge", "strategies": ["learned:4", "suffix:4", "ngram:4"]},
}  # fmt: skip


@pytest.fixture(scope="module", params=["synchronous", "asynchronous"])
def engine(random_model, request):
    """The target is its own draft model, and the batch holds 12 requests, so that some wait."""
    from bench.vllm.asynchronous import asynchronous
    from tltlab.runtime.engine.engine import Engine

    learned = LearnedSpec(method="draft_model", model=str(random_model))
    args = {"max_num_seqs": 12, "max_model_len": 128, "kv_cache_memory_bytes": 32 << 20}
    drafters = {**DEFAULT_DRAFTERS, "learned": learned}
    with asynchronous() if (late := request.param == "asynchronous") else nullcontext():
        args["async_scheduling"] = late
        with closing(Engine(str(random_model), drafters=drafters, max_draft_depth=8, vllm_args=args)) as engine:
            assert engine.control.overlapped == late
            yield engine


def recorded(engine, policy, rl_steps=2):
    """Rollouts of 16 requests as a trace, one for each RL step."""
    from tltlab.runtime.engine.generation import GenerationRequest

    engine.forget()
    engine.set_policy(policy, [7, 0, 0])
    rows = []
    tables = {"iterations": [], "decisions": []}
    for rl_step in range(rl_steps):
        requests = [
            GenerationRequest(
                key=(rl_step, f"p{n // 4}", n % 4, 0),
                prompt_token_ids=[1, 4 + n // 4, 5, 6],
                max_response_tokens=24 + n,
            )
            for n in range(16)
        ]
        rollout = engine.generate(requests, rl_step=rl_step, temperature=1.0)
        for request, response in zip(requests, rollout.responses, strict=True):
            prompt, tokens = len(request.prompt_token_ids), len(response.token_ids)
            rows.append((*request.key, 0, prompt, request.max_response_tokens, 0, tokens, response.finish_reason, 0))
        for name, parts in tables.items():
            parts.append(pd.DataFrame(getattr(rollout, name).to_pylist()))
    known = ["epoch", "prompt_tokens", "max_response_tokens", "policy_version"]
    measured = ["response_tokens", "finish_reason", "worker"]
    responses = pd.DataFrame(rows, columns=[*KEY, *known, *measured])
    return Trace.from_tables(
        Manifest(kind="recorded", name="conformance", num_workers=1),
        {
            "workload": responses[[*KEY, *known]],
            "outcomes": responses[[*KEY, *measured]],
            "steps": pd.DataFrame({"rl_step": range(rl_steps), "t_start": 0.0, "rollout_s": 1.0, "policy_version": 0}),
            **{name: pd.concat(parts, ignore_index=True) for name, parts in tables.items()},
        },
    )  # fmt: skip


def played_again(trace, policy):
    force = ActivePolicy(name="played", policy=policy, since=0, seed=7)
    return replay_decisions(trace, forces=dict.fromkeys(trace.rl_steps, force))


@pytest.mark.engine
@pytest.mark.parametrize("source", POLICIES.values(), ids=POLICIES)
def test_the_simulator_makes_an_engines_decisions_again(source, engine):
    policy = load_policy(source)
    decisions = played_again(recorded(engine, policy), policy)
    assert decisions.json()["num_decisions"] > 50
    assert decisions.share("same") >= 0.99, decisions.text()
    assert {name: decisions.share(name) for name in STATES} == dict.fromkeys(STATES, 1.0), decisions.text()


def test_recorded_run_is_replayed_to_last_decision():
    decisions = replay_decisions(TRACES / "gcd-small", rl_steps=[0, 3])
    assert decisions.rows["decisions"].tolist() == [524, 449]
    assert decisions.json()["same"] == 1.0
    assert decisions.json()["states"] == dict.fromkeys(STATES, 1.0)


def test_an_outcome_that_the_engine_withheld_is_withheld():
    selector = Ucb1([Strategy.chain("ngram", 2), Strategy.chain("ngram", 4)])
    driver = RecordedDriver(selector, frozenset({(0, 2)}))
    driver.begin(0)
    outcome = StepOutcome(elapsed_s=0.01, batch=1, drafted=(2,), accepted=(1,))
    first, second = (driver.ask(StepState(rl_step=0, batch=1)) for _ in range(2))
    driver.tell(first, outcome)
    assert selector.rounds_ == 0
    driver.ask(StepState(rl_step=0, batch=1))
    driver.tell(second, outcome)
    assert selector.rounds_ == 1


def test_other_tokens_than_the_recorded_ones_show():
    trace = read(TRACES / "gcd-small").select([0])
    assert trace.iterations is not None
    fewer = trace.iterations["accepted_per_request"].map(lambda kept: None if kept is None else [0] * len(kept))
    force = ActivePolicy(name="explore", policy=load_policy("explore"), since=0, seed=trace.manifest.seed or 0)
    decisions = replay_decisions(
        trace.replace(iterations=trace.iterations.assign(accepted_per_request=fewer)), forces={0: force}
    )
    assert decisions.share("context_tokens") < 0.5


def test_decisions_of_requests_that_a_planner_moved_are_refused():
    trace = read(TRACES / "gcd-small").select([0])
    with refused(ConfigError, naming=("planner",)):
        replay_decisions(trace.replace(spans=trace.spans.assign(kind="move")))


@pytest.mark.parametrize(
    ("trace", "facts"),
    [
        ("h100-smoke", ("RL step 0", "learned:1", "beg-mab")),
        ("base-rl-16k", ("base-rl-16k", "iterations", "decisions")),
    ],
)
def test_decisions_of_other_or_no_policies_are_refused(trace, facts):
    with refused(ConfigError, naming=facts):
        replay_decisions(TRACES / trace)
