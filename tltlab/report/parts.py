"""Parts of a report on a run: its rollouts, speculation, responses, predictions, findings, events and origin."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tltlab.charts import lines, scatter_identity, shares
from tltlab.console import json_rows, progress
from tltlab.doctor.evidence import accepted_pairs
from tltlab.doctor.signatures import Diagnosis, diagnose
from tltlab.errors import ConfigError, TltlabError
from tltlab.files import json_lines, read_object
from tltlab.importers.token_counts import FolderTokenizer
from tltlab.records import Fields, Json
from tltlab.stats import paired_ratio
from tltlab.strategy import Strategy
from tltlab.traces import metrics
from tltlab.traces.drafts import recorded_drafts
from tltlab.traces.lanes import median_step
from tltlab.traces.schema import GRAPH_KINDS, KEY
from tltlab.traces.trace import Trace

from .page import (
    Block,
    Code,
    Facts,
    Items,
    Lacking,
    PageTable,
    Picture,
    Pictures,
    Piece,
    Transcript,
    number,
    records,
    titled,
)
from .timeline import timeline

_MOST_EVENTS = 60
PREDICTED = "Predicted against measured"
Decode = Callable[[Sequence[int]], str]
_SHOWN = 400
"""Tokens that are shown of a response."""
_MOST_ARMS = 8
_COLUMNS = 24
_FEWEST_DRAFTS = 20
"""Accept lengths of fewer drafts are not drawn."""
PERCENTILES = (10, 50, 90, 95, 99, 100)
_MOST_POINTS = 200
_MOST_TIMELINES = 6
_STAGES = ("inference_s", "reward_s", "train_s", "sync_s")


def diagnosis_of(run: Path) -> Diagnosis | TltlabError:
    """The findings of `tltlab doctor` in a run, or the reason why there are none."""
    try:
        return diagnose(run)
    except TltlabError as error:
        return error


@titled("Findings")
def findings_part(diagnosis: Diagnosis | TltlabError) -> Sequence[Block]:
    """The findings of `tltlab doctor` in a run."""
    if isinstance(diagnosis, TltlabError):
        raise Lacking(diagnosis)
    checks = len(diagnosis.good) + len(diagnosis.not_checked) + len({f.code for f in diagnosis.findings})
    blocks: list[Block] = ["None of the known failure signatures was found."]
    if diagnosis.findings:
        rows = []
        for finding in diagnosis.findings:
            place = f" ({finding.where})" if finding.where else ""
            rows.append((f"{finding.severity}: {finding.title}{place}", f"{finding.evidence} {finding.advice}".strip()))
        blocks = [Items(rows=tuple(rows))]
    good = "; ".join(check.good for check in diagnosis.good)
    blocks.append(f"Of {checks} checks these found nothing: {good or 'none'}.")
    lacking = "; ".join(f"{name}: {why}" for name, why in diagnosis.not_checked)
    return [*blocks, f"Checks that lacked data: {lacking or 'none'}."]


@titled("Events")
def events_part(run: Path) -> Sequence[Block]:
    """Part with the events that the run wrote to events.jsonl, in order."""
    path = run / "events.jsonl"
    if not path.is_file():
        raise Lacking("the run has no events.jsonl")
    events = json_lines(path)
    if not events:
        raise Lacking("events.jsonl has no event")
    caption, columns = f"The last {_MOST_EVENTS} at most, from events.jsonl.", "RL step: {rl_step}; event: {event}"
    return [records(events[-_MOST_EVENTS:], columns, caption=caption, summary=f"{len(events)} events")]


@titled("Where it comes from")
def origin_part(run: Path, trace: Trace, run_json: Fields) -> Sequence[Block]:
    """Model, hardware, versions, and the command to repeat the run; `run_json` is what it wrote there."""
    facts = trace.manifest.model_dump(mode="json", exclude_none=True, exclude={"format", "version", "drafters"})
    facts |= versions_of(run_json)
    blocks: list[Block] = [Facts(rows=tuple((name.replace("_", " "), str(value)) for name, value in facts.items()))]
    blocks += repeat_blocks(run_json.get("argv"), "The run has no run.json: the command that made it is not known.")
    files = {"The whole recipe": run_json.get("recipe"), "The policy file": read_object(run / "policy.json")}
    for name, value in files.items():
        if value:
            blocks.append(Code(code=json.dumps(value, indent=2), label=name, folded=True))
    return blocks


def versions_of(source: Fields) -> dict[str, str]:
    """Versions of programs, by name."""
    versions = source.get("versions")
    return {str(k): str(v) for k, v in versions.items()} if isinstance(versions, dict) else {}


def repeat_blocks(argv: Any, unknown: str) -> list[Block]:
    """The command to repeat something, as a shell takes it; the sentence `unknown` where it is not known."""
    if not argv or not isinstance(argv, Sequence):
        return [unknown]
    code = argv if isinstance(argv, str) else command_line([str(word) for word in argv])
    return ["To repeat it:", Code(code=code, label="command to repeat")]


def command_line(argv: Sequence[str]) -> str:
    """An argument vector as a line for a shell.

    >>> command_line(["/opt/venv/bin/tltlab", "train", "my recipe.toml"])
    "tltlab train 'my recipe.toml'"
    """
    program = Path(argv[0])
    if program.name == "__main__.py":
        return shlex.join(["python", "-m", program.parent.name, *argv[1:]])
    if program.suffix == ".py":
        return shlex.join(["python", *argv])
    return shlex.join([program.name, *argv[1:]])


@titled(PREDICTED)
def verify_part(run: Path, trace: Trace, summary: Fields, *, compute: bool) -> Sequence[Block]:
    """Every RL step predicted from the others: what `summary` has of it, else by `tltlab verify` where `compute`."""
    verification = summary.get("verify")
    if isinstance(verification, dict) and verification.get("steps"):
        try:
            return _predictions(verification, "As the run wrote it (summary.json).")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Lacking(f"summary.json has it otherwise than tltlab writes it ({error})") from error
    with _simulating(trace, f"predicting {len(trace.rl_steps)} RL steps from the others", compute=compute):
        from tltlab.sim.verification.rollouts import verify

        return _predictions(verify(trace, jobs=None).json(), "Computed for this page (tltlab verify).")


@contextmanager
def _simulating(trace: Trace, activity: str, *, compute: bool) -> Iterator[None]:
    """Raise Lacking for what a simulation of a recorded run lacks, before and within, and unless `compute`."""
    if not compute:
        raise Lacking("left out by --no-verify")
    if trace.iterations is None or trace.steps is None or trace.manifest.kind != "recorded":
        raise Lacking("only a recorded run with iterations and steps can be simulated again")
    progress(f"{activity} (--no-verify leaves this out)")
    try:
        yield
    except TltlabError as error:
        raise Lacking(error) from error
    except ModuleNotFoundError as error:
        raise Lacking(f"{error.name} is not installed: pip install 'tltlab[sim]'") from error


@titled("Where the seconds go")
def waterfall_part(trace: Trace, *, compute: bool) -> Sequence[Block]:
    """From the clairvoyant bound to the measured makespan, for each policy that ran, where `compute`."""
    with _simulating(trace, "simulating what the rollouts lose", compute=compute):
        from tltlab.sim.study.waterfall import waterfall

        whole = waterfall(trace, jobs=None)
    pictures = []
    for name, each in whole.by_policy().items():
        alt = ", ".join(f"{step} {seconds:.3g} s" for step, seconds in each.steps)
        caption = f"{len(each.table)} RL steps under {name}. Blue is simulated, the sum below measured."
        pictures.append(Picture.of(each.plot(), alt=f"Rollouts under {name}: {alt}.", caption=caption))
    caption = "Each step is what one change adds, in this order, with costs and acceptance fitted to this run."
    rows = json_rows(whole.to_frame())
    columns = "step: {name}; s: {seconds:.3f}; share: {share:.1%}; what changes: {what}"
    names = tuple(whole.by_policy())
    shown = Pictures(pictures=tuple(pictures), label="policy", names=names, first=len(names) - 1)
    return [
        shown if len(names) > 1 else pictures[0],
        records(rows, columns, caption=caption, summary="Mean over all RL steps"),
    ]


def _predictions(verification: Fields, source: str) -> Sequence[Block]:
    """The blocks that a result of `tltlab verify --json` makes."""
    rows = verification["steps"]
    median, worst = verification.get("median_error"), verification.get("worst_error")
    errors = f"median error {number(median, '.1%')}, worst {number(worst, '.1%')}"
    policies = [str(row.get("policy") or "run") for row in rows]
    figure = scatter_identity(
        [row.get("measured_s") for row in rows], [row.get("predicted_s") for row in rows], policies
    )
    columns = (
        "RL step: {rl_step:d}; policy: {policy}; measured s: {measured_s:.3f}; predicted s: {predicted_s:.3f}; "
        "error: {error:+.1%}; step time: {step_time_ratio:.2f}; forecast s: {forecast_s:.2f}; "
        "10 %: {forecast_low_s:.2f}; 90 %: {forecast_high_s:.2f}"
    )
    caption = (
        "Step time: recorded iterations over those of the fit, how much slower the machine was. Forecast: from earlier "
        "RL steps alone, which knows neither lengths nor what is accepted."
    )
    alt = f"Predicted over measured rollout seconds of {len(rows)} RL steps: {errors}."
    agreed = f"On the dashed line prediction and measurement agree. {source}"
    return [
        str(verification.get("verdict") or f"Rollout times predicted from other RL steps: {errors}."),
        Picture.of(figure, shape="square", alt=alt, caption=agreed),
        records(rows, columns, caption=caption, summary="Every RL step"),
    ]


from_result = titled(PREDICTED)(_predictions)
"""The part that a result of `tltlab verify --json` makes."""


@titled("A few responses")
def responses_part(trace: Trace, run: Path, recipe: Any) -> Sequence[Block]:
    """The longest, the best and the worst rewarded response of the last RL step that drafted.

    Their text where the model's tokenizer.json lies in RUN/model or where the recipe's model is, else their token ids.
    """
    if not trace.num_rows("tokens"):
        raise Lacking("the trace has no tokens.parquet, so the texts are not known")
    last = trace.select([_step(trace)])
    tokens = last.tokens
    if tokens is None or tokens.empty:
        raise Lacking("tokens.parquet has none of the last RL step")
    rows = tokens.merge(last.outcomes, on=list(KEY), how="inner", sort=False)
    try:
        drafts, notes = recorded_drafts(last)
    except TltlabError as error:
        drafts, notes = recorded_drafts(last.replace(iterations=None))[0], [str(error)]
    names = {str(name): at % 4 + 1 for at, name in enumerate(sorted(drafts["drafter"].dropna().unique()))}
    decode = _decoder(run, recipe)
    lead = (
        f"The first {_SHOWN} tokens of responses of RL step {last.rl_steps[0]}; token ids are shown where the model's "
        "tokenizer is not available. Marked text was drafted and kept. Point at it to see how much of a draft was kept."
        + ("" if names else " None is known.")
    )
    blocks: list[Block] = [" ".join([lead, *(f"Note: {note}." for note in notes)])]
    if names:
        legend = tuple(Piece(text=name, drafter=colour) for name, colour in names.items())
        blocks.append(Transcript(label="Drafters", pieces=legend))
    places: Json = {"The longest": rows["response_tokens"].idxmax()}
    if rows["reward"].nunique() > 1:
        places |= {"The highest reward": rows["reward"].idxmax(), "The lowest reward": rows["reward"].idxmin()}
    for label, at in places.items():
        row = rows.loc[at].to_dict()
        of_row = drafts[(drafts[list(KEY)] == [row[name] for name in KEY]).all(axis=1)]
        reward, num = number(row["reward"], ".3g"), f"{row['response_tokens']:,}"
        facts = f"reward {reward}, {num} tokens, ended: {row['finish_reason']}"
        pieces = _pieces(row["token_ids"].tolist()[:_SHOWN], of_row, names, decode)
        prompt = decode(row["prompt_token_ids"].tolist())
        blocks.append(Transcript(label=f"{label}: {facts}", prompt=prompt, pieces=pieces))
    return blocks


def _step(trace: Trace) -> int:
    """The last RL step in which something was drafted, else the last one."""
    iterations = trace.iterations
    if iterations is None or not (iterations["num_drafted"] > 0).any():
        return trace.rl_steps[-1]
    return int(iterations.loc[iterations["num_drafted"] > 0, "rl_step"].max())


def _decoder(run: Path, recipe: Any) -> Decode:
    """Function that decodes token ids: the model's tokenizer if available, else the ids themselves."""
    model = recipe.get("model") if isinstance(recipe, dict) else None
    for folder in (run / "model", *([Path(model)] if isinstance(model, str) else [])):
        with suppress(ConfigError):
            return FolderTokenizer(folder).decode
    return lambda ids: " ".join(map(str, ids)) + " "


