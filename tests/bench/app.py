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

MODEL_FREE = "model-free"
DRAFTER_PARTS = (MODEL_FREE, "adaptive", "coordination")

Batches = Annotated[str, Option(help="Batch sizes, with commas between them.")]
FirstSeed = Annotated[int, Option(min=0, help="The first seed.")]
Folder = Annotated[Path | None, Option(help="Folder for all that is made, and the result; else removed at the end.")]
Result = Annotated[Path | None, Option(help="File to write the whole result to, as JSON.")]
OwnModel = Annotated[Path | None, Option(help="A folder of `tltlab make-model`; without one a model is trained first.")]
Policies = Annotated[str, Option(help="Speculation: a shipped policy's name or a file.")]

app = command_group(help="Benchmarks, as ratios within one run.", no_args_is_help=True)


def _sized(help: str, least: int = 1) -> Any:
    """An option whose default is the benchmark's size of that name."""
    return Option(min=least, help=help, show_default=False)


@app.command()
def sim(
    rounds: Annotated[int, Option(min=2, help="Times that every case runs, in turn.")] = 7,
    configurations: Annotated[int, Option(min=0, help="Tables in the sweep over ten RL steps; 0 for none.")] = 1000,
    jobs: Annotated[int, Option(min=1, help="Processes that share the sweep.")] = 1,
) -> None:
    """How fast the simulator is, against an event per iteration and against a pure closed form.

    Example: tltlab bench sim --rounds 7 --configurations 1000
    """
    from .simulator import TEXT, bench_sim

    progress(f"{rounds} rounds, then a sweep of {configurations} tables")
    _tell(bench_sim(rounds, configurations, jobs), TEXT)


@app.command()
def commands(
    only: Annotated[
        str, Option(help="Commands to run, with commas: simulate,tune, or 'simulate none'; '' for all.")
    ] = "",
    sizes: Annotated[
        str, Option(help="Inputs, with commas: shipped traces, and CSVs of so many RL steps x 2,048 responses.")
    ] = "tiny,subset-sum-small,8,300",
    rounds: Annotated[int, Option(min=1, help="Times that every command runs, in turn.")] = 3,
    timeout: Annotated[float, Option(min=0.01, help="Seconds after which a command is ended.")] = 300,
    out: Result = None,
) -> None:
    """What users wait for: seconds, processor seconds and peak memory of whole commands, and how these grow.

    Example: tltlab bench commands --only simulate,what-if --sizes tiny,8,300
    """
    from .commands import bench_commands, text

    _check(out)
    chosen, inputs = ([name.strip() for name in names.split(",") if name.strip()] for names in (only, sizes))
    _tell(bench_commands(inputs, chosen, rounds=rounds, timeout_s=timeout, progress=progress), text, out)


@app.command()
def accuracy(
    data: Annotated[Path, Option(help="Folder of the measurements that the cost models are held against.")],
    left_out: Annotated[bool, Option(help="Fit profiles without each model, GPU and engine; half a minute.")] = True,
    every: Annotated[bool, Option("--all", help="Every set of measurements, not a summary of one screen.")] = False,
) -> None:
    """Predicted against measured: cost and memory models, fitted anew, on data not used for the fit where it says so.

    Example: tltlab bench accuracy --data measurements
    """
    from .presets.accuracy import TEXT, coverage, rows, summary

    table, covered = rows(data, left_out=left_out), coverage(data, left_out=left_out).to_dict("records")
    text = shown({"rows": (table if every else summary(table)).to_dict("records"), "coverage": covered}, TEXT)
    emit({"rows": table.to_dict("records"), "coverage": covered}, text)


