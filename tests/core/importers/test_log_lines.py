"""Lines of logs that are cut, wrapped or mixed: what is read of these is what the whole lines say, or nothing."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.refused import refused
from tltlab.errors import TraceError
from tltlab.importers.metrics_log import records_of
from tltlab.importers.sources import import_dump
from tltlab.importers.step_metrics import FRAMEWORKS, steps_of

STEPS = 4
Values = dict[tuple[int, str], float]


def verl(prefix: str = "(TaskRunner pid=87) ", text: Callable[[Any], str] = repr) -> list[str]:
    drawn = random.Random(1)
    lines = []
    for step in range(1, STEPS + 1):
        timing = {"gen": 700, "reward": 1e-4, "old_log_prob": 90, "ref": 90, "adv": 1, "update_actor": 300}
        metrics = {
            "global_seqlen/min": 41933, "actor/pg_loss": -drawn.random() * 1e-5, "training/global_step": step,
            "critic/score/mean": drawn.random(), "response_length/mean": drawn.uniform(300, 9000),
            "response_length/max": 16384.0, "response_length/clip_ratio": drawn.random() / 9,
            "prompt_length/mean": drawn.uniform(90, 200), "num_turns/mean": 2.0,
            **{f"timing_s/{name}": drawn.random() * most for name, most in timing.items()},
            "timing_s/step": drawn.uniform(1000, 1200), "perf/total_num_tokens": 1452300,
            "perf/throughput": drawn.uniform(10, 900), "spec_decode/mean_acceptance_length": drawn.uniform(1, 4),
        }  # fmt: skip
        lines.append(prefix + f"step:{step} - " + " - ".join(f"{key}:{text(value)}" for key, value in metrics.items()))
    return lines


def trl() -> list[str]:
    drawn = random.Random(2)
    return [
        line
        for step in range(STEPS)
        for line in (
            f" {step}%|#    | {step}/60 [00:26<04:07]",
            str({"loss": -drawn.random(), "completions/mean_length": drawn.uniform(90, 900),
                 "completions/max_length": 1024.0, "reward": drawn.random(), "step_time": drawn.uniform(9, 99)}),
        )
    ]  # fmt: skip


def slime() -> list[str]:
    drawn = random.Random(3)
    lines = []
    for step in range(STEPS):
        rollout = {"rollout/response_len/mean": drawn.uniform(900, 3000), "rollout/response_len/max": 9800,
                   "rollout/truncated_ratio": 0.0125, "rollout/spec_accept_length": drawn.uniform(1, 4),
                   "perf/rollout_time": drawn.uniform(200, 400)}  # fmt: skip
        train = {"perf/train_wait_time": drawn.uniform(300, 500), "perf/actor_train_time": drawn.uniform(40, 90),
                 "perf/log_probs_time": 21.0, "perf/update_weights_time": 8.5, "perf/step_time": 530.5}  # fmt: skip
        clock = f"[2026-05-11 10:0{step}:00]"
        lines.append(f"(RolloutManager pid=41{step}7) {clock} rollout.py:1190 - perf {step}: {rollout}")
        lines.append(f"(MegatronTrainRayActor pid=77) {clock} timer_utils.py:40 - perf {step}: {train}")
        lines.append(f"(MegatronTrainRayActor pid=77) {clock} model.py:600 - step {step}: {{'train/loss': 0.01}}")
    return lines


def openrlhf() -> list[str]:
    """The tokens of an experience are those of prompt and response; experience includes generation."""
    drawn = random.Random(4)
    return [
        f"(PPOTrainer pid=22) Episode [1/1]:  10%|# | {step}/60 [01:00<10:00](PPOTrainer pid=22) INFO 05-11 10:01:00 "
        f"ppo_trainer.py:410: ✨ Global step {step}: "
        + str({"reward": 0.31, "response_length": drawn.uniform(500, 900), "truncated": 0.05,
               "total_length": drawn.uniform(950, 999), "timing/make_experience": 65.5, "timing/ppo_train": 30.0,
               "timing/broadcast": 2.0, "timing/generation": 55.0, "timing/step_total": 99.0})
        for step in range(1, STEPS + 1)
    ]  # fmt: skip


def roll() -> list[str]:
    drawn = random.Random(5)
    return [
        f"[2026-05-11 10:0{step}:00] [rlvr_pipeline.py (612)] [INFO] [DRIVER]: "
        + json.dumps({"time/step_generate": drawn.uniform(50, 90), "time/step_train": 40.0,
                      "time/old_log_probs": 5.0, "time/step_model_update": 2.0, "time/step_total": 160.0,
                      "tokens/response_length/mean": drawn.uniform(500, 900), "tokens/response_length/max": 4096.0,
                      "system/step": step})
        for step in range(STEPS)
    ]  # fmt: skip


def areal() -> list[str]:
    drawn = random.Random(6)
    lines = []
    for step in range(1, STEPS + 1):
        cells = [("ppo_actor/seq_len/avg", drawn.uniform(900, 4000)), ("ppo_actor/seq_len/max", 8000.0),
                 ("ppo_actor/prompt_len/avg", 100.0), ("ppo_actor/n_seqs", 256.0),
                 ("timeperf/rollout", drawn.uniform(100, 300)), ("timeperf/train_step", 40.0)]  # fmt: skip
        lines.append(f"20260708-10:0{step}:00.123 StatsLogger INFO: Epoch 1/5 Step {step}/9 Train step {step}/45 done.")
        lines.append("╭" + "─" * 60 + "╮")
        for (one, first), (two, second) in zip(cells[::2], cells[1::2], strict=True):
            lines.append(f"│ {one:26s} │ {first:.4e} │ {two:26s} │ {second:.4e} │")
        lines.append("╰" + "─" * 60 + "╯")
    return lines


def prime_rl() -> list[str]:
    drawn = random.Random(7)
    return [
        f"10:0{step}:01 SUCCESS Step {step} | Time: {drawn.uniform(10, 99):.2f}s | Reward: 0.4230 | Seq. Length: "
        f"{drawn.uniform(1000, 9999):.1f} tokens/sample | Async Level: 1 | Max. Off-Policy Level: 2"
        for step in range(STEPS)
    ]


def vllm() -> list[str]:
    drawn = random.Random(8)
    return [
        line
        for step in range(STEPS)
        for line in (
            f"(APIServer pid=41) INFO 05-11 10:0{step}:16 [loggers.py:257] Engine 000: Avg prompt throughput: 10.0 "
            f"tokens/s, Avg generation throughput: {drawn.uniform(900, 2000):.1f} tokens/s, Running: 9 reqs",
            f"(APIServer pid=41) INFO 05-11 10:0{step}:16 [metrics.py:100] SpecDecoding metrics: Mean acceptance "
            f"length: {drawn.uniform(1, 4):.2f}, Accepted: 364 tokens, Drafted: 1190 tokens, Per-position acceptance "
            "rate: 0.339, 0.146, 0.071, Avg Draft acceptance rate: 30.6%",
        )
    ]


def key_value() -> list[str]:
    drawn = random.Random(9)
    return [
        f"step={step} response_length/mean={drawn.uniform(100, 999)} timing_s/gen={drawn.uniform(10, 99)} loss=0.25"
        for step in range(1, STEPS + 1)
    ]


LOGS = {
    "verl": verl(), "verl, no prefix": verl(prefix=""), "verl, three decimals": verl(text=lambda v: f"{v:.3f}"),
    "trl": trl(), "slime": slime(), "openrlhf": openrlhf(), "roll": roll(), "areal": areal(), "prime-rl": prime_rl(),
    "vllm": vllm(), "key=value": key_value(),
}  # fmt: skip
each_log = pytest.mark.parametrize("name", LOGS)


def write(folder: Path, lines: Iterable[str], end: str = "\n") -> Path:
    path = folder / "x.log"
    path.write_text("\n".join(lines) + end, encoding="utf-8")
    return path


def values_of(path: Path) -> tuple[Values, list[str]]:
    steps, notes = steps_of(records_of(path))
    return {(step.rl_step, key): value for step in steps for key, value in step.values.items()}, notes


def wrapped(lines: list[str], width: int, *, trimmed: bool) -> list[str]:
    """As a terminal of so many columns has them, blanks at the ends of its lines gone or not."""
    pieces = [line[at : at + width] for line in lines for at in range(0, len(line), width)]
    return [piece.rstrip(" ") for piece in pieces] if trimmed else pieces


@each_log
def test_wrapped_at_any_width_no_number_is_another(tmp_path: Path, name: str) -> None:
    whole, said = values_of(write(tmp_path, LOGS[name]))
    assert whole
    joined = 0
    widths = range(20, 401, 1 if name == "verl" else 9)
    for width in widths:
        found, notes = values_of(write(tmp_path, wrapped(LOGS[name], width, trimmed=width % 2 == 0)))
        assert found.items() <= whole.items(), width
        assert found == whole or not found or notes != said, width
        joined += found == whole
    assert joined > 0.8 * len(widths)


@each_log
def test_cut_at_any_column_no_number_is_another(tmp_path: Path, name: str) -> None:
    whole, _ = values_of(write(tmp_path, LOGS[name]))
    for width in range(40, max(map(len, LOGS[name])), 13):
        found, _ = values_of(write(tmp_path, [line[:width] for line in LOGS[name]]))
        if name == "roll":
            # Its records have no number once their end is gone, and are counted.
            found = {(rl_step - 1, key): value for (rl_step, key), value in found.items()}
        assert found.items() <= whole.items(), width


@each_log
@pytest.mark.parametrize("end", ["", "\n"], ids=["torn", "ended"])
def test_cut_at_any_letter_no_number_is_another(tmp_path: Path, name: str, end: str) -> None:
    whole, _ = values_of(write(tmp_path, LOGS[name]))
    text = "\n".join(LOGS[name])
    for at in range(len(text) // 2, len(text), max(1, len(text) // 60)):
        found, _ = values_of(write(tmp_path, [text[:at]], end))
        off = {key: (value, whole.get(key)) for key, value in found.items() if whole.get(key) != value}
        # A digit of many may be missing where numbers have as many decimals as come.
        assert not any(other is None or abs(value / other - 1) > 1e-6 for value, other in off.values()), at


def test_one_metric_a_line_is_a_record(tmp_path: Path) -> None:
    whole, _ = values_of(write(tmp_path, verl()))
    lines = [line.replace(" - ", "\n - ") for line in verl()]
    assert values_of(write(tmp_path, lines))[0] == whole
    lines = [line.replace(" - ", "\n(TaskRunner pid=87)  - ") for line in verl()]
    assert values_of(write(tmp_path, lines))[0] == whole
    lines = [line.replace(" - ", " -\n") for line in verl(prefix="")]
    assert values_of(write(tmp_path, lines))[0] == whole


def test_lines_between_prefixes_and_colours_do_not_matter(tmp_path: Path) -> None:
    whole, _ = values_of(write(tmp_path, verl()))
    lines = [
        part
        for number, line in enumerate(verl(prefix=""))
        for part in (
            f"Training Progress: {number}%|#  | {number}/58 [10:02<9:21:07, 601.2s/it]\r"
            f"\x1b[36m(TaskRunner pid=9{number})\x1b[0m 2026-05-11 10:00:01,123 {line} [repeated 2x across cluster]",
            "Saving checkpoint", "12 workers alive", "",
        )
    ]  # fmt: skip
    assert values_of(write(tmp_path, lines))[0] == whole


@pytest.mark.parametrize("name", ["verl", "trl", "slime"])
def test_an_engines_reports_are_of_no_step(tmp_path: Path, name: str) -> None:
    whole = values_of(write(tmp_path, LOGS[name]))
    assert values_of(write(tmp_path, [part for line in LOGS[name] for part in (*vllm(), line)])) == whole


def test_the_folders_name_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "metrics").mkdir()
    assert values_of(write(tmp_path / "metrics", verl())) == values_of(write(tmp_path, verl()))


def test_two_records_in_one_line_stay_two(tmp_path: Path) -> None:
    one, two, *_ = verl()
    whole, _ = values_of(write(tmp_path, verl()))
    found, _ = values_of(write(tmp_path, [one + two]))
    assert found.items() <= whole.items()
    assert {rl_step for rl_step, _ in found} == {1, 2}


def test_not_a_number_is_unknown(tmp_path: Path) -> None:
    [(_, key)] = [key for key in values_of(write(tmp_path, verl()))[0] if key == (1, "timing_s/gen")]
    lines = [line.replace("timing_s/gen:", "timing_s/gen:nan - was:") for line in verl()]
    found, _ = values_of(write(tmp_path, lines))
    assert (1, key) not in found
    assert (1, "timing_s/step") in found


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("slime", "rollout_s", 300), ("slime", "step_s", 530.5), ("slime", "sync_s", 8.5), ("slime", "train_s", 65),
        ("openrlhf", "rollout_s", 55), ("openrlhf", "prompt", 270), ("openrlhf", "step_s", 99),
        ("roll", "rollout_s", 70), ("roll", "inference_s", 5), ("roll", "sync_s", 2), ("areal", "prompt", 100),
        ("areal", "train_s", 40), ("areal", "responses", 256), ("prime-rl", "step_s", 55),
        ("vllm", "draft_rate", 0.306),
    ],
)  # fmt: skip
def test_frameworks_call_a_field_by_their_names(tmp_path: Path, name: str, field: str, value: float) -> None:
    for step in steps_of(records_of(write(tmp_path, LOGS[name])))[0]:
        assert step.get(field) == pytest.approx(value, rel=0.9 if value in (300, 65, 270, 70, 55) else 1e-9)


def test_experience_that_holds_generation_counts_it_once(tmp_path: Path) -> None:
    [step, *_] = steps_of(records_of(write(tmp_path, openrlhf())))[0]
    assert step.stages["inference_s"] == pytest.approx(10.5)
    apart = [line.replace("'timing/step_total': 99.0", "'timing/step_total': 152.5") for line in openrlhf()]
    [step, *_] = steps_of(records_of(write(tmp_path, apart)))[0]
    assert step.stages["inference_s"] == pytest.approx(65.5)


def test_timing_gen_is_waiting_with_overlapped_rollouts(tmp_path: Path) -> None:
    [step, *_] = steps_of(records_of(write(tmp_path, verl())))[0]
    assert step.get("rollout_s") == step.values["timing_s/gen"]
    lines = [line + " - fully_async/trainer/idle_ratio:0.3 - timing_s/param_sync:4.0" for line in verl()]
    [step, *_] = steps_of(records_of(write(tmp_path, lines)))[0]
    assert (step.get("rollout_s"), step.get("wait_s")) == (None, step.values["timing_s/gen"])
    assert step.stages["sync_s"] == 4.0


def test_nested_timers_are_no_stages_of_their_own(tmp_path: Path) -> None:
    more = " - timing_s/generate_sequences:3.0 - timing_s/agent_loop/generate_sequences/max:9.0 - timing_s/testing:7.0"
    [step, *_] = steps_of(records_of(write(tmp_path, [line + more for line in verl()])))[0]
    assert set(step.stages) == {
        "rollout_s", "inference_s", "reward_s", "advantage_s", "train_s", "timing_s/testing"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("more", "facts"),
    [
        ("num_turns/mean:7.4 - tool_call_counts/mean:3.2", ("7.4", "3.2")),
        ("timing_s/agent_loop/tool_calls/mean:240.5", ("240",)),
        ("num_turns/mean:2.0 - timing_s/agent_loop/tool_calls/mean:0.0", ()),
    ],
    ids=["turns", "tools", "one turn"],
)
def test_turns_and_tools_are_noted(tmp_path: Path, more: str, facts: tuple[str, ...]) -> None:
    notes = import_dump(write(tmp_path, [f"{line} - {more}" for line in verl()])).manifest.notes or ""
    assert ("several turns" in notes) == bool(facts)
    assert all(fact in notes for fact in facts)


@pytest.mark.parametrize(
    "line",
    ["iter 3 | gen_avg: 412.1 | seconds: 33.2 | loss: 0.2", '{"iter": 3, "gen_avg": 41.5, "s": 33.2, "loss": 0.2}'],
    ids=["text", "json"],
)
def test_an_unknown_framework_is_named_as_such(tmp_path: Path, line: str) -> None:
    with refused(TraceError, naming=("unknown framework", *(framework.name.split(",")[0] for framework in FRAMEWORKS))):
        import_dump(write(tmp_path, [line] * 3))


def test_a_log_without_lengths_names_its_framework(tmp_path: Path) -> None:
    with refused(TraceError, naming=("vLLM's console", "/metrics")):
        import_dump(write(tmp_path, vllm()))
