"""Lines of logs as each framework prints them: what is read is what whole lines say, and wrapped ones are refused."""

from __future__ import annotations

import random
import re

import pytest

from tests.refused import refused
from tests.traces_of_lengths import import_dump
from tltlab.errors import ConfigError, TraceError
from tltlab.importers.metrics_log import records_of
from tltlab.importers.step_metrics import FRAMEWORKS, frameworks_of, steps_of

Values = dict[tuple[int, str], float]
LINES = {
    "verl": (
        "(TaskRunner pid=87) step:{n} - global_seqlen/min:41933 - actor/pg_loss:-{a} - training/global_step:{n} - "
        "critic/score/mean:{a} - response_length/mean:{b} - response_length/max:16384.0 - response_length/clip_ratio:"
        "{a} - prompt_length/mean:100.5 - num_turns/mean:2.0 - timing_s/gen:{c} - timing_s/reward:9.5e-05 - "
        "timing_s/old_log_prob:90.5 - timing_s/ref:3.5 - timing_s/adv:1.5 - timing_s/update_actor:300.5 - "
        "timing_s/update_weights:7.5 - timing_s/step:1100.5 - perf/total_num_tokens:1452300 - perf/throughput:{c} - "
        "spec_decode/num_drafts:30 - spec_decode/mean_acceptance_length:{d}",
    ),
    "verl, fully asynchronous or one step off": (
        "step:{n} - response_length/mean:{b} - timing_s/wait_prev_gen:4.5 - timing_s/generate_async:60.5 - "
        "timing_s/sync_rollout_weights:2.5 - timing_s/step:99.125",
    ),
    "TRL": (
        " {n}%|#    | {n}/60 [00:26<04:07]",
        "{{'loss': -{a}, 'completions/mean_length': {b}, 'completions/max_length': 1024.0, 'completions/min_length': "
        "3, 'completions/clipped_ratio': '0.25', 'reward': {a}, 'step_time': 35.5, 'profiling/vLLM.generate': {c}}}",
    ),
    "NeMo-RL, asynchronous": (
        "========================= Step {n}/1000 =========================",
        "  • Mean Generation Length: {b:.4f}",
        "  • Total step time: 61.25s",
        "  • exposed_generation: 40.5s (65.5%)",
    ),
    "NeMo-RL": (
        "========================= Step {n}/1000 =========================",
        "  • Mean Generation Length: {b:.4f}",
        "  • Total step time: 61.25s",
        "  • generation: 40.5s (65.5%)",
        "  • policy_training: 12.00s (19.6%)",
    ),
    "SkyRL": (
        "(entrypoint pid=42) step:{n} - generate/avg_num_tokens:{b} - generate/max_num_tokens:1024 - "
        "timing/generate:152.5 - timing/fwd_logprobs_values_reward:20.5 - timing/policy_train:60.5 - "
        "timing/sync_weights:5.5 - timing/step:{c} - trainer/epoch:0",
    ),
    "slime or miles": (
        "(RolloutManager pid=417) [2026-05-11 10:00] rollout.py:1190 - perf {n}: {{'rollout/response_len/mean': {b}, "
        "'rollout/response_len/max': 9800, 'rollout/truncated_ratio': 0.0125, 'rollout/spec_accept_length': {d}, "
        "'rollout/spec_accept_rate': 0.5, 'perf/rollout_time': {c}}}",
        "(MegatronTrainRayActor pid=77) timer_utils.py:40 - perf {n}: {{'perf/train_wait_time': 330.5, "
        "'perf/actor_train_time': 65.5, 'perf/log_probs_time': 21.0, 'perf/update_weights_time': 8.5, "
        "'perf/step_time': 530.5}}",
        "(MegatronTrainRayActor pid=77) model.py:600 - step {n}: {{'train/loss': 0.01}}",
    ),
    "OpenRLHF": (
        "(PPOTrainer pid=22) Episode [1/1]:  10%|# | {n}/60 [01:00<10:00](PPOTrainer pid=22) INFO ppo_trainer.py:410: "
        "✨ Global step {n}: {{'reward': 0.31, 'response_length': 600.5, 'truncated': 0.05, 'total_length': 950.5, "
        "'timing/make_experience': 65.5, 'timing/ppo_train': 30.0, 'timing/broadcast': 2.0, 'timing/generation': 55.0, "
        "'timing/step_total': 99.0}}",
    ),
    "ROLL": (
        '[2026-05-11 10:00] [rlvr_pipeline.py (612)] [INFO] [DRIVER]: {{"time/step_generate": 70.5, "time/step_train": '
        '40.0, "time/old_log_probs": 5.0, "time/step_model_update": 2.0, "time/step_total": 160.0, '
        '"tokens/response_length/mean": {b}, "tokens/response_length/max": 4096.0, "system/step": {n}}}',
    ),
    "AReaL": (
        "20260708-10:00 StatsLogger INFO: Epoch 1/5 Step {n}/9 Train step {n}/45 done.",
        "╭────────────────────────────────────────────────────────────╮",
        "│ ppo_actor/seq_len/avg      │ {b:.4e} │ ppo_actor/seq_len/max      │ 8.0000e+03 │",
        "│ ppo_actor/prompt_len/avg   │ 1.0000e+02 │ ppo_actor/n_seqs           │ 2.5600e+02 │",
        "│ timeperf/rollout           │ {c:.4e} │ timeperf/train_step        │ 4.0000e+01 │",
        "╰────────────────────────────────────────────────────────────╯",
    ),
    "prime-rl": (
        "10:00:01 SUCCESS Step {n} | Time: 55.25s | Reward: 0.4230 | Seq. Length: {b:.1f} tokens/sample | Async Level: "
        "1 | Max. Off-Policy Level: 2",
    ),
    "vLLM's console": (
        "(APIServer pid=41) INFO 05-11 [loggers.py:257] Engine 000: Avg prompt throughput: 10.0 tokens/s, Avg "
        "generation throughput: {b:.1f} tokens/s, Running: 9 reqs",
        "(APIServer pid=41) INFO 05-11 [metrics.py:100] SpecDecoding metrics: Mean acceptance length: 2.25, Accepted: "
        "364 tokens, Drafted: 1190 tokens, Per-position acceptance rate: 0.339, Avg Draft acceptance rate: 30.6%",
    ),
    "SGLang's console": (
        "[2026-05-11 10:00] Decode batch. #running-req: 9, #token: {n}200, accept len: 2.25, accept rate: 0.41, cuda "
        "graph: True, gen throughput (token/s): {b:.2f}, #queue-req: 0",
    ),
}
"""Templates of the lines of an RL step, by row of `frameworks.toml`."""
KEYS = ("step={n} response_length/mean={b} timing_s/gen={c} loss=0.25",)
each_log = pytest.mark.parametrize("name", LINES)


