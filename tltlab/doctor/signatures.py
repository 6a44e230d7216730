"""The known failure signatures of a run: a check finds each in the evidence and names what to change.

A check is a generator of findings, registered in the order in which findings are shown: what broke, what speculation
does, what is around it.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from textwrap import shorten
from typing import Literal, NamedTuple, get_args

import numpy as np
import pandas as pd

from tltlab.calibration.iterations import measured_waiting, recorded_rows
from tltlab.calibration.logged import COLLAPSED
from tltlab.calibration.stages import rollout_rows
from tltlab.costs.profiles import VLLM_WAITING
from tltlab.errors import ConfigError, one_line
from tltlab.records import frozen
from tltlab.stats import SIDE, Interval, change_point, mean_of_few
from tltlab.traces.trace import Trace

from .evidence import (
    ENOUGH_STEPS,
    NO_LOG,
    TEXTS,
    NotChecked,
    RunEvidence,
    accepted_pairs,
    need,
    ratio,
    remedy,
    stage_label,
)

HALF = 0.5  # below half of the RL step even a rollout in no time at all saves less than what stays
WAITING_SHARE = 0.2  # share of the time with a queue that is more than the end of one admission
PREFILL_AGAIN = 1.05  # prefilled over prompt tokens: prefix caching keeps it below 1, preemption brings it above
SLOW_WORKER = 1.1  # time over the other workers' at like batches: single rollouts vary by some 5 %
GRAPHLESS_SHARE = 0.05  # share of the time without graphs that is worth the memory of more of them
DRAFTED = 1.05  # tokens per draft from which an RL step of a training log counts as one that gains by drafts
ACCEPT_FLOOR = 1.2  # TLT's Fig 13 has its cheapest step at 1.71 plain ones; verification alone takes some 20 % more
ENOUGH_FOR_TREND = 6  # RL steps of iterations from which a fall is looked for
ENOUGH_DRAFTS = 200  # drafts below which a rollout's acceptance is noise: its standard error is then some 5 %
FLIPS_PER_100 = 10  # on-off switches per 100 iterations: as many as a hold of 10, TLT's default, allows
STARVED = 0.95  # mean length trained on over that generated below which the policy is taught to be short
WAITING = 0.02  # share of the time spent waiting, for trainers or the host, from which it is worth a setting
QUOTE_LETTERS = 240
LINE_LETTERS = 1 << 12  # of a line that are looked at
LINES_BEFORE = 40  # lines before an error that belong to it: a traceback through vLLM has some 30
GROWN_SHARE = 0.1  # share of the RL step by which a stage must grow: below it there is little to gain
ALL = 0.95  # share of responses, or groups, that is all of them but a few
NO_ENTROPY, FAR = 0.02, 1.0  # nats per token: below it a policy samples one text; above it, it left its reference
MISMATCH = 0.1  # engines' and trainers' log-probs in bfloat16 are some 0.01 apart
LARGE_SHARE = 0.3  # share of the RL step from which a stage that grew is a problem
KEPT = 1.2  # accept length of a drafter that did work: TLT's Fig 13 has its cheapest step at 1.71 plain ones
LOST = 0.5  # share of the tokens gained per draft that a fall must take
SLOWER = 1.3  # seconds per token over those before: single rollouts vary by some 10 %

Severity = Literal["problem", "recovered", "hint"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding: `title` is its meaning, `evidence` the observation, `advice` what to do.

    "problem": something is broken or costs more than it gains; "recovered": it broke, and the run went on to its end;
    "hint": worth a look. `where` names RL steps, workers or
    batches, None where it is the whole run. `code` is the check's name unless the check has several findings.
    """

    severity: Severity
    title: str
    evidence: str
    advice: str = ""
    where: str | None = None
    code: str = ""

    def __str__(self) -> str:
        where = f" ({self.where})" if self.where else ""
        return f"{self.title}{where}. {self.evidence}"


problem, hint = partial(Finding, "problem"), partial(Finding, "hint")
Findings = Iterator[Finding]
Test = Callable[[RunEvidence], Findings]


class Check(NamedTuple):
    """One question to a run; `good` is shown where the test finds nothing. The test raises NotChecked."""

    name: str
    good: str
    test: Test


CHECKS: list[Check] = []


def check(test: Test) -> Test:
    """Register a generator of findings as the next check, by the function's name."""
    name = test.__name__.replace("_", "-")
    CHECKS.append(Check(name, TEXTS["good"][name], test))
    return test


