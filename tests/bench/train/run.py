"""`tltlab bench train`: the same GRPO run by `tltlab train` and by TRL, in turn: seconds, lines to write, reward."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import bootstrap  # type: ignore[import-untyped, unused-ignore]
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from bench.harness import Goals, Progress, Table, Text, reward_difference
from bench.models import folder_or_temporary, made_model
from tltlab.console import made_by
from tltlab.errors import ConfigError, RunError
from tltlab.files import read_json, write_json
from tltlab.records import Json
from tltlab.runtime.drafter.offline.data import load_tokenizer
from tltlab.runtime.engine.environment import hardware, versions
from tltlab.runtime.models.make import Size
from tltlab.runtime.models.measure import sample
from tltlab.runtime.models.runs import prompts_of
from tltlab.runtime.rollout.rewards import load_reward
from tltlab.stats import Interval, interval_json, mean_of_few
from tltlab.traces.trace import read

from .texts import GrpoJob, recipe_text, script_text, written_lines

RESULT = "train.json"
TRL = ("trl==1.16.0", "accelerate==1.15.0")
"""Packages that TRL needs besides torch, transformers, datasets and vLLM."""
OURS, DEFAULTS, VLLM = "tltlab", "trl", "trl-vllm"
STAGES = ("rollout_s", "reward_s", "inference_s", "train_s", "sync_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSizes:
    """`blocks` runs of every side in turn, of `steps` RL steps; `heldout` prompts judge the policies at the end."""

    sides: tuple[str, ...] = (OURS, DEFAULTS, VLLM)
    model: str | Size = "tiny"
    steps: int = 5
    blocks: int = 4
    prompts_per_step: int = 24
    group_size: int = 8
    max_response_tokens: int = 768
    heldout: int = 512


FAST = replace(
    TrainSizes(sides=(OURS, DEFAULTS), steps=2, blocks=1, prompts_per_step=4, group_size=4, heldout=32),
    model=Size(hidden=64, layers=1, mlp=128, steps=60, measured_prompts=8),
    max_response_tokens=48,
)


GOALS = {"trl": 20.0, "trl-vllm": 1.3}
"""How many times faster per RL step `tltlab train` shall be than each mode of TRL, on two CPU cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SideRun:
    """One run of one side: `seconds`, `rewards` (means) and `lengths` (mean response tokens), one of each per RL step.

    `whole_s` is the whole process with its start, `stages` the seconds of each part of our steps. `as_is` says how a
    side failed before it ran in another way, `error` how it failed for good; a side that failed has no steps.
    """

    side: str
    seed: int
    seconds: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)
    stages: dict[str, list[float]] = field(default_factory=dict)
    whole_s: float | None = None
    heldout_reward: float | None = None
    as_is: str | None = None
    error: str | None = None


def steady(blocks: Sequence[SideRun], side: str) -> list[float]:
    """Seconds of a side's RL steps but the first of each run, in which compilers and caches warm up."""
    return [seconds for block in blocks if block.side == side for seconds in block.seconds[1:]]


def median_of(seconds: Sequence[float]) -> Interval:
    """The median with its interval over resampled RL steps."""
    return _resampled((seconds,), lambda a, axis=-1: np.median(a, axis=axis))


def ratio_of_medians(slow: Sequence[float], fast: Sequence[float]) -> Interval:
    """median(slow) / median(fast), RL steps of both resampled on their own: percentiles of 2000 resamples.

    >>> ratio_of_medians([40.0, 50.0, 60.0], [5.0, 5.0, 5.0]).estimate
    10.0
    """
    return _resampled((slow, fast), lambda a, b, axis=-1: np.median(a, axis=axis) / np.median(b, axis=axis))


def _resampled(samples: Sequence[Sequence[float]], statistic: Any) -> Interval:
    arrays = [np.asarray(sample, np.float64) for sample in samples]
    estimate = float(statistic(*arrays))
    if min(map(len, arrays)) < 2:
        return Interval(estimate=estimate, low=float("nan"), high=float("nan"))
    rng = np.random.default_rng(0)
    ends = bootstrap(arrays, statistic, n_resamples=2000, method="percentile", rng=rng).confidence_interval
    return Interval(estimate=estimate, low=float(ends.low), high=float(ends.high))