@app.command()
def drafter(
    trace: Annotated[Path | None, Argument(help="A trace with tokens; without one the text is made up.")] = None,
    groups: Annotated[int | None, _sized("Prompts to take. [default: all of a trace, 2 made up]")] = None,
    response_tokens: Annotated[int, Option(min=2, help="Length of a made-up response.")] = 16_384,
    depth: Annotated[int, Option(min=1, help="Longest draft of drafters that run no network.")] = 8,
    parts: Annotated[
        str,
        Option(
            help="What to measure, separated by commas: model-free (a minute on the shipped traces: index time and "
            "memory), adaptive (6: frozen against trained beside the rollout), coordination (4: what that costs the "
            "rollout). Times are of two idle cores; a model and a warm-up take 3 more."
        ),
    ] = ",".join(DRAFTER_PARTS),
    model: OwnModel = None,
    size: Annotated[str | None, Option(help="Size of that model. [default: small]", show_default=False)] = None,
    workers: Annotated[int | None, _sized("Rollout workers. [default: 4]")] = None,
    steps: Annotated[int | None, _sized("RL steps, frozen and adaptive. [default: 12]")] = None,
    seeds: Annotated[int | None, _sized("Seeds of adaptive. [default: 1]")] = None,
    pairs: Annotated[int | None, _sized("Rollouts done with and without training. [default: 16]", 2)] = None,
    draft_depth: Annotated[int | None, _sized("Draft of the learned drafter. [default: 4]")] = None,
    seed: FirstSeed = 0,
    out: Folder = None,
    fast: Annotated[bool, Option("--fast", help="A tiny model and little of everything.")] = False,
) -> None:
    """Drafters: those that run no network, and the adaptive one on real GRPO runs.

    Example: tltlab bench drafter --parts adaptive,coordination --out bench
    """
    chosen = [part.strip() for part in parts.split(",") if part.strip()]
    for part in chosen or [""]:
        if part not in DRAFTER_PARTS:
            raise ConfigError(f"--parts {parts}: no part named {part!r}; there are {', '.join(DRAFTER_PARTS)}")
    _check(out, folder=True)
    result: dict[str, Any] = {}
    texts = []
    if MODEL_FREE in chosen:
        from .drafters import TEXT, bench_drafters

        result |= bench_drafters(trace, num_groups=groups, response_tokens=response_tokens, depth=depth)
        texts.append(shown(result, TEXT))
    if learned := [part for part in chosen if part != MODEL_FREE]:
        _one_thread()
        from .adaptive import FAST, BenchSizes, bench_learned, text

        sizes = changed(
            FAST if fast else BenchSizes(), model=size, workers=workers, steps=steps, seeds=seeds, pairs=pairs,
            draft_depth=draft_depth,
        )  # fmt: skip
        measured = bench_learned(learned, sizes, model=model, out=out, seed=seed, progress=progress)
        result |= measured
        texts.append(text(measured))
    emit(result, "\n\n".join(texts))


@app.command()
def regimes(
    only: Annotated[str, Option(help="Regimes, with commas: tiny,heavy tail; '' for all.")] = "",
    traces: Annotated[Path, Option(help="Folder of the recorded ones.")] = Path("traces"),
    rl_steps: Annotated[int, Option(min=1, help="RL steps of each.")] = 4,
    seeds: Annotated[int, Option(min=1, help="Seeds of each.")] = 2,
    seed: FirstSeed = 0,
    jobs: Annotated[int, Option(min=1, help="Processes that share the regimes.")] = 1,
    out: Result = None,
    fast: Annotated[bool, Option("--fast", help="Two RL steps, one seed.")] = False,
) -> None:
    """Every policy on traces and regimes, simulated, over the best fixed strategy in hindsight; 6 minutes.

    Example: tltlab bench regimes --only tiny,h100-smoke --fast
    """
    from .contest import TEXT, bench_regimes

    _check(out)
    names = [name.strip() for name in only.split(",") if name.strip()]
    if fast:
        rl_steps, seeds = min(rl_steps, 2), 1
    chosen = range(seed, seed + seeds)
    result = bench_regimes(names, traces=traces, rl_steps=rl_steps, seeds=chosen, jobs=jobs, progress=progress)
    _tell(result, TEXT, out)


@app.command()
def seam(
    cases: Annotated[
        str | None,
        Option(help="Shipped policies, record and capture, with commas. [default: all]", show_default=False),
    ] = None,
    batches: Batches = "1,8,32,128,256,512",
    iterations: Annotated[int, Option(min=20, help="Iterations of each case that are measured.")] = 200,
    cold: Annotated[bool, Option("--cold", help="Empty the processor's caches before each call.")] = False,
) -> None:
    """Processor time of all that is ours in an iteration of vLLM's scheduler, by policy and batch; no model runs.

    Example: tltlab bench seam --cases none,beg-mab-suffix --batches 256,512
    """
    from .seam import CASES, bench_seam, text

    chosen = CASES if cases is None else [case.strip() for case in cases.split(",")]
    sizes = whole_numbers("--batches", batches, least=1)
    _tell(bench_seam(chosen, sizes, iterations=iterations, cold=cold, progress=progress), text)


@app.command("batch-size")
def batch_size(
    model: OwnModel = None,
    policies: Annotated[
        str, Option(help="Policies beside plain decoding, with commas: a shipped policy's name, a file, ngram:4.")
    ] = "ngram:1,ngram:2,ngram:4,ngram:8,beg-mab",
    batches: Batches = "1,2,4,8,16,32,64",
    rounds: Annotated[int, Option(min=1, help="Visits of every policy to every batch size.")] = 8,
    tokens: Annotated[int, Option(min=32, help="Tokens of each request in a visit, on average.")] = 64,
    seed: FirstSeed = 0,
    out: Result = None,
    fast: Annotated[bool, Option("--fast", help="Three batch sizes, two rounds, a tiny model.")] = False,
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
        [name.strip() for name in policies.split(",") if name.strip()], sizes, rounds=rounds, tokens=tokens,
        warm_up=20 if fast else 200, seed=seed, progress=progress,
    )  # fmt: skip
    _tell(result, TEXT, out)


