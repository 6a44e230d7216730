"""Names of the metrics of an RL step by framework (`frameworks.toml`), and the trace made from these metrics."""

import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.resources import files
from itertools import pairwise
from typing import Annotated

import numpy as np
import pandas as pd
from pydantic import Field

from tltlab.arrays import Floats, Ints
from tltlab.config import FrozenModel, entries
from tltlab.errors import TraceError
from tltlab.records import Fields, Json, frozen
from tltlab.traces.trace import few

from .responses import MOST_TOKENS, tables_of_lengths
from .rows import BY_OPTION, Reading

STAGES = ("inference_s", "reward_s", "advantage_s", "train_s", "sync_s")
"""Fields that are sums of their keys: the stages behind the rollout."""


_TABLE = tomllib.loads(files(__package__).joinpath("frameworks.toml").read_text(encoding="utf-8"))
_FieldName = Annotated[str, Field(pattern=_TABLE["any"].pop("fields"))]


class Form(FrozenModel):
    """How a line of metrics begins and what is between its items (`frameworks.toml`).

    `block` stands before names in a block that are not in `names`, which has keys for what consoles print.
    """

    begins: re.Pattern[str]
    items: str
    block: str = ""
    names: Mapping[str, str] = {}

    @property
    def in_block(self) -> bool:
        """True for a line whose RL step is that of the block."""
        return self.items in ("\n", "table")

    def key(self, name: str) -> str:
        """Return the key that a name stands for."""
        return self.names.get(name) or (f"{self.block}{name}" if self.in_block else name)


class Framework(FrozenModel):
    """A row of `frameworks.toml`: the keys of each field, and how its logs are known and written."""

    name: str
    versions: str = ""
    marks: re.Pattern[str]
    fields: Mapping[_FieldName, tuple[str, ...]] = {}
    lines: tuple[Form, ...] = ()
    timers: re.Pattern[str] = re.compile("(?!)")
    within: frozenset[str] = frozenset()
    holds: Mapping[str, str] = {}
    single_turn: float = 1
    advice: str = ""

    @cached_property
    def keys(self) -> frozenset[str]:
        """All keys that the framework's fields name."""
        return frozenset(key for keys in self.fields.values() for names in keys for key in names.split("|"))


def frameworks_of(rows: Sequence[Fields]) -> tuple[Framework, ...]:
    """Return the frameworks of the rows of a table. ConfigError names the faulty row, by its name or number from 1."""
    named, whole = {row.get("name", ""): row for row in rows}, []
    for row in rows:
        like = named.get(row.get("as"), {})
        fields = {**like.get("fields", {}), **row.get("fields", {})}
        whole.append({**like, **row, "fields": fields})
        if like:
            del whole[-1]["as"]
    return entries(Framework, whole, "frameworks.toml")


FRAMEWORKS = frameworks_of(_TABLE["framework"])
FORMS = (
    *(form for framework in FRAMEWORKS for form in framework.lines),
    *entries(Form, _TABLE["any"]["lines"], "frameworks.toml, any"),
)
"""How lines of metrics begin and are written: those of frameworks, then any."""
ANY: Json = _TABLE["any"]
"""Keys and forms of any framework."""
KNOWN = ", ".join(dict.fromkeys(framework.name.split(",")[0] for framework in FRAMEWORKS))
"""The frameworks' names, as messages list them."""

_MEANS = {key for framework in FRAMEWORKS for name in ("mean", "sequence") for key in framework.fields.get(name, ())}
MEAN = "response_length/mean"
"""Key of a mean length whose column a user names."""

_OF_ENGINES = frozenset(key for framework in FRAMEWORKS if framework.advice for key in framework.keys)
_KNOWN = frozenset(key for framework in FRAMEWORKS for key in framework.keys)
_ANY = {name: re.compile(pattern) for name, pattern in _TABLE["any"].items() if isinstance(pattern, str)}
_NO_SECONDS, _PERCENTILE = _ANY.pop("no_seconds"), _ANY.pop("percentile")
LEARNING = {name: re.compile(pattern) for name, pattern in _TABLE["any"]["learning"].items()}
"""Signs that a policy learns, by field: regular expressions of keys."""
_TIMERS = re.compile("^(" + "|".join(sorted({each.timers.pattern.removeprefix("^") for each in FRAMEWORKS})) + ")")
_DRAFTER_TRAINING = _ANY["drafter_training"]
_MOST_LETTERS = 256
"""Most letters of a metric's name."""
_TRL_CALL = re.compile(r"^profiling/Time taken: \w+\.")

