"""Measures model-free drafters on recorded or made-up text: time and memory of their index, and what is accepted.

`bench_drafters` replays the same responses through every drafter; `bench_history` is a long run's history alone.
"""

from __future__ import annotations

import gc
import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import Progress, Table, Text, alone, quiet, resident_bytes
from tltlab.drafters.base import Drafter, Key
from tltlab.drafters.specs import SYSTEM_DRAFTERS, ModelFreeSpec, NgramSpec, SuffixSpec
from tltlab.drafters.suffix import SuffixDrafter
from tltlab.errors import ConfigError, InputError
from tltlab.strategy import Strategy
from tltlab.traces.trace import read

CHUNK = 64
"""Tokens by which responses of a long run grow in turn."""

CASES: dict[str, ModelFreeSpec] = {
    "ngram, request": NgramSpec(scope="request"),
    "suffix, request": SuffixSpec(scopes=("request",)),
    **SYSTEM_DRAFTERS,
}


@dataclass(frozen=True, kw_only=True)
class Visits:
    """The responses to one prompt: those of earlier visits, and those that are replayed."""

    prompt_id: str
    prompt: list[int]
    earlier: list[list[int]]
    replayed: list[list[int]]


def bench_drafters(
    trace: Path | None = None,
    *,
    num_groups: int | None = None,
    response_tokens: int = 16_384,
    depth: int = 8,
    cases: Mapping[str, ModelFreeSpec] = CASES,
) -> dict[str, Any]:
    """Replay the same responses through every drafter, each in a process of its own.

    The text is that of `trace` (its first `num_groups` prompts; None: all) or made up (None: 2 prompts, 8 responses
    each). A prompt's last visit is replayed, all responses at once: first as if it were the only one, where nothing
    but siblings that grow beside can help, then with the earlier visits remembered. Of a prompt visited once, half of
    the samples stands for an earlier visit: one by the very same policy, which no real history is. A draft token is
    accepted while it equals the recorded text, then one more recorded token follows, as in an engine; at a temperature
    above 0 that is a cautious measure. A drafter that is not `live` indexes nothing meanwhile, so its insertion and
    memory are not seen.

    Returns `num_tokens` replayed, `depth` and `rows`: of each drafter microseconds per token inserted and per look-up,
    resident bytes per token held (None where the system does not tell), and per look-up the tokens `drafted` and
    `accepted`, first visit and with history. Raises ConfigError, InputError, TraceError.
    """
    groups = made_up(num_groups or 2, 8, response_tokens) if trace is None else recorded(trace, num_groups)
    rows = []
    for name, spec in cases.items():
        first, later = (alone(visit, spec, groups, depth, history) for history in (False, True))
        rows.append({"drafter": name, "settings": spec.model_dump(mode="json"), "first": first, "later": later})
    return {"num_tokens": sum(len(text) for g in groups for text in g.replayed), "depth": depth, "rows": rows}


def recorded(path: Path, num_groups: int | None = None) -> list[Visits]:
    """The prompts of a trace with tokens, by their last visit and what came before; later turns are left out.

    Of a prompt visited once, one half of its samples stands for an earlier visit, and one sample is not enough.
    """
    tokens = read(path).tokens
    if tokens is None:
        raise InputError(f"{path}: no tokens.parquet in it, and drafters are replayed over recorded tokens")
    groups = []
    for prompt_id, rows in tokens[tokens["turn"] == 0].groupby("prompt_id", sort=False):
        prompt = rows["prompt_token_ids"].iloc[0].tolist()
        last = rows["rl_step"] == rows["rl_step"].max()
        earlier = [text.tolist() for text in rows["token_ids"][~last]]
        replayed = [text.tolist() for text in rows["token_ids"][last]]
        if not earlier:
            half = len(replayed) // 2
            earlier, replayed = replayed[:half], replayed[half:]
        if earlier:
            groups.append(Visits(prompt_id=str(prompt_id), prompt=prompt, earlier=earlier, replayed=replayed))
    if not groups:
        raise InputError(f"{path}: every prompt has one sample only, so there is no history to draft from")
    return groups[:num_groups]


