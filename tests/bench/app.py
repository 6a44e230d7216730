"""`tltlab bench ...`: the commands behind the measured figures in the READMEs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from bench.harness import Text, changed, shown
from tltlab.console import command_group, emit, progress, whole_numbers
from tltlab.errors import ConfigError
from tltlab.files import read_json, write_json
from tltlab.options import command, option

DRAFTER_PARTS = ("adaptive", "coordination")

Batches = Annotated[str, Option(help="Batch sizes, with commas between them.")]
FirstSeed = Annotated[int, Option(min=0, help="The first seed.")]
Folder = Annotated[Path | None, Option(help="Folder for all that is made, and the result; else removed at the end.")]
Result = Annotated[Path | None, Option(help="File to write the whole result to, as JSON.")]
OwnModel = Annotated[Path | None, Option(help="A folder of `tltlab make-model`; without one a model is trained first.")]
Policies = Annotated[str, Option(help="Speculation: a shipped policy's name or a file.")]

app = command_group(help="Benchmarks, as ratios within one run.")


def _sized(help: str, least: int = 1) -> Any:
    """An option whose default is the benchmark's size of that name."""
    return option(help, min=least)


@app.command()
@command
def sim(
    rounds: int = option("Times that every case runs, in turn.", 7, min=2),
    configurations: int = option("Tables in the sweep over ten RL steps; 0 for none.", 1000, min=0),
    jobs: int = option("Processes that share the sweep.", 1, min=1),
) -> None:
    """How fast the simulator is, against an event per iteration and against a pure closed form.

    Example: tltlab bench sim --rounds 7 --configurations 1000
    """
    from .simulator import TEXT, bench_sim

    progress(f"{rounds} rounds, then a sweep of {configurations} tables")
    _tell(bench_sim(rounds, configurations, jobs), TEXT)


@app.command()
@command
def accuracy(
    data: Annotated[Path, Option(help="Folder of the measurements that the cost models are held against.")],
    left_out: bool = option(
        "Fit profiles without each model, GPU and engine too; a minute or two.",
        True,
        names=("--left-out/--no-left-out",),
    ),
    every: bool = option("Every set of measurements, not a summary of one screen.", False, names=("--all",)),
) -> None:
    """Predicted against measured: cost and memory models, fitted anew, on data not used for the fit where it says so.

    Example: tltlab bench accuracy --data measurements
    """
    from .presets.accuracy import TEXT, coverage, rows, summary

    table, covered = rows(data, left_out=left_out), coverage(data, left_out=left_out).to_dict("records")
    text = shown({"rows": (table if every else summary(table)).to_dict("records"), "coverage": covered}, TEXT)
    emit({"rows": table.to_dict("records"), "coverage": covered}, text)


@app.command()
@command
def drafter(
    parts: str = option(
        "What to measure, separated by commas: adaptive (6 minutes: frozen against trained beside the rollout), "
        "coordination (4: what that costs the rollout). Times are of two idle cores; model and warm-up take 3 more.",
        ",".join(DRAFTER_PARTS),
    ),
    model: OwnModel = None,
    size: Annotated[str | None, Option(help="Size of that model. [default: small]", show_default=False)] = None,
    workers: int | None = _sized("Rollout workers. [default: 4]"),
    steps: int | None = _sized("RL steps, frozen and adaptive. [default: 12]"),
    seeds: int | None = _sized("Seeds of adaptive. [default: 1]"),
    pairs: int | None = _sized("Rollouts done with and without training. [default: 16]", 2),
    draft_depth: int | None = _sized("Draft of the learned drafter. [default: 4]"),
    seed: FirstSeed = 0,
    out: Folder = None,
    fast: bool = option("A tiny model and little of everything.", False),
) -> None:
    """The adaptive drafter on real GRPO runs.

    Example: tltlab bench drafter --parts adaptive,coordination --out bench
    """
    chosen = _names(parts)
    for part in chosen or [""]:
        if part not in DRAFTER_PARTS:
            raise ConfigError(f"--parts {parts}: no part named {part!r}; there are {', '.join(DRAFTER_PARTS)}")
    _check(out, folder=True)
    _one_thread()
    from .adaptive import FAST, BenchSizes, bench_learned, text

    sizes = changed(
        FAST if fast else BenchSizes(), model=size, workers=workers, steps=steps, seeds=seeds, pairs=pairs,
        draft_depth=draft_depth,
    )  # fmt: skip
    _tell(bench_learned(chosen, sizes, model=model, out=out, seed=seed, progress=progress), text)