def learned(blocks: Sequence[SideRun], side: str, heldout: int) -> Json | None:
    """How much more held-out reward `tltlab train` ends with than a side, over seeds of both; None without one."""
    ended = {(block.side, block.seed): block.heldout_reward for block in blocks if block.heldout_reward is not None}
    pairs = [
        (ours, ended[side, seed]) for (name, seed), ours in ended.items() if name == "tltlab" and (side, seed) in ended
    ]
    return {"against": side, **reward_difference(pairs, heldout)} if pairs else None


def summarise(blocks: Sequence[SideRun], lines: Mapping[str, int], *, heldout: int) -> Json:
    """Figures of every side, `lines` being those that a user writes for it, who learned more, and the goals.

    `mean_response_tokens` is of the steps that the seconds are of: longer responses take longer.
    """
    sides = []
    for side, num_lines in lines.items():
        ran = [block for block in blocks if block.side == side and block.seconds]
        seconds = steady(ran, side)
        tokens = [length for block in ran for length in block.lengths[1:]]
        wholes = [block.whole_s for block in ran if block.whole_s is not None]
        ended = [block.heldout_reward for block in ran if block.heldout_reward is not None]
        sides.append(
            {
                "side": side,
                "runs": len(ran),
                "seconds": interval_json(median_of(seconds)) if seconds else None,
                "whole_seconds": float(np.mean(wholes)) if wholes else None,
                "first_seconds": float(np.mean([block.seconds[0] for block in ran])) if ran else None,
                "mean_response_tokens": float(np.mean(tokens)) if tokens else None,
                "rewards": np.mean([block.rewards for block in ran], axis=0).tolist() if ran else [],
                "heldout_reward": interval_json(mean_of_few(ended)) if ended else None,
                "stages": {
                    name: float(np.mean([value for block in ran for value in block.stages[name][1:]]))
                    for name in (ran[0].stages if seconds else {})
                },
                "lines": num_lines,
                "as_is": next((block.as_is for block in blocks if block.side == side and block.as_is), None),
                "error": next((block.error for block in blocks if block.side == side and block.error), None),
            }
        )
    ours = steady(blocks, "tltlab")
    goals = []
    for side, goal in GOALS.items():
        theirs = steady(blocks, side)
        if side in lines:
            ratio = ratio_of_medians(theirs, ours) if theirs and ours else None
            goals.append(
                {
                    "against": side,
                    "ratio": interval_json(ratio),
                    "wanted": goal,
                    "met": None if ratio is None else ratio.estimate >= goal,
                }
            )
    return {
        "sides": sides,
        "learned": [comparison for side in GOALS if side in lines and (comparison := learned(blocks, side, heldout))],
        "goals": goals,
        "blocks": [asdict(block) for block in blocks],
    }


def bench_train(
    sizes: TrainSizes,
    *,
    trl: Path | None = None,
    model: Path | None = None,
    policy: str = "none",
    out: Path | None = None,
    seed: int = 0,
    progress: Progress,
) -> Json:
    """Run every side in turn, block by block, and compare; block n has seed `seed` + n on all sides.

    `trl` is a folder of `pip install --target`, `model` one of `tltlab make-model`; None makes them in `out`.
    Everything stays in `out`, and the result in its train.json after each block. ConfigError where there is no TRL or
    no model in the folders named, or `out` holds an earlier benchmark; RunError where our run or TRL's by its defaults
    fails. That TRL's vLLM mode fails is part of the result.
    """
    torch.set_num_threads(1)
    with folder_or_temporary(out, "tltlab-bench-") as folder:
        root = folder.resolve()
        if (root / RESULT).exists() or any((root / f"{side}-0").exists() for side in sizes.sides):
            raise ConfigError(f"{root} holds an earlier benchmark; name another folder with --out")
        packages = trl_folder(trl, root / "trl-packages", progress)
        setting = _setting(model, sizes, root, policy, seed, progress)
        start = heldout_reward(setting.model, setting, sizes.heldout)
        blocks: list[SideRun] = []
        for number in range(sizes.blocks):
            for side in sizes.sides:
                place_of = root / f"{side}-{number}"
                this = replace(setting, seed=seed + number)
                progress(f"block {number + 1} of {sizes.blocks}: {side}, {sizes.steps} RL steps")
                if side == OURS:
                    block = run_ours(this, place_of)
                else:
                    block = run_trl(this, place_of, packages, vllm=side == VLLM, progress=progress)
                if block.seconds:
                    final = place_of / "run" / "checkpoints" / "final" if side == OURS else place_of / "policy"
                    block = replace(block, heldout_reward=heldout_reward(final, setting, sizes.heldout))
                    progress(f"{side}: {np.median(block.seconds):.1f} s per RL step")
                blocks.append(block)
            result = _result(setting, sizes, blocks, packages, start)
            write_json(root / RESULT, result)
    return result