def made_up(num_groups: int, num_samples: int, response_tokens: int) -> list[Visits]:
    """Responses that string together the phrases of their problem, with a stray token now and then.

    It has the length of reasoning text, not its statistics: what is accepted on it says nothing about a model.
    """
    if response_tokens < 2:
        raise ConfigError(f"response_tokens is {response_tokens}, it must be at least 2")
    rng = np.random.default_rng(0)
    groups = []
    for number in range(num_groups):
        phrases = [rng.integers(0, 32_000, rng.integers(8, 25)).tolist() for _ in range(1000)]
        texts = []
        for _ in range(num_samples):
            text: list[int] = []
            while len(text) < response_tokens:
                text += phrases[min(int(rng.zipf(1.3)), 1000) - 1]
                if rng.random() < 0.5:
                    text.append(int(rng.integers(0, 32_000)))
            texts.append(text[:response_tokens])
        prompt, half = rng.integers(0, 32_000, 256).tolist(), num_samples // 2
        groups.append(Visits(prompt_id=f"p{number}", prompt=prompt, earlier=texts[:half], replayed=texts[half:]))
    return groups


def visit(spec: ModelFreeSpec, groups: Sequence[Visits], depth: int, with_history: bool) -> dict[str, float | None]:
    """Replay the responses in this process with a fresh drafter."""
    drafter = spec.build()
    gc.collect()
    before = resident_bytes()
    if with_history:
        for group in groups:
            for sample, text in enumerate(group.earlier):
                drafter.remember((0, group.prompt_id, sample, 0), group.prompt, text)
        drafter.begin(1)
    figures = replay(drafter, groups, depth)
    gc.collect()
    after = resident_bytes()
    num_tokens = [len(group.prompt) + sum(len(text) for text in group.replayed) for group in groups]
    bytes_per_token = None if before is None or after is None or with_history else (after - before) / sum(num_tokens)
    return figures | {"bytes_per_token": bytes_per_token}


def replay(drafter: Drafter, groups: Sequence[Visits], depth: int) -> dict[str, float | None]:
    """Run all responses side by side, an iteration of each in turn; they stay open."""
    open_ = {(1, group.prompt_id, i, 0): text for group in groups for i, text in enumerate(group.replayed) if text}
    for group in groups:
        for i in range(len(group.replayed)):
            drafter.open((1, group.prompt_id, i, 0), group.prompt)
    at = dict.fromkeys(open_, 1)
    for key, text in open_.items():
        drafter.extend(key, text[:1])
    drafter.catch_up()
    insert_s = lookup_s = 0.0
    lookups = inserted = drafted = accepted = 0
    while open_:
        for key, text in list(open_.items()):
            done = at[key]
            if done == len(text):
                del open_[key]
                continue
            start = time.perf_counter()
            draft = drafter.propose(key, min(depth, len(text) - done)).tokens
            lookup_s += time.perf_counter() - start
            num_accepted = next((i for i, token in enumerate(draft) if token != text[done + i]), len(draft))
            drafter.observe(key, len(draft), num_accepted)
            new = text[done : done + num_accepted + 1]
            start = time.perf_counter()
            drafter.extend(key, new)
            drafter.catch_up()
            insert_s += time.perf_counter() - start
            at[key] += len(new)
            lookups += 1
            inserted += len(new)
            drafted += len(draft)
            accepted += num_accepted
    return {
        "insert_us_per_token": insert_s / max(inserted, 1) * 1e6,
        "lookup_us": lookup_s / max(lookups, 1) * 1e6,
        "drafted": drafted / max(lookups, 1),
        "accepted": accepted / max(lookups, 1),
    }


TEXT: Text = (
    "{num_tokens} tokens replayed, drafts of up to {depth}; accepted per look-up (of drafted)",
    Table(
        "rows",
        "drafter: {drafter}; insert us/token: {first.insert_us_per_token:.2f}; look-up us: {later.lookup_us:.2f}; "
        "B/token: {first.bytes_per_token:.0f}; first visit: {first.accepted:.2f} ({first.drafted:.2f}); "
        "with history: {later.accepted:.2f} ({later.drafted:.2f})",
    ),
)