@frozen
class Diagnosis:
    """Findings of checks, by severity; `good`: checks without a finding; `not_checked`: (name, why) of the others.

    `simulated`: the run is a simulation, so its figures are predictions.
    """

    findings: tuple[Finding, ...] = ()
    good: tuple[Check, ...] = ()
    not_checked: tuple[tuple[str, str], ...] = ()
    simulated: bool = False

    def headline(self) -> str:
        """The first finding that is no hint, in a sentence; empty where there is none."""
        first = next((finding for finding in self.findings if finding.severity != "hint"), None)
        return "" if first is None else f"{'PROBLEM' if first.severity == 'problem' else 'recovered'}: {first}"


def diagnose(run: str | Path | Trace) -> Diagnosis:
    """Look for every signature in a RUN folder, a trace folder or a Trace. Raises TraceError for what is no run."""
    return examine(RunEvidence.of(run))


def examine(evidence: RunEvidence) -> Diagnosis:
    """Look for every signature in what is known of a run; a check that fails does not stop the others."""
    findings: list[Finding] = []
    good, not_checked = [], []
    for check in CHECKS:
        try:
            found = list(check.test(evidence))
        except NotChecked as why:
            not_checked.append((check.name, str(why)))
        except ConfigError as error:
            # A run may be too odd for one question, such as times of zero; the others still have answers.
            not_checked.append((check.name, f"its figures allow no answer ({error})"))
        except Exception as error:  # a defect of one check is no reason to withhold what the others found
            not_checked.append((check.name, f"a defect of the check: {type(error).__name__}: {one_line(error)}"))
        else:
            findings += [replace(finding, code=finding.code or check.name) for finding in found]
            good += [] if found else [check]
    findings.sort(key=lambda finding: get_args(Severity).index(finding.severity))
    simulated = evidence.trace is not None and evidence.trace.manifest.kind == "simulated"
    return Diagnosis(findings=tuple(findings), good=tuple(good), not_checked=tuple(not_checked), simulated=simulated)


def rl_steps(values: Iterable[int], unit: str = "RL step") -> str:
    """RL steps in words, runs of them joined.

    >>> rl_steps([5, 0, 1, 2, 2])
    'RL steps 0-2, 5'
    """
    steps = enumerate(sorted(set(map(int, values))))
    runs = [[value for _, value in run] for _, run in groupby(steps, lambda step: step[1] - step[0])]
    return f"{unit}s " + ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