def trl_folder(folder: Path | None, default: Path, progress: Progress) -> Path:
    """The folder that TRL is in: the one given, or one that pip fills; ConfigError where there is none."""
    place = folder or default
    if (place / "trl" / "__init__.py").is_file():
        return place.resolve()
    if folder is not None:
        raise ConfigError(f"no TRL in {folder}; make it with: pip install --target {folder} --no-deps {' '.join(TRL)}")
    command = [sys.executable, "-m", "pip", "install", "--target", str(default), "--no-deps", *TRL]
    progress(" ".join(command))
    default.parent.mkdir(parents=True, exist_ok=True)
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        raise ConfigError(
            f"pip cannot install TRL ({last_line(process.stderr)}); where there is a network: pip install --target "
            f"FOLDER --no-deps {' '.join(TRL)}, then name it with --trl FOLDER"
        )
    return default


def run_ours(setting: GrpoJob, folder: Path) -> SideRun:
    """One run of `tltlab train` in its own process; RunError where it fails."""
    folder.mkdir(parents=True)
    recipe = folder / "recipe.toml"
    recipe.write_text(recipe_text(setting))
    command = [sys.executable, "-m", "tltlab", "train", str(recipe), "--out", str(folder / "run"), "--json"]
    began = time.perf_counter()
    if failed := _run(command, folder, {}):
        raise RunError(f"tltlab train failed: {failed}; its output is in {folder / 'log.txt'}")
    whole_s = time.perf_counter() - began
    return replace(ours_of_trace(folder / "run" / "trace", setting.seed, setting.responses), whole_s=whole_s)


def ours_of_trace(path: Path, seed: int, responses: int) -> SideRun:
    """Figures of a tltlab trace. A step takes until the next one starts; the last one, which has none, its stages."""
    trace = read(path)
    if trace.steps is None:
        raise RunError(f"{path}: the run recorded no RL step")
    steps = trace.steps.sort_values("rl_step")
    stages = steps[list(STAGES)].fillna(0.0)
    whole = stages.sum(axis=1).tolist()
    seconds = np.diff(steps["t_start"]).tolist() + whole[-1:]
    tokens = trace.outcomes.groupby("rl_step")["response_tokens"].sum().reindex(steps["rl_step"]).to_numpy()
    return SideRun(
        side=OURS,
        seed=seed,
        seconds=seconds,
        rewards=[float(reward) for reward in steps["reward_mean"]],
        lengths=(tokens / responses).tolist(),
        stages={name: stages[name].tolist() for name in STAGES}
        | {"rest_s": [a - b for a, b in zip(seconds, whole, strict=True)]},
    )


def run_trl(setting: GrpoJob, folder: Path, packages: Path, *, vllm: bool, progress: Progress) -> SideRun:
    """One run of TRL's trainer in its own process; RunError where it fails without vLLM.

    Its vLLM mode, where it fails as it is, runs once more with vLLM on torch's linear: `as_is` says how it failed.
    """
    side = VLLM if vllm else DEFAULTS
    folder.mkdir(parents=True)
    script = folder / "script.py"
    script.write_text(script_text(setting, folder / "policy", vllm=vllm))
    times = folder / "times.json"
    command = [sys.executable, "-m", "bench.train.trl", str(script), str(times)]
    environment = {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(packages), os.environ.get("PYTHONPATH")))),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(folder.parent / "datasets"),
    }
    began = time.perf_counter()
    failed = _run(command, folder, environment)
    if failed and not vllm:
        raise RunError(f"TRL failed: {failed}; its output is in {folder / 'log.txt'}")
    as_is = failed
    if failed:
        progress(f"TRL's vLLM mode as it is: {failed}; once more with vLLM on torch's linear")
        shutil.move(folder / "log.txt", folder / "log-as-is.txt")
        began = time.perf_counter()
        failed = _run([*command, "--torch-linear"], folder, environment)
    whole_s = time.perf_counter() - began
    if failed:
        return SideRun(side=side, seed=setting.seed, as_is=as_is, error=failed)
    figures = read_json(times)
    return SideRun(side=side, seed=setting.seed, as_is=as_is, whole_s=whole_s, **figures)