@dataclass(frozen=True, kw_only=True)
class LongRun:
    """The history of one engine in a run: `rl_steps` of `step_tokens` tokens, groups of `group_size` responses each.

    Prompts come again every `repeat_every` RL steps, None for never. `history_mib` is the drafter's, None without a
    bound. `recalled`: the driver holds the texts and tells them before a rollout, as `tltlab train` does; else the
    engine is on its own. In each RL step the first response of the first `probes` groups is drafted for, `depth` deep,
    before its siblings grow.
    """

    rl_steps: int
    step_tokens: int
    response_tokens: int
    group_size: int = 8
    repeat_every: int | None = None
    history_mib: float | None = 256.0
    recalled: bool = False
    probes: int = 2
    depth: int = 8

    @property
    def num_groups(self) -> int:
        return max(self.step_tokens // (self.response_tokens * self.group_size), 1)


def bench_history(run: LongRun, *, unbounded_steps: int = 12, progress: Progress = quiet) -> dict[str, Any]:
    """A long run's suffix history, problem by problem, each case in a process of its own, on made-up text.

    Prompts never repeat, or every `run.repeat_every` RL steps; histories are bounded by `run.history_mib` or, for the
    first `unbounded_steps` RL steps, not at all. Returns `settings` and `rows`. A row has `case`, `num_rl_steps`, per
    RL step `resident_mib` after it, `state_ms` (what a rollout's restart safety costs: the state without texts, as
    JSON) and `recall_ms`; `whole_state_ms` of the last state with all texts; `insert_us_per_token`; over the RL steps
    that the unbounded run did too the tokens `accepted` per draft, and `quality`, their ratio to the unbounded run's.
    The responses of a group grow side by side, groups one after the other, so what runs takes little. ConfigError.
    """
    for name in ("rl_steps", "step_tokens", "response_tokens", "group_size", "depth"):
        if getattr(run, name) < 1:
            raise ConfigError(f"{name} is {getattr(run, name)}, it must be at least 1")
    short = min(run.rl_steps, unbounded_steps)
    rows = []
    for name, every in (("never", None), (f"every {run.repeat_every}", run.repeat_every)):
        cases = [("unbounded", replace(run, history_mib=None, rl_steps=short)), ("bounded", run)]
        if every is not None:
            cases.append(("recalled", replace(run, recalled=True)))
        before: float | None = None
        for kind, case in cases:
            progress(f"prompts repeat {name}, {kind}: {case.rl_steps} RL steps of {case.step_tokens} tokens")
            row = alone(long_run, replace(case, repeat_every=every))
            row["accepted"] = sum(row["accepted"][:short]) / max(sum(row.pop("drafts")[:short]), 1)
            before = row["accepted"] if before is None else before
            row["quality"] = row["accepted"] / before if before else 1.0
            rows.append({"case": f"{name}, {kind}", **row})
    return {"settings": asdict(run), "unbounded_steps": short, "rows": rows}


def long_run(run: LongRun) -> dict[str, Any]:
    """One case of `bench_history` in this process."""
    from tltlab.runtime.engine.drafter_pool import DrafterPool

    drafter = SuffixDrafter(history_mib=run.history_mib)
    engine = DrafterPool({"suffix": drafter}, run.depth)
    engine.use([Strategy.chain("suffix", run.depth)])
    log: defaultdict[str, list[tuple[Key, Any, Any]]] = defaultdict(list)
    per_step: defaultdict[str, list[float]] = defaultdict(list)
    insert_s, num_inserted = 0.0, 0
    for rl_step in range(run.rl_steps):
        start = time.perf_counter()
        json.loads(json.dumps(engine.state_dict(history=False)))
        per_step["state_ms"].append((time.perf_counter() - start) * 1e3)
        visit, turn = (0, rl_step) if run.repeat_every is None else divmod(rl_step, run.repeat_every)
        names = [f"p{turn}-{group}" for group in range(run.num_groups)]
        if run.recalled:
            start = time.perf_counter()
            engine.recall([text for name in names for text in log[name]])
            per_step["recall_ms"].append((time.perf_counter() - start) * 1e3)
        drafter.begin(rl_step)
        drafts = accepted = 0
        for group, name in enumerate(names):
            prompt, texts = problem(turn * run.num_groups + group, visit, run.group_size, run.response_tokens)
            keys = [(rl_step, name, sample, 0) for sample in range(run.group_size)]
            num_probes = int(group < run.probes)
            start = time.perf_counter()
            for key in keys:
                drafter.open(key, prompt)
            insert_s += time.perf_counter() - start
            # Drafted for before there are siblings to draft from: what is accepted is history's, and its own text's.
            for key, text in zip(keys[:num_probes], texts, strict=False):
                num_drafts, num_accepted = _generate(drafter, key, text.tolist(), run.depth)
                drafts, accepted = drafts + num_drafts, accepted + num_accepted
            start = time.perf_counter()
            for at in range(0, run.response_tokens, CHUNK):
                for key, text in zip(keys[num_probes:], texts[num_probes:], strict=True):
                    drafter.extend(key, text[at : at + CHUNK])
                # Who searches has what grew put in first.
                drafter.propose(keys[-1], 1)
            insert_s += time.perf_counter() - start
            num_inserted += run.response_tokens * (run.group_size - num_probes)
            for key in keys:
                drafter.close(key)
            if run.recalled:
                log[name] += [(key, prompt, text) for key, text in zip(keys, texts, strict=True)]
                del log[name][: -(drafter.window or 0)]
        per_step["drafts"].append(drafts)
        per_step["accepted"].append(accepted)
        per_step["resident_mib"].append((resident_bytes() or 0) / 2**20)
    start = time.perf_counter()
    json.loads(json.dumps(engine.state_dict()))
    return {
        "num_rl_steps": run.rl_steps,
        "insert_us_per_token": insert_s / max(num_inserted, 1) * 1e6,
        "whole_state_ms": (time.perf_counter() - start) * 1e3,
        **per_step,
    }


def problem(number: int, visit: int, num_samples: int, response_tokens: int) -> tuple[Any, list[Any]]:
    """The prompt of a problem and what is answered at a visit, int32: its phrases, as `made_up` strings them."""
    base = np.random.default_rng([number])
    prompt = base.integers(0, 32_000, 256, np.int32)
    tokens, borders = base.integers(0, 32_000, 16_000, np.int32), base.choice(np.arange(1, 16_000), 999, False)
    phrases = np.split(tokens, np.sort(borders))
    rng = np.random.default_rng([number, 1 + visit])
    texts = []
    for _ in range(num_samples):
        num = response_tokens // 8 + 64
        picks = np.minimum(rng.zipf(1.3, num), len(phrases)) - 1
        stray, is_stray = rng.integers(0, 32_000, (num, 1), np.int32), rng.random(num) < 0.5
        parts = [part for n, pick in enumerate(picks) for part in (phrases[pick], stray[n][: int(is_stray[n])])]
        texts.append(np.resize(np.concatenate(parts), response_tokens))
    return prompt, texts


def _generate(drafter: Drafter, key: Key, text: Sequence[int], depth: int) -> tuple[int, int]:
    """Let a request generate `text`, a draft at a time; how many drafts there were and tokens of them accepted."""
    drafter.extend(key, text[:1])
    done, drafts, accepted = 1, 0, 0
    while done < len(text):
        draft = drafter.propose(key, min(depth, len(text) - done)).tokens
        num_accepted = next((n for n, token in enumerate(draft) if token != text[done + n]), len(draft))
        drafter.observe(key, len(draft), num_accepted)
        drafter.extend(key, text[done : done + num_accepted + 1])
        done, drafts, accepted = done + num_accepted + 1, drafts + 1, accepted + num_accepted
    return drafts, accepted


HISTORY_TEXT: Text = (
    "{settings.step_tokens} tokens per RL step, responses of {settings.response_tokens}, at most "
    "{settings.history_mib} MiB of history; accepted in the first {unbounded_steps} RL steps; means over RL steps",
    Table(
        "rows",
        "case: {case}; RL steps: {num_rl_steps}; most MiB: {resident_mib:max .0f}; state ms: {state_ms:.1f}; "
        "recall ms: {recall_ms:.1f}; with texts: {whole_state_ms:.0f}; insert us/token: {insert_us_per_token:.2f}; "
        "accepted: {accepted:.2f}; of unbounded: {quality:.1%}",
    ),
)