def _pieces(ids: list[int], drafts: pd.DataFrame, colours: Mapping[str, int], decode: Decode) -> tuple[Piece, ...]:
    """The response in pieces of one origin each."""
    origin = np.zeros(len(ids), np.int64)  # 0: the model's own; n + 1: kept of draft n
    rows: list[Json] = drafts.to_dict("records")  # type: ignore[assignment]
    for at, row in enumerate(rows):
        origin[int(row["generated_tokens"]) :][: int(row["accepted"])] = at + 1
    pieces = []
    for begin, end in pairwise([0, *(np.flatnonzero(np.diff(origin)) + 1).tolist(), len(ids)]):
        # The text of a token depends on the tokens before it: spaces, and letters that several tokens make.
        before, through = decode(ids[:begin]).rstrip("\ufffd") if begin else "", decode(ids[:end])
        text = through[len(before) :] if through.startswith(before) else decode(ids[begin:end])
        if not origin[begin]:
            pieces.append(Piece(text=text))
            continue
        row = rows[int(origin[begin]) - 1]
        title = f"{row['drafter']}: {row['accepted']} of up to {row['reach']} drafted tokens were kept"
        pieces.append(Piece(text=text, drafter=colours[str(row["drafter"])], title=title))
    return tuple(pieces)


def strategy_names(table: pd.DataFrame) -> pd.Series[str]:
    """Each row's strategy in short: "none", "ngram:4", "learned:8x4/32" of a tree."""
    columns = table[["drafter", "draft_depth", "top_k", "tokens_to_verify"]].fillna({"drafter": "drafter"})
    named = cache(lambda *row: str(Strategy(*row)) if row[1] else "none")
    return pd.Series([named(*row) for row in columns.itertuples(index=False, name=None)], table.index, dtype=str)