MOST_RESPONSES = 1 << 22
"""Most responses that lengths are made for, over all RL steps of a log: some 2 GB."""
DEFAULT_RESPONSES = 512
ASSUMED_RESPONSES, UNKNOWN_LONGEST = "a default: set --responses", "no RL step has its longest response"
"""Ends the note of a log from which the number of responses does not follow."""
"""Responses per RL step where neither the log nor the caller gives their number."""


def plain_key(key: str) -> str | None:
    """Return the key as in `frameworks.toml`; None for a metric that is not used here.

    A prefix `train/`, which TensorBoard and W&B have, is no part of it, nor what comes before the name of a call in
    TRL's `profiling/Time taken: GRPOTrainer.vLLM.generate`.
    """
    if len(key) > _MOST_LETTERS:
        return None
    key = _TRL_CALL.sub("profiling/", key.strip().removeprefix("train/"))
    like = _PERCENTILE.sub("mean", key)
    if like in _KNOWN or (_TIMERS.search(key) and not _NO_SECONDS.search(key)):
        return key
    is_any = any(pattern.search(like) for pattern in _ANY.values())
    return key if is_any and "val" not in key.split("/")[0] and not key.startswith("eval") else None


def is_mean(name: str) -> bool:
    """Return True if a metric is the mean length of an RL step's responses."""
    key = plain_key(name)
    return key is not None and (key in _MEANS or _ANY["mean"].search(key) is not None)


@frozen
class Record:
    """Some metrics of an RL step by `plain_key`, and their place in the log; `rl_step` is None if not given.

    `is_cut`: some of the metrics were cut off.
    """

    rl_step: int | None
    place: str
    values: Mapping[str, float]
    is_cut: bool = False


