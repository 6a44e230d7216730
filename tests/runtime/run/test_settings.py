"""A run with everything that a trainer may set of its length, steps, stops and evaluations, and its continuation."""

import json
import shutil

import pytest

import tltlab
from tltlab.runtime.drafter.offline.data import load_tokenizer
from tltlab.runtime.recipe.recipe import load_recipe, resumed_recipe
from tltlab.runtime.run.grpo import train
from tltlab.runtime.trainer.trainer import learning_rate

from ...nemesis.engines import check_finished

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_ray")]
STOPS = ("w3 w1", "w7")
SETTINGS = [
    "train.epochs=0.5", "train.lr_schedule=cosine", "train.lr_min_share=0.1", "train.warmup_steps=2", "train.passes=2",
    "train.weight_decay=0.1", "train.decay_all=false", "rollout.policy=ngram:4", f"rollout.stop={json.dumps(STOPS)}",
    "eval.every=1", "eval.num_prompts=4", "eval.samples=3", "eval.pass_at=[1,3]", "eval.temperature=0.7",
    "checkpoint.every=2", "checkpoint.best=true", "checkpoint.keep=9", "rollout.repeat_every=0", "train.lr=0.01",
]  # fmt: skip


def test_a_run_with_all_settings_resumes_bit_by_bit(recipe_file, tmp_path):
    heldout = {name: str(recipe_file.parent / f"{name}.jsonl") for name in ("train", "heldout")}
    whole, run = tmp_path / "whole", tmp_path / "run"
    recipe = load_recipe(recipe_file, [*SETTINGS, f"data.heldout={json.dumps(heldout)}"])
    summary = train(recipe, whole)
    resolved = resumed_recipe(whole, (), ["parity"])
    assert summary["grpo_steps"] == resolved.train.steps == 4
    assert {"reward/heldout", "reward/heldout/train/pass@3"} < summary["heldout"].keys()
    assert summary["best"]["reward"] >= summary["reward_last"]
    reports = json.loads((whole / "checkpoints" / "step-000004" / "state.json").read_text())["reports"]
    rates = [learning_rate(resolved.train, 4 * n + 3, 4 * n + 3) for n in range(4)]
    assert [report["metrics"]["lr"] for report in reports] == pytest.approx(rates)

    trace, tokenizer = tltlab.read(whole / "trace"), load_tokenizer(str(recipe_file.parent))
    assert trace.iterations["num_drafted"].sum() > 0
    ends = trace.outcomes.merge(trace.table("tokens"), on=["rl_step", "prompt_id", "sample", "turn"])
    at_stop = 0
    for row in ends.itertuples():
        before, text = (tokenizer.decode(row.token_ids[:end]) for end in (-1, None))
        assert not any(stop in before for stop in STOPS)
        at_eos, stopped = row.token_ids[-1] == tokenizer.eos_token_id, any(stop in text for stop in STOPS)
        assert row.finish_reason == ("stop" if at_eos or stopped else "length")
        assert len(row.logprobs) == len(row.token_ids)
        at_stop += stopped
    assert at_stop > 5

    shutil.copytree(whole, run, ignore=shutil.ignore_patterns("final", "summary.json", "step-000004"))
    again = train(resumed_recipe(run, (), ["parity"]), run, resume=True)
    check_finished(run, whole)
    for name in ("heldout", "best", "reward_last"):
        assert again[name] == summary[name]
    best = [(folder / "checkpoints" / "best" / "model.safetensors").read_bytes() for folder in (whole, run)]
    assert best[0] == best[1]
