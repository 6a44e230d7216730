"""What frameworks call the metrics of an RL step, and the trace that they make."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from tltlab.arrays import Ints
from tltlab.errors import TraceError

from .length_table import tables_of_lengths
from .max_entropy import max_entropy_lengths

FIRST_OF: dict[str, tuple[str, ...]] = {
    "mean": (
        "response_length/mean", "completions/mean_length", "completion_length", "mean_gen_tokens_per_sample",
        "gen_tokens_per_sample/mean", "generate/avg_num_tokens", "vllm/mean_generation_tokens",
    ),
    "least": (
        "response_length/min", "completions/min_length", "min_gen_tokens_per_sample", "gen_tokens_per_sample/min",
        "generate/min_num_tokens",
    ),
    "most": (
        "response_length/max", "completions/max_length", "max_gen_tokens_per_sample", "gen_tokens_per_sample/max",
        "generate/max_num_tokens", "vllm/max_generation_tokens",
    ),
    "cut": ("response_length/clip_ratio", "completions/clipped_ratio", "truncation_rate", "vllm/cut_share"),
    "prompt": ("prompt_length/mean", "mean_prompt_length", "vllm/mean_prompt_tokens"),
    "responses": ("global_valid_seqs", "vllm/num_requests"),
    "total_tokens": ("perf/total_num_tokens",),
    "rollout_s": (
        "timing_s/gen", "timing_s/generate_sequences", "timing/train/generation", "timing/generate",
        "profiling/vLLM.generate", "profiling/transformers.generate",
    ),
    "step_s": ("timing_s/step", "perf/time_per_step", "timing/train/total_step_time", "timing/step", "step_time"),
    "reward_mean": ("critic/score/mean", "reward", "reward/avg_raw_reward", "critic/rewards/mean"),
    "drafts": ("spec_decode/num_drafts", "vllm/num_drafts"),
    "accepted": ("spec_decode/num_accepted_tokens", "vllm/num_accepted_tokens"),
}  # fmt: skip
"""Field: the keys that say it, the first that is there counts.

verl: `compute_data_metrics`, `compute_timing_metrics` and `compute_throughout_metrics` of trainer/ppo/metric_utils.py.
TRL: `GRPOTrainer` (trainer/grpo_trainer.py). NeMo-RL: the metrics of experience/rollouts.py and the timers of
algorithms/grpo.py. SkyRL: `get_rollout_metrics` of generators/utils.py and the timers of trainer.py. A prefix `train/`,
which TensorBoard and W&B have, is no part of a key, nor what comes before the name of a call in
`profiling/Time taken: GRPOTrainer.vLLM.generate`, which TRL logs to W&B (extras/profiling.py).
"""

SUM_OF: dict[str, tuple[str, ...]] = {
    "inference_s": (
        "timing_s/old_log_prob", "timing_s/ref", "timing_s/values", "timing/train/policy_and_reference_logprobs",
        "timing/fwd_logprobs_values_reward",
    ),
    "reward_s": ("timing_s/reward", "timing/train/reward_calculation", "profiling/_calculate_rewards"),
    "train_s": (
        "timing_s/update_actor", "timing_s/update_critic", "timing/train/policy_training", "timing/policy_train",
        "timing/critic_train", "timing/policy_critic_overlap_train",
    ),
    "sync_s": (
        "timing_s/update_weights", "timing/train/weight_sync", "timing/train/prepare_for_generation/total",
        "timing/sync_weights", "profiling/_move_model_to_vllm", "profiling/sync_weights",
    ),
}  # fmt: skip
"""Field: the keys whose sum it is, from the same sources."""

_KNOWN = {key for keys in (*FIRST_OF.values(), *SUM_OF.values()) for key in keys}
_ACCEPT_LENGTH = re.compile(r"(^|[/_.])(mean_|avg_)?(spec_)?accept(ance|ed)?_len(gth)?(/mean)?$")
"""Accept length has no agreed name: `spec_decode/mean_acceptance_length`, slime's `spec_accept_length` and the like."""
_TRL_CALL = re.compile(r"^profiling/Time taken: \w+\.")
_DRAFTER_TRAINING = re.compile(
    r"(draft|speculator|eagle|mtp).*(loss|train|update)|(train|update)[a-z]*_(draft|speculator|eagle|mtp)"
)
"""`draft_loss` of NeMo-RL, `timing_s/update_drafter` and the like: the drafter was trained in that RL step."""

MOST_RESPONSES = 1 << 22
"""That lengths are made for, over all RL steps of a log: some 2 GB."""
DEFAULT_RESPONSES = 512
"""Responses per RL step where neither the log nor the caller says it."""


def plain_key(key: str) -> str | None:
    """The key as the tables above have it; None for a metric that says nothing of use here."""
    key = _TRL_CALL.sub("profiling/", key.strip().removeprefix("train/"))
    if key in _KNOWN or _ACCEPT_LENGTH.search(key):
        return key
    return key if _DRAFTER_TRAINING.search(key) and "val" not in key.split("/")[0] else None