@dataclass(kw_only=True)
class StepMetrics:
    """All metrics of an RL step."""

    rl_step: int
    place: str
    values: dict[str, float] = field(default_factory=dict)
    framework: Framework = FRAMEWORKS[0]
    tokens: float | None = None
    """Tokens of the RL step, prompts with them, by a log that counts those of the run."""

    def get(self, name: str) -> float | None:
        """A field of the framework, or one on whose name frameworks do not agree; None where the log has none."""
        found = [self._first(keys) for keys in self.framework.fields.get(name, ())]
        values = [value for value in found if value is not None]
        if not values and (pattern := _ANY.get(name) or LEARNING.get(name)) is not None:
            values = [value for key, value in self.values.items() if pattern.search(key)]
        if not values:
            return self._of_sequence(name)
        return sum(values) if name in STAGES else values[0]

    @property
    def used(self) -> dict[str, str]:
        """The metric that each field is read from."""
        found: dict[str, str] = {}
        for key in self.values:
            names = [name for name, keys in self.framework.fields.items() if key in "|".join(keys).split("|")]
            names += [name for name, pattern in _ANY.items() if pattern.search(key)]
            found |= {name: key for name in names[:1] if name not in found}
        return found

    def _first(self, keys: str) -> float | None:
        """The value of the first of some keys, alternatives with a bar between."""
        return next((self.values[key] for key in keys.split("|") if key in self.values), None)

    def _of_sequence(self, name: str) -> float | None:
        """The length of responses where the log has that of prompts and responses together, and the other way."""
        whole = {"mean": "sequence", "least": "sequence_least", "most": "sequence_most"}.get(name)
        if whole is not None and (length := self.get(whole)) is not None:
            return max(length - (self.get("prompt") or 0.0), 1.0)
        if name == "prompt" and "mean" in self.framework.fields:
            own = [value for keys in self.framework.fields["mean"] if (value := self._first(keys)) is not None]
            if own and (length := self.get("sequence")) is not None:
                return max(length - own[0], 0.0)
        return None

    @property
    def has_drafts(self) -> bool:
        """True if the log has drafted tokens in this RL step, accepted or not."""
        counts = [value for name in ("drafts", "drafted") if (value := self.get(name)) is not None]
        return any(counts) if counts else self.get("draft_rate") is not None

    @property
    def accept_length(self) -> float | None:
        """Tokens per draft, the bonus token included; None where nothing was drafted, which logs write as 0."""
        length, drafts, accepted = self.get("accept_length"), self.get("drafts"), self.get("accepted")
        if length is None and drafts and accepted is not None:
            length = 1.0 + accepted / drafts
        return None if length is None or length < 1.0 or self.get("drafted") == 0.0 else length

    @property
    def with_prompt(self) -> float:
        """Mean tokens of a response with its prompt; 0 where one of them is unknown."""
        mean, prompt = self.get("mean"), self.get("prompt")
        return 0.0 if mean is None or prompt is None else mean + prompt

    @property
    def num_responses(self) -> int | None:
        """Responses of the RL step, as logged, or all tokens over the mean tokens of a response with its prompt."""
        num, total = self.get("responses"), self.get("total_tokens") or self.tokens
        if num is None and total is not None and self.with_prompt:
            num = total / self.with_prompt
        return None if num is None or num < 0.5 else round(num)

    @property
    def most_responses(self) -> int | None:
        """The most responses that the RL step's tokens allow, where the log has no length of prompts."""
        mean = self.get("mean")
        return None if self.tokens is None or not mean or self.tokens < mean else int(self.tokens / mean)

    @property
    def contradiction(self) -> str:
        """Two metrics of the lengths that exclude each other, in words; empty where there are none."""
        known = {name: (self.get(name) or 0.0, key) for name, key in self.used.items()}
        mean, most, sequence = map(known.get, ("mean", "most", "sequence"))
        # The shortest may be of those that were not aborted.
        least = None if self.get("aborted") else known.get("least")
        marks = {0: least, 100: most}
        for key, value in self.values.items():
            if (match := _PERCENTILE.search(key)) and mean and _PERCENTILE.sub("mean", key) == mean[1]:
                marks[int(match[1] or 50)] = (value, key)
        pairs = [
            *pairwise(filter(None, (marks[at] for at in sorted(marks)))),
            (least, mean),
            (mean, most),
            (mean, sequence),
        ]
        for one, other in pairs:
            if one and other and one[0] > 1.001 * other[0] + 0.5:
                return f"{one[1]}, {one[0]:g} tokens, is more than {other[1]}, {other[0]:g}"
        whole, total = (self.get("responses") or 0.0) * self.with_prompt, self.get("total_tokens")
        has_turns = (self.get("turns") or 0.0) > self.framework.single_turn
        if whole and total and not has_turns and abs(whole / total - 1.0) > 0.05:
            num, key = known["responses"]
            return f"{key}, {num:g}, are {whole:g} tokens with prompts, and {known['total_tokens'][1]} is {total:g}"
        return ""

    @property
    def stages(self) -> dict[str, float]:
        """Seconds of the RL step by stage: the rollout, or waiting for one that continues during training, and STAGES.

        Other timers are there under their own names, the largest first.
        """
        names = ("wait_s" if self.get("wait_s") is not None else "rollout_s", *STAGES)
        found = {name: seconds for name in names if (seconds := self.get(name)) is not None}
        whole = self.get("step_s")
        for holder, held in self.framework.holds.items():
            if holder in found and held in found and whole is not None and sum(found.values()) > whole:
                found[holder] = max(found[holder] - found[held], 0.0)
        known = self.framework.keys | self.framework.within
        left = math.inf if whole is None else 1.02 * whole - sum(found.values())
        # Timers that are more than what is left are within others.
        for key, seconds in sorted(self.values.items(), key=lambda item: -item[1]):
            if self.framework.timers.search(key) and key not in known and seconds <= left:
                found[key] = seconds
                left -= seconds
        return found