@app.command()
@command
def regimes(
    only: str = option("Regimes, with commas: tiny,heavy tail; '' for all.", ""),
    traces: Path = option("Folder of the recorded ones.", Path("traces")),
    rl_steps: int = option("RL steps of each.", 4, min=1),
    seeds: int = option("Seeds of each.", 2, min=1),
    seed: FirstSeed = 0,
    jobs: int = option("Processes that share the regimes.", 1, min=1),
    out: Result = None,
    fast: bool = option("Two RL steps, one seed.", False),
) -> None:
    """Every policy on traces and regimes, simulated, over the best fixed strategy in hindsight; 6 minutes.

    Example: tltlab bench regimes --only tiny,h100-smoke --fast
    """
    from .contest import TEXT, bench_regimes

    _check(out)
    if fast:
        rl_steps, seeds = min(rl_steps, 2), 1
    chosen = range(seed, seed + seeds)
    result = bench_regimes(_names(only), traces=traces, rl_steps=rl_steps, seeds=chosen, jobs=jobs, progress=progress)
    _tell(result, TEXT, out)


@app.command()
@command
def seam(
    cases: Annotated[
        str | None,
        Option(help="Shipped policies, record and capture, with commas. [default: all]", show_default=False),
    ] = None,
    batches: Batches = "1,8,32,128,256,512",
    iterations: int = option("Iterations of each case that are measured.", 200, min=20),
    cold: bool = option("Empty the processor's caches before each call.", False),
) -> None:
    """Processor time of all that is ours in an iteration of vLLM's scheduler, by policy and batch; no model runs.

    Example: tltlab bench seam --cases none,beg-mab-suffix --batches 256,512
    """
    from .seam import CASES, bench_seam, text

    chosen = CASES if cases is None else [case.strip() for case in cases.split(",")]
    sizes = whole_numbers("--batches", batches, least=1)
    _tell(bench_seam(chosen, sizes, iterations=iterations, cold=cold, progress=progress), text)


@app.command("async")
@command
def overlap(
    batches: Batches = "1,8,64,256",
    rounds: int = option("Times that every case runs, in turn.", 5, min=2),
    tokens: int = option("Tokens of each response.", 48, min=16),
    out: Result = None,
) -> None:
    """What of the host's work a device waits for: stock vLLM and ours, scheduled asynchronously and not. Runs on a CPU.

    Example: tltlab bench async --batches 8,64 --rounds 3
    """
    from .overlap import TEXT, bench_overlap

    _check(out)
    sizes = whole_numbers("--batches", batches, least=1)
    _tell(bench_overlap(sizes, rounds=rounds, tokens=tokens, progress=progress), TEXT, out)


@app.command("batch-size")
@command
def batch_size(
    model: OwnModel = None,
    policies: str = option(
        "Policies beside plain decoding, with commas: a shipped policy's name, a file, ngram:4.",
        "ngram:1,ngram:2,ngram:4,ngram:8,beg-mab",
    ),
    batches: Batches = "1,2,4,8,16,32,64",
    rounds: int = option("Visits of every policy to every batch size.", 8, min=1),
    tokens: int = option("Tokens of each request in a visit, on average.", 64, min=32),
    seed: FirstSeed = 0,
    out: Result = None,
    fast: bool = option("Three batch sizes, two rounds, a tiny model.", False),
) -> None:
    """At which batch sizes drafts pay on a real engine, and whether a policy that learns finds them (2 minutes).

    Example: tltlab bench batch-size --model models/subset-sum-deep --rounds 10
    """
    _one_thread()
    from .batch_size import TEXT, bench_batch_size
    from .models import own_model

    _check(out)
    sizes = sorted(set(whole_numbers("--batches", batches, least=1)))
    if fast:
        sizes, rounds, tokens = sizes[:5:2], min(rounds, 2), min(tokens, 32)
    result = bench_batch_size(
        own_model(model, Path(), size="tiny" if fast else "small", progress=progress),
        _names(policies), sizes, rounds=rounds, tokens=tokens,
        warm_up=20 if fast else 200, seed=seed, progress=progress,
    )  # fmt: skip
    _tell(result, TEXT, out)