def batch_bins(batch: pd.Series[int]) -> pd.Series[int]:
    """Running requests in bins of doubling width, each by its first: 1, 2, 4 (to 7), 8 (to 15), ..."""
    return pd.Series(2 ** np.floor(np.log2(batch.clip(lower=1).to_numpy())), index=batch.index).astype(int)


@titled("Accept length by batch")
def acceptance_part(trace: Trace) -> Sequence[Block]:
    """Accept length over running requests, per drafter, with intervals, and by strategy."""
    table = trace.iterations
    if table is None:
        raise Lacking("the trace has no iterations.parquet, so what each draft gave is not known")
    table = table[table["num_drafted"] > 0]
    if table.empty:
        raise Lacking("no iteration verified a draft")
    table = table.assign(
        drafts=accepted_pairs(table),
        drafter=table["drafter"].fillna("drafter"),
        strategy=strategy_names(table),
        bin=batch_bins(table["batch"]),
    )
    series: dict[str, tuple[list[Any], list[float]]] = {}
    bands: dict[str, tuple[list[float], list[float]]] = {}
    for name, of_name in table.groupby("drafter", sort=True):
        bins = {at: rows for at, rows in of_name.groupby("bin") if rows["drafts"].sum() >= _FEWEST_DRAFTS}
        if bins:
            length, low, high = zip(*map(_accept_length, bins.values()), strict=True)
            series[str(name)], bands[str(name)] = (list(bins), list(length)), (list(low), list(high))
    blocks: list[Block] = []
    if series:
        lengths = "; ".join(
            f"{name}: " + ", ".join(f"{number(v, '.2f')} from {at}" for at, v in zip(*xy, strict=True))
            for name, xy in series.items()
        )
        xlabel = "running requests on the worker (bins of doubling width)"
        figure = lines(
            series, bands=bands, doubling=True, xlabel=xlabel, ylabel="tokens per draft", title="Accept length"
        )
        caption = (
            "Tokens per request and speculative iteration, bonus token included. Bands: 95 % intervals over RL "
            "steps. Small batches are the end of a rollout, whose requests are other ones "
            "than those in the large batches."
        )
        blocks.append(Picture.of(figure, alt=f"Accept length over running requests. {lengths}.", caption=caption))
    return [*blocks, _by_strategy(table)]