def framework_of(keys: Iterable[str]) -> Framework | None:
    """The framework of these keys: among those whose mark is present, the one that knows most keys."""
    keys = set(keys)
    marked = [framework for framework in FRAMEWORKS if any(map(framework.marks.search, keys))]
    return max(marked, key=lambda framework: len(framework.keys & keys), default=None)


_COUNTS = tuple(
    key for framework in FRAMEWORKS for name in ("tokens_so_far", "epoch") for key in framework.fields.get(name, ())
)
"""Keys of values that do not fall within a run."""


def runs_of(records: Sequence[Record]) -> tuple[list[list[Record]], int]:
    """Return a log's records by run, and how many were left out as a resumed run logged their RL steps again.

    Another run begins where the number of the first RL step comes again after others, in a log without numbers where a
    count of `_COUNTS` falls to its first value or below. One that falls less far is of a run that was resumed.
    """
    if 2 * sum(record.rl_step is not None for record in records) >= len(records):
        counts = [float("nan") if record.rl_step is None else float(record.rl_step) for record in records]
    else:
        key = next((key for key in _COUNTS if any(key in record.values for record in records)), "")
        counts = [record.values.get(key, float("nan")) for record in records]
    are_numbers = any(record.rl_step == count for record, count in zip(records, counts, strict=True))
    runs: list[list[Record]] = [[]]
    first = last = -math.inf
    num_again = 0
    run = list[tuple[float, Record]]()
    for count, record in zip(counts, records, strict=True):
        if count <= first < last:
            runs.append([])
            run, first, last = [], -math.inf, -math.inf
        elif count < last and not are_numbers:
            kept = [pair for pair in run if not pair[0] >= count]
            num_again += len(run) - len(kept)
            run, runs[-1] = kept, [each for _, each in kept]
        if not math.isnan(count):
            first, last = count if first == -math.inf else first, count
        run.append((count, record))
        runs[-1].append(record)
    return runs, num_again


def _with_tokens(steps: Sequence[StepMetrics]) -> None:
    """Add the tokens of each RL step where the log counts those of the run."""
    for before, step in pairwise(steps):
        old, new = before.get("tokens_so_far"), step.get("tokens_so_far")
        if old is not None and new is not None and new > old:
            step.tokens = (new - old) / (step.rl_step - before.rl_step)


def steps_of(records: Iterable[Record], run: int | None = None) -> tuple[list[StepMetrics], list[str]]:
    """Return the RL steps of a log in order, and notes; of several runs in it those of the `run`, counted from 1.

    Records of an RL step with different metrics are merged. A record with another value for a known metric of its RL
    step means that the run was resumed: the last record counts. Where records have no number, each that repeats a
    metric begins an RL step; these are counted from 1. Raises TraceError for several runs without a choice of one.
    """
    steps: dict[int, StepMetrics] = {}
    repeats: set[int] = set()
    records = list(records)
    # The engine's own reports, between those of a framework, are of no RL step.
    of_steps = [record for record in records if not record.values or record.values.keys() - _OF_ENGINES]
    records = of_steps if any(record.values for record in of_steps) else records
    runs, num_again = runs_of(records)
    if (len(runs) > 1) if run is None else run > len(runs):
        raise TraceError(
            f"{records[0].place}: {len(runs)} runs in one log, which begin at {few([each[0].place for each in runs])}: "
            f"choose one with --run 1 to {len(runs)} ({BY_OPTION.format('it')})"
        )
    records = runs[(run or 1) - 1]
    are_numbered = 2 * sum(record.rl_step is not None for record in records) >= len(records) > 0
    num_unnumbered = num_lost = 0
    of_step = set[str]()
    for record in records:
        rl_step = record.rl_step
        if rl_step is None and are_numbered:
            # The number that others have is lost.
            num_lost += bool(record.values)
            continue
        if rl_step is None:
            if not (of_step and record.values) or not of_step.isdisjoint(record.values):
                num_unnumbered, of_step = num_unnumbered + 1, set()
            of_step |= record.values.keys()
            rl_step = num_unnumbered
        if not record.values:
            continue
        known = steps[rl_step].values if rl_step in steps else {}
        again = {key: value for key, value in record.values.items() if key in known}
        if 2 * len(again) > len(record.values) and any(known[key] != value for key, value in again.items()):
            repeats.add(rl_step)
            del steps[rl_step]
        steps.setdefault(rl_step, StepMetrics(rl_step=rl_step, place=record.place)).values.update(record.values)
    framework = framework_of(key for step in steps.values() for key in step.values)
    for step in steps.values():
        step.framework = framework or step.framework
    notes: list[str] = []
    if num_again:
        notes.append(f"{num_again} records were logged again by a resumed run: the later ones count")
    if len(runs) > 1:
        notes.append(f"run {run} of {len(runs)} in the log")
    if cut := [record.place for record in records if record.is_cut]:
        notes.append(f"{len(cut)} records are cut off ({few(cut)}): what is cut counts as unknown")
    if num_lost:
        notes.append(f"{num_lost} records lack the RL step, which the others have, and are left out")
    if num_unnumbered:
        notes.append("the log does not number its RL steps: they are counted from 1")
    if repeats:
        notes.append(
            f"{len(repeats)} RL steps are logged more than once (a resumed run): the last one counts "
            f"({few(sorted(repeats))})"
        )
    ordered = [steps[rl_step] for rl_step in sorted(steps)]
    _with_tokens(ordered)
    return ordered, notes