@app.command()
def systems(
    only: Annotated[str, Option(help="Systems, with commas: verl,tlt; '' for all.")] = "",
    model: OwnModel = None,
    steps: Annotated[int | None, _sized("RL steps of each run. [default: 5]", 3)] = None,
    seeds: Annotated[int | None, _sized("Runs of every system. [default: 1]")] = None,
    seed: FirstSeed = 0,
    out: Folder = None,
    fast: Annotated[bool, Option("--fast", help="Few and short responses.")] = False,
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
def driver(
    workers: Annotated[int, Option(min=1, help="Rollout workers.")] = 64,
    responses: Annotated[int, Option(min=1, help="Responses of each in an RL step.")] = 128,
    tokens: Annotated[int, Option(min=2, help="Tokens of a response, in the mean.")] = 8000,
    ranks: Annotated[int, Option(min=1, help="The trainer's ranks.")] = 8,
    group_size: Annotated[int, Option(min=2, help="Responses to each prompt.")] = 16,
    policy: Annotated[str, Option(help="The engines' policy: it says what drafters remember.")] = "beg-mab-suffix",
    reward_processes: Annotated[int, Option(min=0, help="Processes that compute rewards.")] = 1,
    growth: Annotated[str, Option(help="Numbers of workers to measure before that, with commas.")] = "8",
    steps: Annotated[int, Option(min=1, help="RL steps of each; the last one counts.")] = 2,
    out: Result = None,
    fast: Annotated[bool, Option("--fast", help="4 workers x 16 responses x 200 tokens, after 2.")] = False,
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
def gpu(
    part: Annotated[str, Argument(help="quick, show, graphs, seam, sync or update.")],
    model: Annotated[
        Path | None,
        Argument(help="A model's folder, with a config.json; of quick a shape, of show a quick.json."),
    ] = None,
    shape: Annotated[str | None, Option(help="Make MODEL first: the shape of Qwen2.5-7B, ..., no weights.")] = None,
    batches: Batches = "1,8,32,64",
    rounds: Annotated[int, Option(min=1, help="Times that each is measured in an engine.")] = 3,
    tokens: Annotated[int, Option(min=1, help="Tokens of each response, for seam and update.")] = 256,
    kv_gib: Annotated[float, Option(min=0.01, help="Size of each engine's KV cache in GiB.")] = 16,
    minutes: Annotated[float, Option(min=0.1, help="Of quick: plan what fits into so many.")] = 6,
    out: Annotated[Path | None, Option(help="File to write after each engine, as JSON.")] = None,
) -> None:
    """What only a GPU tells: CUDA graphs captured and run, tokens/s beside stock vLLM, weight sync, determinism.

    quick: one rollout at the shapes of a 1.5B and a 7B model under stock vLLM and three policies, and plain steps of
    both engines, most worth first. show: a quick.json in words. graphs: what adaptivity costs plain steps on the V1
    runner, then one strategy, every one apart and buckets on V2; memory, what iterations ran in and the step, by batch
    and depth. seam: stock vLLM and policies that draft nothing. sync: new weights by
    three ways. update: a trainer's update of a model that has weights, on as many responses as the first batch size,
    with deterministic algorithms and without.

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
def train(
    trl: Annotated[
        Path | None,
        Option(help="Folder of `pip install --target FOLDER --no-deps trl==1.16.0 accelerate==1.15.0`; else pip runs."),
    ] = None,
    model: OwnModel = None,
    steps: Annotated[int | None, _sized("RL steps of each run. [default: 5]", 2)] = None,
    blocks: Annotated[int | None, _sized("Runs of every side, in turn. [default: 4]")] = None,
    policy: Policies = "none",
    seed: FirstSeed = 0,
    out: Folder = None,
    fast: Annotated[bool, Option("--fast", help="A tiny model, little of everything, no vLLM in TRL.")] = False,
) -> None:
    """GRPO with `tltlab train` against TRL's GRPOTrainer: seconds per RL step, lines to write, reward (25 minutes).

    Example: tltlab bench train --trl ~/trl --out bench
    """
    from .train.run import FAST, TEXT, TrainSizes, bench_train

    _check(out, folder=True)
    sizes = changed(FAST if fast else TrainSizes(), steps=steps, blocks=blocks)
    _tell(bench_train(sizes, trl=trl, model=model, policy=policy, out=out, seed=seed, progress=progress), TEXT)


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