def _run(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> str | None:
    """Run a command with its output in the folder's log.txt. Returns None, or its last line if it failed.

    Each side chooses its threads as it does for any user: what this process set for itself is not handed on.
    """
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    log = folder / "log.txt"
    with log.open("w") as file:
        process = subprocess.run(
            command, cwd=folder, env=inherited | dict(environment), stdout=file, stderr=subprocess.STDOUT, check=False
        )
    return last_line(log.read_text(errors="replace")) if process.returncode else None


def last_line(text: str) -> str:
    """The last nonempty line, without the rank that torch puts before it."""
    lines = [line.removeprefix("[rank0]:").strip() for line in text.splitlines()]
    return next((line for line in reversed(lines) if line), "it said nothing")[:300]


def heldout_reward(model: Path, setting: GrpoJob, count: int) -> float:
    """Mean reward of one response to each of the first held-out prompts, from the same sampler for every policy."""
    disable_progress_bar()
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokenizer = load_tokenizer(setting.model)
    reward = load_reward(setting.reward)
    prompts = prompts_of(setting.model, "heldout", count)
    token_ids, cap = [prompt.token_ids for prompt in prompts], setting.max_response_tokens
    responses = sample(policy, token_ids, temperature=1.0, max_tokens=cap, seed=0)
    rewards = [
        reward(prompt.text, tokenizer.decode(response, skip_special_tokens=True), prompt.answer)
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    return float(np.mean(rewards))


def _setting(model: Path | None, sizes: TrainSizes, root: Path, policy: str, seed: int, progress: Progress) -> GrpoJob:
    """The run that all sides do, on the model given or on one that is trained now."""
    if model is None:
        model = made_model(root / "model", progress, size=sizes.model)
    report = read_json(model / "report.json")
    if not isinstance(report, Mapping) or "reward" not in report:
        raise ConfigError(f"{model / 'report.json'} names no reward: the benchmark takes a folder of tltlab make-model")
    same = ("steps", "prompts_per_step", "group_size", "max_response_tokens")
    return GrpoJob(
        model=model.resolve(),
        reward=report["reward"],
        cores=len(os.sched_getaffinity(0)),
        policy=policy,
        seed=seed,
        **{name: getattr(sizes, name) for name in same},
    )


def _result(setting: GrpoJob, sizes: TrainSizes, blocks: Sequence[SideRun], trl: Path, start: float) -> Json:
    """All that was measured and what it comes to."""
    texts = {
        OURS: recipe_text(setting),
        DEFAULTS: script_text(setting, Path("policy"), vllm=False),
        VLLM: script_text(setting, Path("policy"), vllm=True),
    }
    return {
        **made_by(),
        "versions": versions() | {package.name: package.version for package in distributions(path=[str(trl)])},
        "hardware": hardware(),
        "setting": asdict(setting) | {"model": setting.model.name},
        "start_heldout_reward": start,
        **summarise(blocks, {side: written_lines(texts[side]) for side in sizes.sides}, heldout=sizes.heldout),
    }


TEXT: Text = (
    "{setting.prompts_per_step} x {setting.group_size} responses a step, cap {setting.max_response_tokens}, float32, "
    "{setting.steps} RL steps, {hardware}; seconds per step without the first of a run, and of the whole run",
    Table(
        "sides",
        ": {side}; s per step: {seconds}; first: {first_seconds:.2f}; whole: {whole_seconds:.2f}; "
        "tokens: {mean_response_tokens:.0f}; lines: {lines}; held-out: {heldout_reward}; as it is: {as_is}; "
        "did not run: {error}",
    ),
    Table(
        "sides",
        "s of a step: {side}; rollout: {stages.rollout_s:.2f}; reward: {stages.reward_s:.2f}; "
        "inference: {stages.inference_s:.2f}; train: {stages.train_s:.2f}; sync: {stages.sync_s:.2f}; "
        "rest: {stages.rest_s:.2f}",
    ),
    "held-out reward before training {start_heldout_reward:.2f}; then, tltlab less another side:",
    Table(
        "learned",
        "against: {against}; difference: {difference:.3f}; seeds: {seeds}; "
        ": {equal:equal within noise|different|one seed does not tell}",
    ),
    Goals("goals", "against {against}: {ratio} times, goal {wanted:g}"),
)