@check
def learns(run: RunEvidence) -> Findings:
    """The policy cannot learn: responses are cut, groups have no advantage, gradients, rewards or entropy are gone."""
    rows = run.learning
    need(len(rows) >= ENOUGH_STEPS, f"fewer than {ENOUGH_STEPS} RL steps are known")
    late, early = rows.iloc[-(len(rows) // 3) :].median(), rows.iloc[: len(rows) // 3].median()
    known = late["cut"] >= ALL or rows.drop(columns=["rl_step", "cut"]).notna().to_numpy().any()
    need(known, "the run has no rewards")
    rewards = rows["reward_mean"].dropna()
    found = {
        "cut": late["cut"] >= ALL,
        "no_advantage": late["no_advantage"] >= ALL,
        "grad_norm": late["grad_norm"] == 0.0,
        "reward_mean": len(rewards) >= ENOUGH_STEPS and rewards.nunique() == 1,
        "entropy": 0.0 <= late["entropy"] < min(NO_ENTROPY, LOST * early["entropy"]),
        "kl": late["kl"] > max(FAR, 10.0 * early["kl"]),
        "mismatch": late["mismatch"] > MISMATCH,
    }
    if reasons := [name for name, is_so in found.items() if is_so]:
        texts = [TEXTS["learning"][name].format(late[name]) for name in reasons]
        steps = rl_steps(rows["rl_step"], run.unit)
        # A mean reward alone may be constant by chance.
        kind = hint if reasons == ["reward_mean"] else problem
        yield kind("The policy learns little or nothing", f"{'; '.join(texts)}.", TEXTS["advice"][reasons[0]], steps)


class Signature(NamedTuple):
    """Log message of a known failure, from `signatures.toml`.

    A line fits one of `patterns`; it, or a line just before it, fits `context`. Case does not count.
    """

    code: str
    title: str
    advice: str
    patterns: list[str]
    context: str = ""
    severity: Severity = "problem"
    recovers: bool = False
    """True for a failure that is over in a run that went on to its end."""


SIGNATURES = tuple(Signature(**row) for row in TEXTS["signature"])


@check
def deaths(run: RunEvidence) -> Findings:
    """Each known cause of death of the run, or of one of its engines, and what became of its drafter."""
    need(run.events or run.logs, "the run has neither events.jsonl nor *.log files")
    lines: dict[str, list[_LogLine]] = {signature.code: [] for signature in SIGNATURES}
    for line in _lines(run):
        if signature := next((signature for signature in SIGNATURES if _fits(line, signature)), None):
            lines[signature.code].append(line)
    for signature in SIGNATURES:
        if not lines[signature.code]:
            continue
        first, *others = lines[signature.code]
        quote = shorten(one_line(first.text), QUOTE_LETTERS, placeholder="...")
        more = f" (and {len(others)} more like it)" if others else ""
        steps = [line.rl_step for line in (first, *others) if line.rl_step is not None]
        evidence, where = f'{first.source} says "{quote}"{more}.', rl_steps(steps) if steps else None
        severity: Severity = "recovered" if signature.recovers and run.is_over else signature.severity
        yield Finding(severity, signature.title, evidence, signature.advice, where, signature.code)


class _LogLine(NamedTuple):
    text: str
    source: str
    before: str = ""
    rl_step: int | None = None


def _fits(line: _LogLine, signature: Signature) -> bool:
    found = any(re.search(pattern, line.text, re.IGNORECASE) for pattern in signature.patterns)
    return found and re.search(signature.context, line.before + line.text, re.IGNORECASE) is not None


def _lines(run: RunEvidence) -> Iterator[_LogLine]:
    for event in run.events:
        rl_step = rl_step if isinstance(rl_step := event.get("rl_step"), int) else None
        yield _LogLine(str(event.get("event", "")), "events.jsonl", rl_step=rl_step)
    for name, text in run.logs.items():
        lines = [line[:LINE_LETTERS] for line in text.splitlines()]
        for number, line in enumerate(lines):
            yield _LogLine(line, name, before="\n".join(lines[max(0, number - LINES_BEFORE) : number]))


@check
def interrupted(run: RunEvidence) -> Findings:
    """The recording was interrupted, or the trace was made of an interrupted recording."""
    title, notes = "The recording was interrupted", "" if run.trace is None else run.trace.manifest.notes or ""
    if run.unfinished is not None:
        yield problem(
            title,
            f"{run.unfinished.name} was not closed: the run was stopped, or continues.",
            "Commands read it unchanged. If no run writes there any more, tltlab trace repair closes it.",
        )
    elif "repaired: " in notes:
        yield hint(
            title,
            f'The trace says "{notes[notes.find("repaired: ") :]}".',
            "The rest of the trace is sound; leave RL steps out that lack requests.",
        )


@check
def drafts_lose_time(run: RunEvidence) -> Findings:
    """Rollouts that speculate take longer for their lengths than those that do not: speculation is net negative."""
    steps = run.steps
    if "accept_length" not in steps or steps["accept_length"].isna().all():
        steps = steps.assign(accept_length=steps["rl_step"].map(_accept_lengths(run)))
    timed = steps[steps["rollout_s"] > 0].assign(accept_length=steps["accept_length"].astype(np.float64))
    timed = timed[~timed["rl_step"].isin(run.explored)]
    lengths = run.known.outcomes.groupby("rl_step")["response_tokens"].agg(longest="max", tokens="sum")
    rows = timed.merge(lengths, left_on="rl_step", right_index=True).reset_index(drop=True)
    need(len(rows), "no RL step has a rollout time")
    # One token per draft is what drafts yield of which none is kept: neither.
    drafted, plain = rows[rows["accept_length"] >= DRAFTED], rows[rows["accept_length"].isna()]
    enough = min(len(drafted), len(plain)) >= ENOUGH_STEPS
    need(enough, f"RL steps with and without speculation, {ENOUGH_STEPS} of each, are needed")
    terms = ["longest", "tokens"] if len(plain) >= 4 else ["tokens"]
    # Fit the seconds of plain rollouts to their lengths, with relative errors.
    x, y = plain[terms].to_numpy(np.float64), plain["rollout_s"].to_numpy(np.float64)
    coefficients = np.linalg.lstsq(x / y[:, None], np.ones(len(y)), rcond=None)[0]
    expected = drafted[terms].to_numpy(np.float64) @ coefficients
    need((expected > 0).all(), "plain rollouts do not determine the time per length")
    off = float(np.sqrt(np.mean((x @ coefficients / y - 1) ** 2)))
    cost = mean_of_few((drafted["rollout_s"] / expected).to_numpy(), least_error=off / np.sqrt(len(plain)))
    if cost.low > 1.0:
        yield problem(
            "Speculation is net negative",
            f"{len(drafted)} rollouts with {drafted['accept_length'].mean():.2f} tokens per draft take {cost:.2f} "
            "times what plain ones would.",
            "Draft below a batch only (tltlab tune finds it), draft less deep, or switch it off.",
            rl_steps(drafted["rl_step"]),
        )


def _accept_lengths(run: RunEvidence) -> pd.Series:
    """Tokens per draft of each RL step whose iterations verified any."""
    by_step = _drafts(run.iterations).groupby("rl_step")[["pairs", "num_accepted"]].sum()
    return 1.0 + by_step["num_accepted"] / by_step["pairs"]


@check
def acceptance_low(run: RunEvidence) -> Findings:
    """A drafter's drafts are kept too rarely to pay for themselves at any batch."""
    judged = {str(drafter): _tokens_per_draft(rows) for drafter, rows in run.speculating.groupby("drafter")}
    need(any(judged.values()), f"no drafter made {ENOUGH_DRAFTS} drafts in {ENOUGH_STEPS} RL steps")
    for drafter, accepted in judged.items():
        if accepted is not None and accepted.high < ACCEPT_FLOOR:
            rows = run.speculating[run.speculating["drafter"] == drafter]
            yield problem(
                f"The drafts of {drafter} are kept too rarely to pay",
                f"{drafter} yields {accepted:.2f} tokens per draft, the bonus token included.",
                TEXTS["advice"]["train-or-replace"],
                rl_steps(rows["rl_step"]),
            )


def _tokens_per_draft(rows: pd.DataFrame) -> Interval | None:
    """Tokens per draft with an interval over RL steps, None where there are too few drafts."""
    by_step = _drafts(rows).groupby("rl_step")[["pairs", "num_accepted"]].sum()
    if by_step["pairs"].sum() < ENOUGH_DRAFTS or len(by_step) < ENOUGH_STEPS:
        return None
    return ratio(by_step["pairs"] + by_step["num_accepted"], by_step["pairs"])


def _like_lengths(run: RunEvidence) -> pd.Series:
    """Tokens per draft of each RL step with enough drafts, were all drafts as deep, and at such batches, as on average.

    Drafts are alike that one drafter makes to the same depth at about the same batch: another mix is no change.
    """
    drafts = _drafts(run.speculating)
    size = np.log2(drafts["batch"].clip(lower=1)).astype(int)
    cell = drafts.groupby(["drafter", "draft_depth", size])
    share = cell["num_accepted"].transform("sum") / cell["num_drafted"].transform("sum")
    drafts["expected"] = drafts["num_drafted"] * share
    by_step = drafts.groupby("rl_step")[["pairs", "num_accepted", "expected"]].sum()
    by_step = by_step[(by_step["pairs"] >= ENOUGH_DRAFTS) & (by_step["expected"] > 0)]
    gain = drafts["num_accepted"].sum() / drafts["pairs"].sum()
    return 1.0 + gain * by_step["num_accepted"] / by_step["expected"]


def _drafts(rows: pd.DataFrame) -> pd.DataFrame:
    """Iterations that verified drafts, with the `pairs` of request and iteration in each."""
    drafts = rows[rows["num_drafted"] > 0].astype({"num_drafted": np.float64, "num_accepted": np.float64})
    return drafts.assign(pairs=accepted_pairs(drafts))


@check
def drafts_collapse(run: RunEvidence) -> Findings:
    """Accept length falls, to one token or far down, while drafts continue."""
    rows = _drafted(run)
    length = rows["accept_length"].to_numpy(np.float64)
    none_kept = length <= COLLAPSED
    at = int(none_kept.argmax())
    if not none_kept.any():
        split = change_point(-length)
        if split is None or np.median(length[split:]) - 1 > LOST * (np.median(length[:split]) - 1):
            return
        at = split
    bad = rows[none_kept] if none_kept.any() else rows.iloc[at:]
    before = rows.iloc[:at] if at else rows[~none_kept]
    on = bool(bad["has_drafts"].all())
    if (len(before) and before["accept_length"].median() < KEPT) or len(bad) < (1 if on else SIDE):
        return
    ratio_of_times, longer = _slower(run, before["rl_step"], bad["rl_step"])
    # A log may write one token per draft where nothing was drafted.
    sure = on or (len(before) > 0 and ratio_of_times >= KEPT)
    need(sure or len(before), "accept length is 1 in all RL steps, and the log has no number of drafts")
    subject, name, form = "Accept length", "accept_length", ".2f"
    if run.log is not None and run.log[name].isna().all():
        subject, name, form = "The share of drafted tokens that is kept", "draft_rate", ".0%"
    was, now = (format(part[name].median(), form) for part in (before, bad))
    fall = f"{subject} falls from {was} to {now}" if len(before) else f"{subject} is {now}"
    kept = "kept no more" if none_kept.any() else "kept far less"
    yield (problem if sure else hint)(
        f"Drafts are {kept} from {run.unit} {bad['rl_step'].iloc[0]} on" if at else "Drafts are not kept",
        f"{fall} {'while drafts continue' if on else 'or nothing was drafted, which the log does not show'}"
        f"{_rates(before, bad) if name == 'accept_length' else ''}{longer and f'; rollouts take {longer}'}.",
        TEXTS["advice"]["train-or-replace" if run.log is None else "load-anew"],
        rl_steps(bad["rl_step"], run.unit),
    )


def _drafted(run: RunEvidence) -> pd.DataFrame:
    """RL steps that have the number of tokens per draft, as a log has it, or of like drafts of the iterations."""
    if run.log is None:
        lengths = _like_lengths(run)
        need(len(lengths) >= ENOUGH_FOR_TREND, f"a fall needs {ENOUGH_FOR_TREND} RL steps of {ENOUGH_DRAFTS} drafts")
        columns = {"rl_step": lengths.index, "accept_length": lengths.to_numpy(), "has_drafts": True}
        return pd.DataFrame(columns | {"draft_rate": np.nan})
    log = run.log
    if log["accept_length"].isna().all():
        # A lower bound: the accepted share counts tokens, and a draft has one or more.
        log = log.assign(accept_length=1.0 + log["draft_rate"])
    rows = log[log["accept_length"].notna()].reset_index(drop=True)
    need(len(rows), "the log has no tokens per draft")
    need(len(rows) >= 2 * SIDE, f"a change needs {2 * SIDE} RL steps with drafts")
    return rows


def _rates(before: pd.DataFrame, bad: pd.DataFrame) -> str:
    was, now = (rows["draft_rate"].median() for rows in (before, bad))
    if pd.isna(now):
        return ""
    return f", {now:.0%} of the drafted tokens are kept{'' if pd.isna(was) else f' after {was:.0%}'}"


def _slower(run: RunEvidence, before: pd.Series, behind: pd.Series) -> tuple[float, str]:
    """Return how many times as long rollouts take per token as before, and that in words; (1.0, "") where unknown."""
    try:
        rows = run.per_token.set_index("rl_step")
    except NotChecked:
        return 1.0, ""
    was, now = rows[rows.index.isin(before)], rows[rows.index.isin(behind)]
    if was.empty or now.empty:
        return 1.0, ""
    times, took_s = now["per_token"].median() / was["per_token"].median(), now["rollout_s"].median()
    return times, f"{took_s:.3g} s after {was['rollout_s'].median():.3g} s, {times:.2f} times as long per token"


@check
def switches_often(run: RunEvidence) -> Findings:
    """Speculation is switched on and off repeatedly."""
    need(len(run.speculating), "nothing was speculated")
    table = run.decoding
    on = table["draft_depth"].to_numpy() > 0
    begins = table[["rl_step", "worker"]].diff().fillna(1).to_numpy().any(axis=1)
    flips = (on != np.roll(on, 1)) & ~begins
    rate = 100 * flips.sum() / len(table)
    if rate > FLIPS_PER_100:
        yield hint(
            "Speculation switches on and off repeatedly",
            f"{flips.sum()} switches in {len(table)} iterations, {rate:.0f} per 100.",
            "Use a longer activation.hold_iterations, a smaller epsilon, or no speculation as an arm only where it "
            "wins.",
            rl_steps(table.loc[flips, "rl_step"]),
        )


@check
def drafter_never_published(run: RunEvidence) -> Findings:
    """The recipe trains a drafter, yet engines never got new weights of it."""
    need(run.setting("drafter") is not None, "the run trains no drafter")
    asked = run.setting("drafter.schedule.kind") != "never"
    need(asked, "drafter.schedule.kind is never: no new weights were meant")
    steps, rows = run.steps, run.known.spot_training
    need(len(steps) >= ENOUGH_STEPS, f"the run has fewer than {ENOUGH_STEPS} RL steps")
    if not (steps["drafter_version"].fillna(0) > 0).any():
        yield problem(
            "The trained drafter never went into service",
            f"In {len(steps)} RL steps the engines stayed on the drafter they began with; training made "
            f"{0 if rows is None else int(rows['updates'].sum())} updates.",
            "No updates: are workers ever idle before the rollout ends (tltlab timeline), and for longer than an "
            "update takes (drafter.tokens_per_update)? Else events.jsonl has the reason why its weights were refused.",
        )


@check
def waits_for_training(run: RunEvidence) -> Findings:
    """Rollouts end when the drafter's trainers let go, and not with their last response."""
    rows = run.training
    last_s = run.known.outcomes.groupby("rl_step")["t_finish"].max()
    freed_s = rows.assign(end=rows["t_start"] + rows["duration"]).groupby("rl_step")["end"].max()
    took_s = run.steps.set_index("rl_step")["rollout_s"].astype(np.float64)
    late = (pd.concat([freed_s, took_s], axis=1).min(axis=1) - last_s).dropna().clip(lower=0.0)
    share = late.sum() / took_s.reindex(late.index).sum()
    if share > WAITING:
        yield problem(
            "Rollouts wait for the drafter's trainers",
            f"After their last response they waited up to {late.max():.2g} s, {share:.0%} of their time, for an update "
            "to end.",
            "Make updates smaller (drafter.tokens_per_update) or give trainers more threads (drafter.threads); "
            "drafter.coordinator.yield_timeout_s bounds the wait.",
            rl_steps(late.index[late > 0]),
        )


@check
def rollout_slower(run: RunEvidence) -> Findings:
    """Rollouts take longer for the same lengths late in the run than early, and it is not for the drafts."""
    rows = run.per_token
    at = change_point(rows["per_token"].to_numpy(np.float64))
    if at is None:
        return
    before, behind = rows.iloc[:at], rows.iloc[at:]
    ratio_of_times, longer = _slower(run, before["rl_step"], behind["rl_step"])
    longest = behind["per_longest"].median() / before["per_longest"].median()
    if min(ratio_of_times, longest) < SLOWER:
        return
    collapsed: list[Finding] = []
    with suppress(NotChecked):
        collapsed += drafts_collapse(run)
    need(not collapsed, "drafts that are not kept explain what rollouts take")
    yield problem(
        f"Rollouts are slower from RL step {behind['rl_step'].iloc[0]} on",
        f"They take {longer}.",
        "Look at what changed there: devices, other jobs, engine settings, speculation.",
        rl_steps(behind["rl_step"]),
    )


@check
def stage_grows(run: RunEvidence) -> Findings:
    """A stage takes far more of the RL step late in the run than early."""
    stages = run.stages
    need(len(stages) > 2 * SIDE, f"a change needs {2 * SIDE + 1} RL steps whose stages are timed")
    found: list[tuple[float, Finding]] = []
    for name in stages.columns.difference(["step", "rollout"]):
        timed = stages[stages[name].notna() & (stages["step"] > 0)]
        at = change_point(timed[name].to_numpy(np.float64))
        if at is None:
            continue
        before, behind = timed.iloc[:at], timed.iloc[at:]
        # A stage that is not in every RL step is a smaller share of all of them.
        whole_before, whole_behind = (
            stages.loc[(stages.index >= rows.index[0]) & (stages.index <= rows.index[-1]), "step"].sum()
            for rows in (before, behind)
        )
        was, share = before[name].sum() / whole_before, behind[name].sum() / whole_behind
        if share - was < GROWN_SHARE:
            continue
        busy = whole_behind - (behind["wait"].sum() if "wait" in behind and name != "wait" else 0.0)
        own, first, title = behind[name].sum() / busy, behind.index[0], stage_label(name)
        waiting = "" if round(own, 2) == round(share, 2) else f", {own:.0%} of it without waiting for rollouts"
        finding = (problem if share >= LARGE_SHARE else hint)(
            f"{title[:1].upper()}{title[1:]} takes {own:.0%} of the RL step's work from RL step {first} on",
            f"It takes {behind[name].median():.4g} of {behind['step'].median():.4g} s, {share:.0%} of the RL step"
            f"{waiting}; before {before[name].median():.3g} s, {was:.0%}.",
            f"Look at {remedy(name)}, and at what changed at RL step {first}.",
            rl_steps(behind.index),
        )
        found.append((float(share - was), finding))
    if found:
        yield max(found, key=lambda stage: stage[0])[1]


@check
def several_turns(run: RunEvidence) -> Findings:
    """Responses have several turns, or wait for tools: lengths and rollout times are not those of generation."""
    if run.turns is None:
        raise NotChecked(NO_LOG if run.log is None else "the log has no number of turns per response")
    if run.turns:
        yield hint(
            "Responses are of several turns, or wait for tools",
            f"{run.turns[:1].upper()}{run.turns[1:]}.",
            "Read lengths and rollout times as more than generation: speculation speeds up generation alone. Record "
            "the engine (TLTLAB_RECORD) to see that.",
        )


@check
def rollout_not_bottleneck(run: RunEvidence) -> Findings:
    """The rollout, or waiting for it, is less than half of an RL step: speeding it up cannot help much."""
    rows, part = rollout_rows(run.stages)
    need(len(rows) >= ENOUGH_STEPS, f"fewer than {ENOUGH_STEPS} RL steps have the times of their stages (steps)")
    others = rows.drop(columns=[part, "step"]).fillna(0.0)
    timed = others.to_numpy().any()
    need(timed, "only the rollout's time is known, not that of the stages behind it (simulate: --stages)")
    share = ratio(rows[part], rows["step"])
    if share.high >= HALF:
        return
    parts = others.sum().sort_values(ascending=False) / rows["step"].sum()
    breakdown = ", ".join(f"{stage_label(str(name))} {of:.0%}" for name, of in parts.items() if of >= 0.01)
    largest, lead = str(parts.index[0]), "The rollout" if part == "rollout" else "Waiting for rollouts"
    yield hint(
        f"The rollout is not the bottleneck, {stage_label(largest)} is",
        f"{lead} is {share:.0%} of an RL step, {breakdown}: one twice as fast would save {share.estimate / 2:.0%} of "
        "it.",
        f"Look at {remedy(largest)}.",
    )


@check
def waiting_queue(run: RunEvidence) -> Findings:
    """Requests were thrown out of the KV cache and prefilled again, or wait for a place."""
    table = run.iterations
    need(table["num_waiting"].notna().any(), "the trace has no number of waiting requests (num_waiting)")
    again = table["prefill_tokens"].sum() / max(int(run.known.workload["prompt_tokens"].sum()), 1)
    waiting = table.loc[table["num_waiting"].fillna(0) > 0, "duration"].sum() / table["duration"].sum()
    if again > PREFILL_AGAIN:
        yield problem(
            "Engines prefill requests again",
            f"{again:.2f} tokens were prefilled for each prompt token: running requests lost their KV cache.",
            "Give the cache more room (vllm.kv_cache_memory_bytes) or run fewer at a time (vllm.max_num_seqs).",
            code="kv-preemption",
        )
    elif waiting >= WAITING_SHARE:
        yield hint(
            "Requests wait while others run",
            f"For {waiting:.0%} of the time up to {table['num_waiting'].max():.0f} requests waited, with batches of "
            f"up to {table['batch'].max()}.",
            "Raise vllm.max_num_seqs or vllm.kv_cache_memory_bytes: a long response that starts late is a tail.",
        )


@check
def slow_worker(run: RunEvidence) -> Findings:
    """One worker takes longer than the others for like iterations."""
    table = run.iterations
    table = table[(table["prefill_tokens"] == 0) & (table["batch"] > 0)]
    need(table["worker"].nunique() > 1, "iterations of at least two workers are needed")
    table = table.assign(size=np.log2(table["batch"]).astype(int))
    # Against the other workers' mean in the same RL step, at like depth and batch.
    cell = ["rl_step", "draft_depth", "size"]
    all_workers, own = table.groupby(cell)["duration"], table.groupby([*cell, "worker"])["duration"]
    num_others = all_workers.transform("size") - own.transform("size")
    usual = (all_workers.transform("sum") - own.transform("sum")) / num_others.where(num_others > 0)
    rows = table.assign(usual=usual)[usual.notna()]
    enough = rows["rl_step"].nunique() >= ENOUGH_STEPS
    need(enough, f"workers ran at like batch and depth in fewer than {ENOUGH_STEPS} RL steps")
    for worker, of_worker in rows.groupby("worker"):
        sums = of_worker.groupby("rl_step")[["duration", "usual"]].sum()
        if len(sums) < ENOUGH_STEPS:
            continue
        factor = ratio(sums["duration"], sums["usual"])
        if factor.low > SLOW_WORKER:
            yield problem(
                f"Worker {worker} is slower than the others",
                f"Its iterations take {factor:.2f} times those of the other workers at like batch and depth.",
                "Look at its device and what else runs there: another process, fewer cores, a throttled GPU.",
                f"worker {worker}",
            )
            return


def _need_gpu(run: RunEvidence, why: str) -> None:
    hardware = run.known.manifest.hardware
    need(hardware, "the hardware is not known")
    need("CPU" not in str(hardware), why)


@check
def no_graph(run: RunEvidence) -> Findings:
    """On a GPU, decoding runs in piecewise CUDA graphs, or in none."""
    _need_gpu(run, "CUDA graphs exist on GPUs only")
    table = run.decoding[run.decoding["graph"].notna()]
    need(len(table), "the trace has no CUDA graphs of iterations (graph in iterations.parquet)")
    total_s = table["duration"].sum()
    piecewise, eager = (
        table.loc[table["graph"] == kind, "duration"].sum() / total_s for kind in ("piecewise", "eager")
    )
    if piecewise + eager < GRAPHLESS_SHARE:
        return
    lacking = table[table["graph"] != "full"]
    by_depth = lacking.groupby("draft_depth")["duration"].sum()
    most = f"draft depth {by_depth.idxmax()}" if by_depth.idxmax() else "plain decoding"
    advice = (
        "Leave rollout.vllm.enforce_eager and compilation_config out and rollout.graphs at planned; raise "
        "rollout.vllm.max_num_batched_tokens for batches larger than those captured."
    )
    if eager < GRAPHLESS_SHARE:
        advice = (
            "rollout.graphs = planned captures graphs for drafts of any lengths where attention takes them (Hopper); "
            "elsewhere drop model-free drafters and fallbacks, so that vLLM takes its V2 runner, or draft at one depth."
        )
    yield Finding(
        "problem" if eager >= GRAPHLESS_SHARE else "hint",
        "Engines decode without full CUDA graphs",
        f"{piecewise:.0%} of decoding time ran in piecewise graphs and {eager:.0%} in none, most of it "
        f"({by_depth.max() / by_depth.sum():.0%}) at {most}; batches of {lacking['batch'].min()} to "
        f"{lacking['batch'].max()}.",
        advice,
    )


@check
def waits_for_host(run: RunEvidence) -> Findings:
    """On a GPU, iterations are scheduled synchronously: the device waits while the host schedules."""
    _need_gpu(run, "vLLM schedules synchronously on a CPU")
    table = run.iterations
    known = recorded_rows(table).synchronous
    need((known >= 0).any(), "the trace does not tell how iterations were scheduled (draft_duration)")
    waited = table[known == 1.0]
    waiting = measured_waiting(run.known) or VLLM_WAITING
    lost_s = float(waiting.seconds(waited["batch"]).sum())
    share = lost_s / table["duration"].sum()
    if share > WAITING:
        yield hint(
            "Engines wait for the host between iterations",
            f"{len(waited)} of {len(table)} iterations were scheduled synchronously, which takes about {lost_s:.3g} s, "
            f"{share:.0%} of their time, by {waiting.source}.",
            "Leave async_scheduling out where vLLM can make drafts late. What a rollout gains: tltlab simulate "
            "--scheduling asynchronous.",
        )


@check
def long_starved(run: RunEvidence) -> Findings:
    """Groups dropped for their age, and surplus samples, leave training with shorter responses than were generated."""
    rows = run.steps[run.steps["length_bias"].notna()]
    need(len(rows), "RL steps are apart, or the trace has no record of dropped responses (steps.length_bias)")
    bias, dropped = rows["length_bias"].iloc[-1], rows["dropped_groups"].iloc[-1]
    groups = "" if pd.isna(dropped) or not dropped else f" {dropped:.0f} groups were dropped for their age."
    if bias < STARVED:
        yield problem(
            "Training is starved of long responses",
            f"Responses trained on have {bias:.0%} of the mean length of those generated.{groups}",
            'Wait for the oldest groups (rollout.stale = "hold"), allow older ones (staleness, partial.max_age), or '
            "begin fewer samples (partial.samples).",
        )