@dataclass(frozen=True, kw_only=True)
class Record:
    """Some metrics of an RL step by `plain_key`, and where the log has them; `rl_step` None is not said."""

    rl_step: int | None
    place: str
    values: Mapping[str, float]


@dataclass(kw_only=True)
class StepMetrics:
    """All metrics of an RL step."""

    rl_step: int
    place: str
    values: dict[str, float] = field(default_factory=dict)

    def get(self, name: str) -> float | None:
        """A field of FIRST_OF or SUM_OF; None where the log does not say it."""
        values = [self.values[key] for key in (FIRST_OF.get(name) or SUM_OF[name]) if key in self.values]
        if not values:
            return None
        return sum(values) if name in SUM_OF else values[0]

    @property
    def accept_length(self) -> float | None:
        length = next((value for key, value in self.values.items() if _ACCEPT_LENGTH.search(key)), None)
        drafts, accepted = self.get("drafts"), self.get("accepted")
        if length is None and drafts and accepted is not None:
            length = 1.0 + accepted / drafts
        # Logs write 0 where nothing was drafted; each iteration yields one token then.
        return None if length is None else max(length, 1.0)

    @property
    def num_responses(self) -> int | None:
        """Responses of the RL step: said, or all tokens over the mean tokens of a response with its prompt."""
        num, total = self.get("responses"), self.get("total_tokens")
        mean, prompt = self.get("mean"), self.get("prompt")
        if num is None and total is not None and mean is not None and prompt is not None and mean + prompt > 0:
            num = total / (mean + prompt)
        return None if num is None or num < 0.5 else round(num)


def steps_of(records: Iterable[Record]) -> tuple[list[StepMetrics], list[str]]:
    """The RL steps of a log in order, and what had to be noted.

    Records of an RL step that say different things are one; where a record says anew what is known of its RL step, the
    run was resumed, and the last one counts. Records without a number are counted from 1.
    """
    steps: dict[int, StepMetrics] = {}
    repeats: set[int] = set()
    num_unnumbered = 0
    for record in records:
        if record.rl_step is None:
            num_unnumbered += 1
        rl_step = num_unnumbered if record.rl_step is None else record.rl_step
        if rl_step in steps and not steps[rl_step].values.keys().isdisjoint(record.values):
            repeats.add(rl_step)
            del steps[rl_step]
        steps.setdefault(rl_step, StepMetrics(rl_step=rl_step, place=record.place)).values.update(record.values)
    notes = []
    if num_unnumbered:
        notes.append("the log does not number its RL steps: they are counted from 1")
    if repeats:
        few = ", ".join(map(str, sorted(repeats)[:5])) + (", ..." if len(repeats) > 5 else "")
        notes.append(f"{len(repeats)} RL steps are logged more than once (a resumed run): the last one counts ({few})")
    return [steps[rl_step] for rl_step in sorted(steps)], notes


def tables_of_steps(
    steps: list[StepMetrics], *, place: str, responses: int | None, group_size: int | None,
    max_response_tokens: int | None,
) -> tuple[dict[str, pd.DataFrame], list[str]]:  # fmt: skip
    """Workload, outcomes and steps of a log's RL steps, and what was assumed. Raises TraceError where there is nothing.

    Lengths are `max_entropy_lengths` of what is known; their order within an RL step is drawn, the same each time.
    `responses` per RL step are used where the log does not say how many. The cap is `max_response_tokens`, else the
    longest response of RL steps with cut ones, else the longest of all.
    """
    notes: list[str] = []
    usable = [step for step in steps if step.get("mean") is not None]
    if not usable:
        raise TraceError(
            f"{place}: no RL step says how long its responses were; wanted "
            f"{', '.join(FIRST_OF['mean'][:2])} or {FIRST_OF['mean'][3]} and the like"
        )
    if lost := [step.rl_step for step in steps if step.get("mean") is None and step.get("rollout_s") is not None]:
        notes.append(f"{len(lost)} RL steps say no mean length and are left out ({', '.join(map(str, lost[:5]))})")
    gaps = sorted(set(range(usable[0].rl_step, usable[-1].rl_step + 1)) - {step.rl_step for step in usable})
    if gaps:
        notes.append(f"{len(gaps)} RL steps between the first and the last are not in the log")
    counts = _counts(usable, responses, notes)
    if (num := sum(counts)) > MOST_RESPONSES:
        raise TraceError(f"{place}: its tokens make {num:,} responses, and at most {MOST_RESPONSES:,} are read at once")
    cap = _cap(usable, max_response_tokens, place, notes)
    for name, quantity in (("least", "shortest"), ("most", "longest"), ("cut", "cut responses")):
        if missing := sum(step.get(name) is None for step in usable):
            notes.append(f"{missing} RL steps do not say their {quantity}")
    frames, modelled = [], []
    for step, num in zip(usable, counts, strict=True):
        try:
            lengths = _lengths(step, num, cap)
        except ValueError as error:
            notes.append(f"RL step {step.rl_step} is left out ({step.place}): {error}")
            continue
        modelled.append(step)
        prompts = np.arange(num) // (group_size or 1)
        columns = {
            "rl_step": step.rl_step,
            "prompt_id": [f"s{step.rl_step}-p{prompt}" for prompt in prompts],
            "sample": np.arange(num) % (group_size or 1),
            "response_tokens": np.random.default_rng(step.rl_step).permutation(lengths),
            "prompt_tokens": max(0, round(step.get("prompt") or 0.0)),
            # In an average over batches, as TRL logs them, the longest is shorter than the cap.
            "longest": int(lengths[-1]) if (step.get("cut") or 0.0) > 0 else cap,
        }
        frames.append(pd.DataFrame(columns))
    if not frames:
        raise TraceError(f"{place}: {'; '.join(notes)}")
    if any(step.get("prompt") is None for step in modelled):
        notes.append("prompts whose length is not in the log count as 0 tokens")
    notes.append(
        "lengths are not measured but the maximum-entropy ones (truncated exponential) with the log's mean, shortest, "
        "longest and share of cut responses"
    )
    rows = pd.concat(frames, ignore_index=True)
    known_cut = any((step.get("cut") or 0.0) > 0 for step in modelled) or max_response_tokens is not None
    is_cut = (rows["response_tokens"] >= rows["longest"]) & known_cut
    lengths, prompt_tokens = rows["response_tokens"].to_numpy(), rows["prompt_tokens"].to_numpy()
    tables = tables_of_lengths(rows[["rl_step", "prompt_id", "sample"]], lengths, prompt_tokens, cap, is_cut.to_numpy())
    return {**tables, "steps": _steps_table(modelled)}, notes