def lines_of(name, steps=4):
    drawn, found = random.Random(name), []
    for step in range(1, steps + 1):
        values = {"a": drawn.random(), "b": drawn.uniform(300, 9000), "c": drawn.uniform(200, 700)}
        values["d"] = drawn.uniform(1, 4)
        found += [line.format(n=step, **values) for line in LINES.get(name, KEYS)]
    return found


def write(folder, lines, end="\n"):
    path = folder / "x.log"
    path.write_text("\n".join(lines) + end, encoding="utf-8")
    return path


def steps(folder, lines, end="\n"):
    return steps_of(records_of(write(folder, lines, end)))[0]


def values_of(folder, lines, end="\n"):
    return {(step.rl_step, key): value for step in steps(folder, lines, end) for key, value in step.values.items()}


FIELDS = {
    "verl": "most=16384 prompt=100.5 total_tokens=1452300 inference_s=94 reward_s=9.5e-5 advantage_s=1.5 train_s=300.5 "
    "sync_s=7.5 step_s=1100.5 turns=2 drafts=30",
    "verl, fully asynchronous or one step off": "wait_s=4.5 rollout_s=60.5 sync_s=2.5 step_s=99.125",
    "TRL": "most=1024 least=3 cut=0.25 step_s=35.5",
    "NeMo-RL, asynchronous": "wait_s=40.5 step_s=61.25",
    "NeMo-RL": "rollout_s=40.5 train_s=12 step_s=61.25",
    "SkyRL": "most=1024 rollout_s=152.5 inference_s=20.5 train_s=60.5 sync_s=5.5",
    "slime or miles": "most=9800 cut=0.0125 draft_rate=0.5 inference_s=21 train_s=65.5 sync_s=8.5 step_s=530.5",
    "OpenRLHF": "mean=600.5 prompt=350 cut=0.05 rollout_s=55 train_s=30 sync_s=2 reward_mean=0.31 step_s=99",
    "ROLL": "most=4096 rollout_s=70.5 inference_s=5 train_s=40 sync_s=2 step_s=160",
    "AReaL": "most=7900 prompt=100 responses=256 train_s=40",
    "prime-rl": "step_s=55.25 reward_mean=0.423",
    "vLLM's console": "accept_length=2.25 accepted=364 drafted=1190 draft_rate=0.306",
    "SGLang's console": "accept_length=2.25 draft_rate=0.41",
}
"""What the lines say, by row."""


