"""A drafter class of a user's own is asked for drafts in vLLM, as the suffix drafter is."""

from contextlib import closing

import pytest

from tltlab.cli.new import write
from tltlab.drafters.specs import DEFAULT_DRAFTERS, OwnDrafter
from tltlab.policies.policy import Policy
from tltlab.policies.specs import FixedSpec
from tltlab.runtime.engine.engine import Engine
from tltlab.strategy import Strategy

from .asking import kept_and_refused, requests, texts

pytestmark = pytest.mark.engine


def test_a_new_drafter_drafts_in_an_engine(random_model, tmp_path, monkeypatch):
    write("drafter", "copier", tmp_path, model="")
    monkeypatch.chdir(tmp_path)
    mine = OwnDrafter(path="copier:Copier")
    policy = Policy(selector=FixedSpec(strategy=Strategy.chain("mine", 4)), drafters={"mine": mine})
    args = {"max_model_len": 256, "max_num_seqs": 32, "kv_cache_memory_bytes": 32 << 20}
    drafters = {**DEFAULT_DRAFTERS, **policy.drafters}
    engine = Engine(str(random_model), drafters=drafters, max_draft_depth=4, vllm_args=args)
    with closing(engine):
        engine.set_policy(None)
        plain = texts(engine.generate(requests(4, 60), rl_step=0, temperature=0.0))
        engine.set_policy(policy)
        drafted = engine.generate(requests(4, 60, rl_step=1), rl_step=1, temperature=0.0)
    assert texts(drafted) == plain
    assert {row["drafter"] for row in drafted.iterations.to_pylist() if row["num_drafted"]} == {"mine"}
    kept, refused = kept_and_refused(drafted)
    assert kept > refused > 0