def _accept_length(rows: pd.DataFrame) -> tuple[float, float, float]:
    """1 + accepted / drafts, and its 95 % interval over RL steps: NaN ends for a single one."""
    accepted, drafts = rows.groupby("rl_step")[["num_accepted", "drafts"]].sum().to_numpy(float).T
    ratio = paired_ratio(accepted, drafts)
    return 1 + ratio.estimate, 1 + ratio.low, 1 + ratio.high


def _by_strategy(table: pd.DataFrame) -> PageTable:
    rows = []
    for name, part in table.groupby("strategy", sort=True):
        value, low, high = _accept_length(part)
        share, drafts = part["num_accepted"].sum() / part["num_drafted"].sum(), int(part["drafts"].sum())
        interval = "–" if np.isnan(low) else f"{low:.2f} to {high:.2f}"
        rows.append((str(name), f"{len(part):,}", f"{drafts:,}", f"{value:.2f}", interval, f"{share:.1%}"))
    return PageTable(
        caption="By strategy, over all batches. Each was chosen for other batches and RL steps: this is "
        "no comparison of strategies.",
        columns=("drafter:depth", "iterations", "drafts", "accept length", "95 % interval", "draft tokens kept"),
        rows=tuple(rows),
    )


@titled("What the policy chose")
def arms_part(trace: Trace) -> Sequence[Block]:
    """Which strategies were chosen over the run, or over the iterations of a single rollout."""
    table = trace.decisions
    if table is None or table.empty:
        raise Lacking("the trace has no decisions.parquet")
    table = table.assign(arm=strategy_names(table))
    counts = table["arm"].value_counts(sort=False).sort_index().sort_values(ascending=False, kind="stable")
    shown = counts.index[: _MOST_ARMS if len(counts) <= _MOST_ARMS else _MOST_ARMS - 1]
    table["arm"] = table["arm"].where(table["arm"].isin(shown), "other")
    arms = [*shown, *(["other"] if (table["arm"] == "other").any() else [])]
    alt = ", ".join(f"{name} {num / len(table):.0%}" for name, num in counts.items())
    if len(trace.rl_steps) > 1:
        across, xlabel, heading = table["rl_step"], "RL step", "Choices over the run"
    else:
        width = max(1, -(-int(table["iteration"].max() + 1) // _COLUMNS))
        across = table["iteration"] // width * width
        xlabel, heading = "iteration of each worker", "Choices over the rollout"
    share = pd.crosstab(across.to_numpy(), table["arm"].to_numpy(), normalize="index")
    figure = shares(share.index.to_numpy(), {arm: share[arm] for arm in arms}, xlabel=xlabel, title=heading)
    caption = f"{len(table):,} decisions, one per engine iteration that had something to decide."
    return [Picture.of(figure, alt=f"Share of decisions for each strategy: {alt}.", caption=caption)]


@titled("Timeline")
def timeline_part(trace: Trace) -> Sequence[Block]:
    """RL steps lane by lane: the first, the last and some between, that of median rollout time shown first."""
    try:
        median = median_step(trace)
        between = np.linspace(0, len(trace.rl_steps) - 1, min(_MOST_TIMELINES - 1, len(trace.rl_steps)))
        steps = sorted({median, *(trace.rl_steps[round(place)] for place in between)})
        pictures = tuple(_timeline_picture(trace, step, median=step == median) for step in steps)
    except TltlabError as error:
        raise Lacking(error) from error
    if len(pictures) == 1:
        return pictures
    names = tuple(map(str, steps))
    return [Pictures(pictures=pictures, label="RL step", names=names, first=steps.index(median))]


def _timeline_picture(trace: Trace, step: int, *, median: bool) -> Picture:
    figure, part = timeline(trace, rl_step=step), trace.select([step])
    idle, tail = metrics.bubble_fraction(part, idle=True), metrics.tail_fraction(part)
    alt = (
        f"One lane per worker over RL step {step}, and the number of running requests below: "
        f"{number(metrics.rollout_s(part)[step], '.3g', ' s')} of rollout, {number(idle, '.0%')} of worker time idle."
    )
    label = f"RL step {step}{', of median rollout time' * median}."
    caption = (
        f"{label} Workers are idle for {number(idle, '.0%')} of the rollout: what trains a drafter is not. For "
        f"{number(tail, '.0%')} of it fewer than 1/8 of the responses were running."
    )
    return Picture.of(figure, alt=alt, caption=caption)


@titled("CUDA graphs")
def graphs_part(trace: Trace, graphs: Fields) -> Sequence[Block]:
    """CUDA graphs of the target's passes by draft depth, and captured graphs; `graphs` is the run's graphs.json."""
    table = trace.iterations
    if table is None or (table := table[table["graph"].notna()]).empty:
        raise Lacking("the trace has no CUDA graphs of iterations (graph in iterations.parquet)")
    blocks: list[Block] = []
    captured = graphs.get("captured") or [{}]
    if (mode := captured[0].get("mode")) is not None:
        first, num_bytes = captured[0], captured[0].get("num_bytes")
        memory = "" if num_bytes is None else f", which took {num_bytes / 2**30:.2f} GiB"
        num = f"{len(first['full'])} full and {len(first['piecewise'])} piecewise graphs{memory}"
        sentence = f"Captured by each of {len(captured)} engines: {num} ({first['runner']} runner, {mode})."
        blocks.append(sentence)
    shares_of = table.groupby(["draft_depth", "graph"])["duration"].sum().unstack(fill_value=0)
    decoding = table[table["prefill_tokens"] == 0]
    tokens = (decoding["batch"] + decoding["num_drafted"]).groupby(decoding["draft_depth"]).sum()
    padded = 1.0 - tokens / decoding["graph_tokens"].groupby(decoding["draft_depth"]).sum()
    rows = [
        {
            "depth": "plain" if not depth else str(depth),
            "iterations": int((table["draft_depth"] == depth).sum()),
            **{kind: row.get(kind, 0.0) / row.sum() for kind in GRAPH_KINDS},
            "padding": padded.get(depth),
        }
        for depth, row in shares_of.iterrows()
    ]
    columns = (
        "draft depth: {depth}; iterations: {iterations:,d}; one full graph: {full:.1%}; piecewise: {piecewise:.1%}; "
        "no graph: {eager:.1%}; padding of decoding: {padding:.1%}"
    )
    caption = "Share of the time of iterations by what the target's pass ran in, as vLLM's dispatcher counted it."
    return [*blocks, records(rows, columns, caption=caption)]


@titled("Response lengths")
def lengths_part(trace: Trace, rows: Sequence[Fields]) -> Sequence[Block]:
    """How long responses were: the tail of the distribution, and percentiles per RL step, from `metrics.per_step`."""
    num = sum(row["num_responses"] for row in rows)
    if not num:
        raise Lacking("the trace has no responses")
    percentiles = zip(PERCENTILES, metrics.length_percentiles(trace, PERCENTILES), strict=True)
    cut = sum(row["num_cut"] for row in rows) / num
    steps = trace.rl_steps
    quantiles = ", ".join(f"{'longest' if p == 100 else f'p{p}'} {number(v, ',.0f')}" for p, v in percentiles)
    caption = f"{num:,} responses. Tokens: {quantiles}. Cut at the cap: {cut:.1%}."
    alt = f"Share of responses longer than a number of tokens: {quantiles}."
    lengths = np.sort(np.concatenate([part.outcomes["response_tokens"].to_numpy() for part in trace.parts()]))
    # At so few lengths that they can be drawn.
    at = np.unique(np.concatenate([[0], np.quantile(lengths, np.linspace(0, 1, _MOST_POINTS), method="nearest")]))
    running = 100 * (1 - np.searchsorted(lengths, at, side="right") / len(lengths))
    series = {"all RL steps": (at, running)}
    figure = lines(series, xlabel="tokens", ylabel="% still running", title="Responses longer than ...")
    blocks: list[Block] = [Picture.of(figure, alt=alt, caption=caption)]
    if len(steps) > 1:
        over = {
            name: (steps, [row[key] for row in rows])
            for name, key in (("longest", "max_tokens"), ("95th percentile", "p95_tokens"), ("median", "p50_tokens"))
        }
        figure = lines(over, xlabel="RL step", ylabel="tokens", title="Lengths over the run")
        caption = "Lengths of each RL step."
        alt = "Median, 95th percentile and longest response of each RL step."
        blocks.append(Picture.of(figure, alt=alt, caption=caption))
    return blocks


@titled("RL steps")
def steps_part(trace: Trace, rows: Sequence[Fields]) -> Sequence[Block]:
    """A row per RL step, with the seconds of its stages; `rows` are those of `metrics.per_step`."""
    rows = steps_rows(trace, rows)
    if all(row["rollout_s"] is None for row in rows):
        raise Lacking("the trace has no times: simulate it first (tltlab simulate TRACE --out)")
    blocks: list[Block] = []
    if len(rows) > 1:
        policies = dict.fromkeys(row["policy"] or "rollout" for row in rows)
        by_policy = {name: [row for row in rows if (row["policy"] or "rollout") == name] for name in policies}
        note = (
            "Seconds of rollout. Rows of different RL steps had different responses: compare policies on the same ones "
            "(tltlab compare) before you trust a difference."
        )
        blocks += _over_steps({"reward": rows}, "reward", "mean reward", "Reward")
        blocks += _over_steps(by_policy, "rollout_s", "seconds", "Rollout time by policy", note)
    columns = (
        "RL step: {rl_step:d}; policy: {policy}; reward: {reward:.3f}; responses: {num_responses:,d}; "
        "tokens: {num_tokens:,d}; rollout s: {rollout_s:.2f}; tokens/s: {tokens_per_s:,.0f}; "
        "accept length: {mean_accept_length:.2f}; idle: {idle_fraction:.1%}; tail: {tail_fraction:.1%}; "
        "drafter updates: {drafter_updates:,.0f}"
    )
    caption = (
        "Each rollout. Accept length: tokens per request and speculative iteration, the bonus token included. Idle: "
        "share of worker time without decoding or drafter training. Tail: share of the time in which fewer than 1/8 of "
        "the responses ran."
    )
    blocks.append(records(rows, columns, caption=caption))
    stages = (
        "RL step: {rl_step:d}; rollout s: {rollout_s:.2f}; inference s: {inference_s:.2f}; reward s: {reward_s:.3f}; "
        "train s: {train_s:.2f}; sync s: {sync_s:.3f}; policy moved, nats/token: {drift_kl:.2g}"
    )
    if any(row[key] is not None for row in rows for key in [*_STAGES, "drift_kl"]):
        caption = "Seconds of each stage, and how far the step's update moved the policy (KL)."
        blocks.append(records(rows, stages, caption=caption, summary="Every stage, RL step by RL step"))
    return blocks


def steps_rows(trace: Trace, per_step: Sequence[Fields]) -> list[Json]:
    """Each RL step's metrics next to the trace's own `steps`; None where unknown."""
    by_step = {} if trace.steps is None else {row["rl_step"]: row for row in json_rows(trace.steps)}
    rows = []
    for each in per_step:
        recorded, measured = by_step.get(each["rl_step"], {}), each["rollout_s"]
        row = {key: recorded.get(key) for key in ("policy", *_STAGES, "drift_kl", "drafter_updates")}
        per_s = each["num_tokens"] / measured if measured else None
        rows.append({**each, **row, "reward": recorded.get("reward_mean"), "tokens_per_s": per_s})
    return rows


def _over_steps(
    rows_of: Mapping[str, Sequence[Fields]], key: str, ylabel: str, title: str, note: str = ""
) -> list[Block]:
    """A line for each name: a figure over RL steps, captioned by its ends unless there is a note; [] if it is unknown.

    `rows_of` are rows with their `rl_step`.
    """
    series: dict[str, tuple[list[int], list[float]]] = {}
    for name, rows in rows_of.items():
        points = [row for row in rows if row[key] is not None]
        if points:
            series[name] = [row["rl_step"] for row in points], [row[key] for row in points]
    if not series:
        return []
    ends = "; ".join(f"{name}: {y[0]:.3g} at first, {y[-1]:.3g} at last" for name, (_, y) in series.items())
    figure = lines(series, xlabel="RL step", ylabel=ylabel, title=title)
    return [Picture.of(figure, alt=f"{title} over RL steps. {ends}.", caption=note or f"{ends}.")]


@titled("Off-policy training")
def off_policy_part(trace: Trace) -> Sequence[Block]:
    """How old the tokens trained on were, RL step by RL step, and what was dropped for its age."""
    steps = trace.steps
    if steps is None or not (steps["off_policy_share"] > 0).any():
        raise Lacking("every RL step learnt from its own policy, or off_policy_share is unknown")
    bias = steps["length_bias"].dropna()
    note = "" if bias.empty else (
        f" Responses trained on have {bias.iloc[-1]:.0%} of the mean length of those generated: below 100 % long ones "
        "are starved."
    )  # fmt: skip
    rows, title = json_rows(steps), "Age of the tokens trained on"
    caption = f"Updates between the policy that drew a token and the one that learns from it, mean.{note}"
    pictures = _over_steps({"updates behind": rows}, "staleness", "updates", title, caption)
    columns = (
        "RL step: {rl_step:d}; updates behind, mean: {staleness:.2f}; "
        "tokens of older policies: {off_policy_share:.1%}; groups dropped so far: {dropped_groups:.0f}; "
        "length trained on / generated, so far: {length_bias:.3f}"
    )
    caption = "Of the tokens that each RL step trained on."
    return [*pictures, records(rows, columns, caption=caption, summary="RL step by RL step")]


@titled("Over the run")
def over_run_part(traces: Mapping[str, Trace]) -> Sequence[Block]:
    """Figures of runs over their RL steps, in the same charts."""
    rows = {name: steps_rows(trace, metrics.per_step(trace)) for name, trace in traces.items()}
    blocks = [
        *_over_steps(rows, "reward", "mean reward", "Reward"),
        *_over_steps(rows, "rollout_s", "seconds", "Rollout time"),
        *_over_steps(rows, "mean_accept_length", "tokens per draft", "Accept length"),
        *_over_steps(rows, "p95_tokens", "tokens", "95th percentile of lengths"),
    ]
    if not blocks:
        raise Lacking("neither has responses")
    return blocks


@titled("Timelines")
def timelines_part(first: Trace, second: Trace, names: tuple[str, ...]) -> Sequence[Block]:
    """An RL step of two runs, lane by lane, the first above the second on one time axis."""
    try:
        figure = timeline(first, compare=second, title=(names[0], names[1]))
    except TltlabError as error:
        raise Lacking(error) from error
    caption = "The RL step that both have whose rollout is of median length, on the same time axis."
    alt = f"One lane per worker over an RL step of {names[0]}, and below on the same axis of {names[1]}."
    return [Picture.of(figure, alt=alt, caption=caption)]