@app.command()
@command
def systems(
    only: str = option("Systems, with commas: verl,tlt; '' for all.", ""),
    model: OwnModel = None,
    steps: int | None = _sized("RL steps of each run. [default: 5]", 3),
    seeds: int | None = _sized("Runs of every system. [default: 1]"),
    seed: FirstSeed = 0,
    out: Folder = None,
    fast: bool = option("Few and short responses.", False),
) -> None:
    """GRPO under systems of the literature on real engines: seconds against their prediction, and rewards (16 minutes).

    Rewards stay the same with speculation where those of verl and tlt do not differ over several seeds.

    Example: tltlab bench systems --only verl,tlt --seeds 4 --out bench
    """
    _one_thread()
    from .models import folder_or_temporary
    from .systems import FAST, FULL, TEXT, bench_systems

    _check(out, folder=True)
    names = [name.strip() for name in only.split(",") if name.strip()]
    with folder_or_temporary(out, "tltlab-bench-") as folder:
        sizes = changed(FAST if fast else FULL, steps=steps, seeds=seeds)
        result = bench_systems(names, sizes, model=model, out=folder, seed=seed, progress=progress)
    _tell(result, TEXT)


@app.command()
@command
def driver(
    workers: int = option("Rollout workers.", 64, min=1),
    responses: int = option("Responses of each in an RL step.", 128, min=1),
    tokens: int = option("Tokens of a response, in the mean.", 8000, min=2),
    ranks: int = option("The trainer's ranks.", 8, min=1),
    group_size: int = option("Responses to each prompt.", 16, min=2),
    policy: str = option("The engines' policy: it says what drafters remember.", "beg-mab-suffix"),
    reward_processes: int = option("Processes that compute rewards.", 1, min=0),
    growth: str = option("Numbers of workers to measure before that, with commas.", "8"),
    steps: int = option("RL steps of each; the last one counts.", 2, min=1),
    out: Result = None,
    fast: bool = option("4 workers x 16 responses x 200 tokens, after 2.", False),
) -> None:
    """What a run's driver costs by itself: seconds and bytes of an RL step by part, against scripted engines.

    Example: tltlab bench driver --workers 64 --responses 128 --tokens 8000 --growth 8,16,32
    """
    _one_thread()
    from fakes.scripted import DriverCase

    from .train.driver import bench_driver, text

    _check(out)
    if fast:
        workers, responses, tokens, growth = min(workers, 4), min(responses, 16), min(tokens, 200), "2"
    if workers * responses % group_size:
        raise ConfigError(f"{workers} workers x {responses} responses are no whole groups of --group-size {group_size}")
    before = whole_numbers("--growth", growth, least=1) if growth else []
    if wrong := [number for number in before if number * responses % group_size]:
        raise ConfigError(f"--growth {wrong[0]} x {responses} responses are no whole groups of {group_size}")
    case = DriverCase(
        workers=workers, responses=responses, tokens=tokens, group_size=group_size, ranks=ranks, policy=policy,
        reward_processes=reward_processes, rl_steps=steps,
    )  # fmt: skip
    _tell(bench_driver(case, before, progress), text, out)