def _counts(steps: list[StepMetrics], responses: int | None, notes: list[str]) -> list[int]:
    counts = [step.num_responses for step in steps]
    stated = [num for num in counts if num is not None]
    missing = len(counts) - len(stated)
    default = responses or (int(np.median(stated)) if stated else DEFAULT_RESPONSES)
    if missing:
        source = "as given" if responses else "as many as the others have" if stated else "a default: say --responses"
        notes.append(f"{missing} RL steps do not say how many responses they have: {default}, {source}")
    return [default if num is None else num for num in counts]


def _cap(steps: list[StepMetrics], maximum: int | None, place: str, notes: list[str]) -> int:
    longest = math.ceil(max(step.get("most") or step.get("mean") or 1.0 for step in steps))
    if maximum is not None:
        if longest > maximum:
            raise TraceError(f"{place}: a response has {longest} tokens, the maximum was said to be {maximum}")
        return maximum
    if any((step.get("cut") or 0.0) > 0 and step.get("most") is not None for step in steps):
        return longest
    if all(step.get("most") is None for step in steps):
        longest *= 8
        notes.append(f"no RL step says its longest response: nothing is assumed to end before {longest} tokens")
    notes.append(f"the cap is unknown: the longest response ({longest} tokens) is taken for it")
    return max(1, longest)


def _lengths(step: StepMetrics, num: int, cap: int) -> Ints:
    mean, most, least = step.get("mean"), step.get("most"), step.get("least")
    assert mean is not None
    cut = min(max(step.get("cut") or 0.0, 0.0), 1.0)
    shortest, longest = None if least is None else max(1, round(least)), None if most is None else round(most)
    end = cap if longest is None else longest
    return max_entropy_lengths(num, mean=max(mean, 1.0), least=shortest, most=longest, cut=cut, cap=end)


def _steps_table(steps: list[StepMetrics]) -> pd.DataFrame:
    """The table `steps`; times of the run count from the first RL step."""
    stages = ["rollout_s", "inference_s", "reward_s", "train_s", "sync_s"]
    columns = {name: [step.get(name) for step in steps] for name in (*stages, "step_s", "reward_mean")}
    table = pd.DataFrame(columns | {"accept_length": [step.accept_length for step in steps]}, dtype=np.float64)
    whole = table["step_s"].fillna(table[stages].sum(axis=1))
    table.insert(0, "rl_step", [step.rl_step for step in steps])
    table["t_start"] = whole.cumsum() - whole
    table["policy_version"] = table["rl_step"]
    is_trained = np.array([any(v for key, v in step.values.items() if _DRAFTER_TRAINING.search(key)) for step in steps])
    if is_trained.any():
        # Trained in an RL step it serves from the next one on.
        version = np.concatenate([[0], np.cumsum(is_trained)[:-1]])
        since = pd.Series(table["rl_step"].where(is_trained)).shift().ffill()
        table["drafter_version"] = version
        table["drafter_age"] = (table["rl_step"] - 1 - since).astype(np.float64)
    return table