SEVERAL_TURNS = "several turns: "
"""How the note of a log begins whose responses are not of one turn, or wait for tools."""


def turns_note(steps: Sequence[StepMetrics]) -> str | None:
    """Note on a log whose lengths and rollout times include more than generation.

    "" where they are of generation alone, None where the log has no metrics of turns and tools.
    """
    if all(step.get(name) is None for step in steps for name in ("turns", "tool_calls", "tool_s")):
        return None

    def middle(name: str) -> float:
        values = [value for step in steps if (value := step.get(name)) is not None]
        return float(np.median(values)) if values else 0.0

    turns, calls, tool_s = middle("turns"), middle("tool_calls"), middle("tool_s")
    if turns <= steps[0].framework.single_turn and calls <= 0.0 and tool_s <= 0.0:
        return ""
    parts = [f"a response has {turns:.3g} turns"] if turns > 0.0 else []
    parts += [f"{calls:.2g} tool calls"] if calls > 0.0 else []
    parts += [f"{tool_s:.3g} s at tools on average"] if tool_s > 0.0 else []
    slowest, at_tools = middle("slowest_s"), middle("slowest_tool_s")
    parts += [f"the slowest {at_tools:.3g} of {slowest + at_tools:.3g} s"] if at_tools > 0.0 else []
    return (
        f"{SEVERAL_TURNS}{', '.join(parts)} (medians over RL steps), so the lengths include text of tools and users, "
        "rollouts wait for them, and neither is generation alone"
    )