@app.command()
@command
def gpu(
    part: Annotated[str, Argument(help="quick, show, seam or update.")],
    model: Annotated[
        Path | None,
        Argument(help="A model's folder, with a config.json; of quick a shape, of show a quick.json."),
    ] = None,
    shape: str | None = option("Make MODEL first: the shape of Qwen2.5-7B, ..., no weights."),
    batches: Batches = "1,8,32,64",
    rounds: int = option("Times that each is measured in an engine.", 3, min=1),
    tokens: int = option("Tokens of each response, for seam and update.", 256, min=1),
    kv_gib: float = option("Size of each engine's KV cache in GiB.", 16, min=0.01),
    minutes: float = option("Of quick: plan what fits into so many.", 6, min=0.1),
    out: Path | None = option("File to write after each engine, as JSON."),
) -> None:
    """What only a GPU tells: a long-tail rollout and tokens/s beside stock vLLM, what determinism costs.

    quick: one rollout at the shapes of a 1.5B and a 7B model under stock vLLM and three policies, and plain steps of
    both engines, most worth first. show: a quick.json in words. seam: stock vLLM and policies that draft nothing.
    update: a trainer's update of a model that has weights, on as many responses as the first batch size, with
    deterministic algorithms and without.

    Example: tltlab bench gpu seam models/shape-1.5b --shape Qwen2.5-1.5B --batches 128,256,512 --out seam.json
    """
    from . import gpu as module

    _check(out)
    sizes = whole_numbers("--batches", batches, least=1)
    if part == "show" and model is not None:
        found = model / "quick.json" if model.is_dir() else model
        _tell(read_json(found), module.show)
        return
    if part == "quick":
        shapes = module.QUICK_SHAPES if model is None else (str(model),)
        quick = module.bench_quick(
            shapes, batches=sizes, rounds=rounds, minutes=minutes, out=out or Path("quick.json"), progress=progress
        )
        _tell(quick, module.show)
        return
    if model is None:
        raise ConfigError(f"bench gpu {part}: give the MODEL's folder")
    if shape is not None:
        module.shape(shape, model)
    result = module.bench_gpu(
        part, model, batches=sizes, rounds=rounds, tokens=tokens, kv_bytes=int(kv_gib * 2**30), out=out,
        progress=progress,
    )  # fmt: skip
    _tell(result, module.text)


@app.command()
@command
def train(
    trl: Path | None = option(
        "Folder of `pip install --target FOLDER --no-deps trl==1.16.0 accelerate==1.15.0`; else pip runs."
    ),
    model: OwnModel = None,
    steps: int | None = _sized("RL steps of each run. [default: 5]", 2),
    blocks: int | None = _sized("Runs of every side, in turn. [default: 4]"),
    policy: Policies = "none",
    seed: FirstSeed = 0,
    out: Folder = None,
    host: bool = option("Instead, what an RL step costs beside engines and models, by part; a minute.", False),
    fast: bool = option("A tiny model, little of everything, no vLLM in TRL.", False),
) -> None:
    """GRPO with `tltlab train` against TRL's GRPOTrainer: seconds per RL step, lines to write, reward (25 minutes).

    Example: tltlab bench train --trl ~/trl --out bench
    """
    if host:
        _one_thread()
        from .train.driver import HOST, bench_host

        _check(out)
        found = bench_host((100, 200), progress, 64) if fast else bench_host((1000, 4000, 16_000), progress)
        _tell(found, HOST, out)
        return
    from .train.run import FAST, TEXT, TrainSizes, bench_train

    _check(out, folder=True)
    sizes = changed(FAST if fast else TrainSizes(), steps=steps, blocks=blocks)
    _tell(bench_train(sizes, trl=trl, model=model, policy=policy, out=out, seed=seed, progress=progress), TEXT)


def _names(text: str) -> list[str]:
    """Names with commas between them."""
    return [name.strip() for name in text.split(",") if name.strip()]


def _one_thread() -> None:
    # Two threads on a busy machine stall for seconds; torch reads this when it is imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def _tell(result: dict[str, Any], text: Text | Callable[[dict[str, Any]], str], out: Path | None = None) -> None:
    """Print the result, and write it to a file where one is named."""
    if out is not None:
        write_json(out, result)
    emit(result, text(result) if callable(text) else shown(result, text))


def _check(out: Path | None, *, folder: bool = False) -> None:
    """ConfigError where --out is a file and has to be a folder, or the other way round."""
    if out is not None and folder and out.is_file():
        raise ConfigError(f"--out {out} is a file; name a folder")
    if out is not None and not folder and out.is_dir():
        raise ConfigError(f"--out {out} is a folder; name a file to write")