@each_log
def test_frameworks_call_a_field_by_their_names(tmp_path, name):
    assert set(LINES) == {framework.name for framework in FRAMEWORKS}
    found = steps(tmp_path, lines_of(name))
    assert [step.rl_step for step in found] == [1, 2, 3, 4]
    for step in found:
        assert step.framework.name == name
        for field, value in (pair.split("=") for pair in FIELDS[name].split()):
            assert step.get(field) == pytest.approx(float(value)), field
        assert step.get("mean") or step.get("tokens_per_s")


@pytest.mark.parametrize(
    ("row", "facts"),
    [
        ({"name": "Ours", "marks": "^ours/", "fields": {"rolout_s": ["ours/generate"]}}, ("entry Ours", "rolout_s")),
        ({"name": "Ours"}, ("entry Ours", "marks")),
        ({"marks": "^ours/"}, ("entry 2", "name")),
        ({"name": "Ours", "marks": "^ours/("}, ("entry Ours", "marks")),
        ({"name": "Ours", "marks": "^ours/", "as": "Theirs"}, ("entry Ours", "as")),
    ],
)
def test_a_wrong_entry_of_the_table_is_named(row, facts):
    with refused(ConfigError, naming=("frameworks.toml", *facts)):
        frameworks_of([{"name": "verl", "marks": "^timing_s/"}, row])


@pytest.mark.parametrize("name", [*LINES, "key=value"])
def test_a_wrapped_log_is_refused(tmp_path, name):
    lines = lines_of(name)
    whole, longest = values_of(tmp_path, lines), max(map(len, lines))
    assert whole
    messages = []
    for width in range(60, longest, 7):
        for trimmed in (str, str.rstrip):
            pieces = [trimmed(line[at : at + width]) for line in lines for at in range(0, len(line), width)]
            try:
                found = values_of(tmp_path, pieces)
            except TraceError as error:
                messages.append(str(error))
            else:
                assert found.items() <= whole.items(), width
                assert not 0.4 * longest < width < 0.7 * longest or "NeMo" in name, width
    assert all("x.log, line" in message and "COLUMNS" in message for message in messages)