def tables_of_steps(
    steps: list[StepMetrics], place: str, reading: Reading, said: Sequence[str]
) -> tuple[dict[str, pd.DataFrame], list[str]]:
    """Return workload, outcomes and steps of a log's RL steps, and assumptions. TraceError without a usable RL step.

    Lengths are `max_entropy_lengths` of what is known; their order within an RL step is drawn, the same each time.
    The `responses` of `reading` are used where the log lacks their number. The cap is its `max_response_tokens`, else
    the longest response of RL steps with cut ones, else the longest of all. `said`: earlier notes on the log.
    """
    notes = [note] if (note := turns_note(steps)) else []
    usable = [step for step in steps if step.get("mean") is not None]
    if not usable:
        framework = steps[0].framework if steps else None
        names = [] if framework is None else [*framework.fields.get("mean", ()), *framework.fields.get("sequence", ())]
        wanted = " or ".join(names[:3]) or "a mean length"
        raise TraceError(
            f"{place}: a log of {framework.name if framework else 'metrics'}, but no RL step has the length "
            f"of its responses; {'; '.join(((framework and framework.advice) or f'wanted {wanted}', *said))}"
        )
    if lost := [step.rl_step for step in steps if step.get("mean") is None and step.get("rollout_s") is not None]:
        notes.append(f"{len(lost)} RL steps have no mean length and are left out ({few(lost)})")
    gaps = sorted(set(range(usable[0].rl_step, usable[-1].rl_step + 1)) - {step.rl_step for step in usable})
    if gaps:
        notes.append(f"{len(gaps)} RL steps between the first and the last are not in the log")
    counts = _counts(usable, reading.responses, place, notes)
    if (num := sum(counts)) > MOST_RESPONSES:
        raise TraceError(f"{place}: its tokens make {num:,} responses, and at most {MOST_RESPONSES:,} are read at once")
    cap, group_size = _cap(usable, reading.max_response_tokens, place, notes), reading.group_size or 1
    for name, quantity in (("least", "shortest"), ("most", "longest"), ("cut", "cut responses")):
        if missing := sum(step.get(name) is None for step in usable):
            notes.append(f"{missing} RL steps lack their {quantity}")
    frames, modelled = [], []
    for step, num in zip(usable, counts, strict=True):
        try:
            lengths = _lengths(step, num, cap)
        except ValueError as error:
            notes.append(f"RL step {step.rl_step} is left out ({step.place}): {error}")
            continue
        modelled.append(step)
        prompts = np.arange(num) // group_size
        columns = {
            "rl_step": step.rl_step,
            "prompt_id": [f"s{step.rl_step}-p{prompt}" for prompt in prompts],
            "sample": np.arange(num) % group_size,
            "response_tokens": np.random.default_rng(step.rl_step).permutation(lengths),
            "prompt_tokens": max(0, round(step.get("prompt") or 0.0)),
            # In an average over batches, as TRL logs them, the longest is shorter than the cap.
            "longest": int(lengths[-1]) if (step.get("cut") or 0.0) > 0 else cap,
        }
        frames.append(pd.DataFrame(columns))
    if not frames:
        raise TraceError(f"{place}: {notes[-1]}")
    if any(step.get("prompt") is None for step in modelled):
        notes.append("prompts whose length is not in the log count as 0 tokens")
    if all(step.get("sequence") is not None and step.get("prompt") is None for step in modelled):
        notes.append("lengths are those of prompt and response together: the log has no others")
    notes.append(
        "lengths are not measured but the maximum-entropy ones (truncated exponential) with the log's mean, shortest, "
        "longest and share of cut responses"
    )
    rows = pd.concat(frames, ignore_index=True)
    known_cut = any((step.get("cut") or 0.0) > 0 for step in modelled) or reading.max_response_tokens is not None
    is_cut = (rows["response_tokens"] >= rows["longest"]) & known_cut
    lengths, prompt_tokens = rows["response_tokens"].to_numpy(), rows["prompt_tokens"].to_numpy()
    tables = tables_of_lengths(rows[["rl_step", "prompt_id", "sample"]], lengths, prompt_tokens, cap, is_cut.to_numpy())
    outcomes = tables["outcomes"]
    if (empty := outcomes["response_tokens"] == 0).any():
        outcomes.loc[empty, "finish_reason"] = "abort"
        notes.append(f"{empty.mean():.0%} of the responses were aborted without a token")
    return {**tables, "steps": _steps_table(modelled)}, notes


def _counts(steps: list[StepMetrics], responses: int | None, place: str, notes: list[str]) -> list[int]:
    counts = [step.num_responses for step in steps]
    stated = [num for num in counts if num is not None]
    missing = len(counts) - len(stated)
    bounds = [step.most_responses for step, num in zip(steps, counts, strict=True) if num is None]
    if known := [most for most in bounds if most is not None]:
        most = int(np.median(known))
        if responses is not None and responses > most:
            raise TraceError(
                f"{place}: {responses} responses of an RL step are more than its tokens allow: it has "
                f"{most} at most by the growth of num_tokens"
            )
        stated = stated or [most]
        notes.append(f"an RL step has {most} responses at most, by the tokens of the run so far (prompts are unknown)")
    default = responses or (int(np.median(stated)) if stated else DEFAULT_RESPONSES)
    if missing:
        source = (
            "as given"
            if responses
            else "as many as others have, or as their tokens allow"
            if stated
            else ASSUMED_RESPONSES
        )
        notes.append(f"{missing} RL steps lack the number of responses: {default}, {source}")
    return [default if num is None else num for num in counts]


def _cap(steps: list[StepMetrics], maximum: int | None, place: str, notes: list[str]) -> int:
    longest = math.ceil(max(step.get("most") or step.get("mean") or 1.0 for step in steps))
    if maximum is not None:
        if longest > maximum:
            raise TraceError(f"{place}: a response has {longest} tokens, more than the maximum of {maximum}")
        return maximum
    if any((step.get("cut") or 0.0) > 0 and step.get("most") is not None for step in steps):
        return longest
    if all(step.get("most") is None for step in steps):
        longest *= 8
        notes.append(f"{UNKNOWN_LONGEST}: nothing is assumed to end before {longest} tokens")
    notes.append(f"the cap is unknown: the longest response ({longest} tokens) is taken for it")
    return max(1, longest)


def _lengths(step: StepMetrics, num: int, cap: int) -> Ints:
    mean, most, least = step.get("mean"), step.get("most"), step.get("least")
    assert mean is not None
    if why := step.contradiction:
        raise ValueError(why)
    cut, aborted = (min(max(step.get(name) or 0.0, 0.0), 1.0) for name in ("cut", "aborted"))
    empty = round(aborted * num)
    num_left = num - empty
    if not num_left:
        return np.zeros(num, np.int64)
    shortest, longest = None if least is None else max(1, round(least)), None if most is None else round(most)
    end, share = cap if longest is None else longest, num / num_left
    lengths = max_entropy_lengths(
        num_left, mean=max(mean * share, 1.0), least=shortest, most=longest, cut=min(cut * share, 1.0), cap=end
    )
    return np.concatenate([np.zeros(empty, lengths.dtype), lengths])


def metrics_table(steps: Sequence[StepMetrics]) -> pd.DataFrame:
    """Table of a log's RL steps, a row each: fields, accept length, `has_drafts`; `seconds` by stage."""
    names = (
        "mean", "most", "cut", "rollout_s", "wait_s", "step_s", "reward_mean", "draft_rate", "tokens_per_s", *STAGES,
        *LEARNING,
    )  # fmt: skip
    columns = {name: [step.get(name) for step in steps] for name in names}
    columns |= {name: [getattr(step, name) for step in steps] for name in ("accept_length", "num_responses")}
    table = pd.DataFrame(columns, dtype=np.float64)
    table.insert(0, "rl_step", [step.rl_step for step in steps])
    table["has_drafts"] = [step.has_drafts for step in steps]
    return table.assign(seconds=pd.Series([step.stages for step in steps], dtype=object))


def _steps_table(steps: list[StepMetrics]) -> pd.DataFrame:
    """The table `steps`; times of the run count from the first RL step."""
    stages = ["rollout_s", "inference_s", "reward_s", "train_s", "sync_s"]
    table = metrics_table(steps)
    timed = [*stages[1:], "wait_s"]
    table[timed] = pd.DataFrame(list(table["seconds"]), columns=timed, dtype=np.float64)
    table = table[["rl_step", *stages, "wait_s", "step_s", "reward_mean", "accept_length", "draft_rate"]].copy()
    whole = table["step_s"].fillna(table[stages].sum(axis=1))
    table.insert(1, "t_start", whole.cumsum() - whole)
    table["policy_version"] = table["rl_step"]
    is_trained = np.array([any(v for key, v in step.values.items() if _DRAFTER_TRAINING.search(key)) for step in steps])
    if is_trained.any():
        # Trained in an RL step it serves from the next one on.
        version = np.concatenate([[0], np.cumsum(is_trained)[:-1]])
        since = pd.Series(table["rl_step"].where(is_trained)).shift().ffill()
        table["drafter_version"] = version
        table["drafter_age"] = (table["rl_step"] - 1 - since).astype(np.float64)
    return table


_STEEPEST = 700.0
"""Largest decay over the range, in nats: e^-700 is the last that a double holds."""