@each_log
def test_in_a_cut_log_no_number_is_another(tmp_path, name):
    lines, text = lines_of(name), "\n".join(lines_of(name))
    whole = values_of(tmp_path, lines)
    for width in range(40, max(map(len, lines)), 13):
        assert values_of(tmp_path, [line[:width] for line in lines]).items() <= whole.items(), width
    for at in range(len(text) // 2, len(text), max(1, len(text) // 60)):
        assert values_of(tmp_path, [text[:at]], end="").items() <= whole.items(), at


@pytest.mark.parametrize("between", ["\n - ", "\n(TaskRunner pid=87)  - ", " -\n"])
def test_one_metric_a_line_is_refused(tmp_path, between):
    with refused(TraceError, naming=("line 1", "COLUMNS", "JSON Lines")):
        import_dump(write(tmp_path, [line.replace(" - ", between) for line in lines_of("verl")]))


@pytest.mark.parametrize("name", ["verl", "TRL", "slime or miles"])
def test_an_engines_reports_are_of_no_step(tmp_path, name):
    whole = values_of(tmp_path, lines_of(name))
    mixed = [part for line in lines_of(name) for part in (*lines_of("vLLM's console"), line)]
    assert values_of(tmp_path, mixed) == whole


def test_two_records_in_one_line_stay_two(tmp_path):
    one, two, *_ = lines_of("verl")
    whole, found = values_of(tmp_path, lines_of("verl")), values_of(tmp_path, [one + two])
    assert found.items() <= whole.items()
    assert {rl_step for rl_step, _ in found} == {1, 2}


def test_not_a_number_is_unknown(tmp_path):
    found = values_of(tmp_path, [line.replace("timing_s/gen:", "timing_s/gen:nan - was:") for line in lines_of("verl")])
    assert (1, "timing_s/gen") not in found
    assert (1, "timing_s/step") in found


def test_experience_that_holds_generation_counts_it_once(tmp_path):
    assert steps(tmp_path, lines_of("OpenRLHF"))[0].stages["inference_s"] == pytest.approx(10.5)
    apart = [line.replace("'timing/step_total': 99.0", "'timing/step_total': 152.5") for line in lines_of("OpenRLHF")]
    assert steps(tmp_path, apart)[0].stages["inference_s"] == pytest.approx(65.5)


def test_timing_gen_is_waiting_with_overlapped_rollouts(tmp_path):
    [step, *_] = steps(tmp_path, lines_of("verl"))
    assert step.get("rollout_s") == step.values["timing_s/gen"]
    more = " - fully_async/trainer/idle_ratio:0.3 - timing_s/param_sync:4.0"
    [step, *_] = steps(tmp_path, [line + more for line in lines_of("verl")])
    assert (step.get("rollout_s"), step.get("wait_s")) == (None, step.values["timing_s/gen"])
    assert step.stages["sync_s"] == 11.5


def test_nested_timers_are_no_stages_of_their_own(tmp_path):
    more = " - timing_s/generate_sequences:3.0 - timing_s/agent_loop/generate_sequences/max:9.0 - timing_s/testing:7.0"
    [step, *_] = steps(tmp_path, [line + more for line in lines_of("verl")])
    stages = ("rollout_s", "inference_s", "reward_s", "advantage_s", "train_s", "sync_s", "timing_s/testing")
    assert set(step.stages) == set(stages)


@pytest.mark.parametrize(
    ("more", "facts"),
    [
        ("num_turns/mean:7.4 - tool_call_counts/mean:3.2", ("7.4", "3.2")),
        ("timing_s/agent_loop/tool_calls/mean:240.5", ("240",)),
        ("num_turns/mean:2.0 - timing_s/agent_loop/tool_calls/mean:0.0", ()),
    ],
    ids=["turns", "tools", "one turn"],
)
def test_turns_and_tools_are_noted(tmp_path, more, facts):
    lines = [f"{re.sub(r' - num_turns/mean:[0-9.]+', '', line)} - {more}" for line in lines_of("verl")]
    notes = import_dump(write(tmp_path, lines)).manifest.notes or ""
    assert ("several turns" in notes) == bool(facts)
    assert all(fact in notes for fact in facts)


@pytest.mark.parametrize(
    "line",
    ["iter 3 | gen_avg: 412.1 | seconds: 33.2 | loss: 0.2", '{"iter": 3, "gen_avg": 41.5, "s": 33.2, "loss": 0.2}'],
    ids=["text", "json"],
)
def test_an_unknown_framework_is_named_as_such(tmp_path, line):
    with refused(TraceError, naming=("unknown framework", *(framework.name.split(",")[0] for framework in FRAMEWORKS))):
        import_dump(write(tmp_path, [line] * 3))


def test_a_log_without_lengths_names_its_framework(tmp_path):
    with refused(TraceError, naming=("vLLM's console", "TLTLAB_RECORD")):
        import_dump(write(tmp_path, lines_of("vLLM's console")))