def max_entropy_lengths(
    num: int, *, mean: float, least: int | None = None, most: int | None = None, cut: float = 0.0,
    cap: int | None = None,
) -> Ints:  # fmt: skip
    """`num` lengths in tokens, ascending, whose sum is `mean` times `num`, rounded.

    The maximum-entropy distribution on `least` (unknown: 1) .. `most` with this mean is the exponential cut off at both
    ends (Jaynes 1957; Cover and Thomas, chapter 12); the lengths are its quantiles, so they are the same each time.
    One response has the length `least` and one `most`, the extremes that the log states. Round(`cut` x
    `num`) of them have the length `cap`, `most` by default. Without `most` the distribution has no upper end below
    `cap`, and the longest is its last quantile. Raises ValueError where no such lengths exist.

    >>> max_entropy_lengths(4, mean=30.0, least=10, most=80).tolist()
    [10, 12, 18, 80]
    """
    low = 1 if least is None else least
    if num < 1 or low < 1 or (most is not None and most < low):
        raise ValueError(f"{num} lengths from {low} to {most} tokens")
    if (longest := max(mean, low, most or 0, cap or 0)) > MOST_TOKENS:
        raise ValueError(f"no response has {longest:.3g} tokens")
    total = round(mean * num)
    end = most if cap is None else cap
    num_cut = 0 if end is None else min(num, round(cut * num))
    fixed: list[int] = [] if end is None else [end] * num_cut
    if most is not None and not num_cut:
        fixed.append(most)
    if least is not None and len(fixed) < num and least != most:
        fixed.append(least)
    fixed = fixed[:num]
    free = num - len(fixed)
    free_total = total - sum(fixed)
    if most is not None:
        # A response at the cap counts as cut, so the others stay below it.
        high = max(low, most - 1) if num_cut and most == end else most
    else:
        # Practically no end: at 30 times the mean an exponential has 1e-13 of its mass left.
        high = (cap - 1 if num_cut else cap) if cap is not None else low + max(1, int(30 * (free_total / max(free, 1))))
    if (free == 0 and abs(free_total) > num) or (free and not free * low <= free_total <= free * high):
        raise ValueError(
            f"{num} responses of {low} to {most} tokens, {num_cut} of them cut at {end}, have no mean of {mean:g}"
        )
    lengths = np.array(fixed, np.int64)
    if free:
        drawn = _round_to_total(_quantiles(free, free_total / free, float(low), float(high)), free_total)
        lengths = np.concatenate([drawn, lengths])
    return np.sort(lengths)


def _quantiles(num: int, mean: float, low: float, high: float) -> Floats:
    """Middles of `num` equal parts of the truncated exponential's mass, its decay such that their mean is `mean`."""
    at = (np.arange(num) + 0.5) / num
    width = high - low
    if width <= 0 or mean <= low:
        return np.full(num, low)
    if mean >= high:
        return np.full(num, high)

    def lengths(decay: float) -> Floats:
        """`decay` is in nats over the whole range; below zero long lengths are the likelier ones."""
        if abs(decay) < 1e-9:
            return low + width * at
        values: Floats = low - width / decay * np.log1p(at * np.expm1(-decay))
        return np.clip(values, low, high)

    def off(decay: float) -> float:
        return float(lengths(decay).mean()) - mean

    from scipy.optimize import brentq  # takes longer to import than most commands that get here by way of others

    if off(_STEEPEST) >= 0:
        return lengths(_STEEPEST)
    if off(-_STEEPEST) <= 0:
        return lengths(-_STEEPEST)
    return lengths(float(brentq(off, -_STEEPEST, _STEEPEST, xtol=1e-12)))


def _round_to_total(values: Floats, total: int) -> Ints:
    """Whole numbers nearest to `values`, in their range, that sum to `total`: the largest remainders are rounded up."""
    whole = np.floor(values).astype(np.int64)
    missing = total - int(whole.sum())
    increment, remainder = divmod(missing, len(whole))
    order = np.argsort(whole - values, kind="stable")
    whole += increment
    whole[order[:remainder]] += 1
    return whole
