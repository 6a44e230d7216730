"""Seconds, processor seconds and peak memory of what users type: whole processes, by size of what is read.

An input is a trace of the repository, by its folder's name, or a number of RL steps: a CSV of lengths is made with 256
prompts x 8 responses in each, log-normal by group, growing over the run, cut at 32,768 tokens. Commands run in turn,
each in its own process, so that a busy machine slows all of them; `trace describe` of the same input is the base
that machines are compared by, and `--help` the floor that no command goes below.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bench.harness import Progress, Table, in_turn, quiet, ratio, shown
from tltlab.errors import ConfigError, did_you_mean
from tltlab.sim.study.jobs import cores

TRACES = Path(__file__).parents[2] / "traces"
FLOOR, BASE = "--help", "trace describe"
COMMANDS = {
    FLOOR: "--help",
    BASE: "trace describe INPUT --json",
    "trace validate": "trace validate INPUT --json",
    "trace import": "trace import INPUT WORKERS --out NEW --json",
    "simulate none": "simulate INPUT WORKERS --policy none --json",
    "simulate strategy": "simulate INPUT WORKERS ACCEPTANCE --strategy 4,1,5 --sd-threshold 32 --json",
    "simulate beg-mab": "simulate INPUT WORKERS ACCEPTANCE --policy beg-mab BLOCK --json",
    "compare": "compare INPUT WORKERS ACCEPTANCE --policies none,table,beg-mab BLOCK --json",
    "what-if": "what-if INPUT GPUS --json",
    "compare, grid": "compare INPUT POINTS --acceptance 0.6;0.8 --policies table --json",
    "tune": "tune INPUT WORKERS ACCEPTANCE --out NEW.json --json",
    "verify": "verify INPUT --json",
    "doctor": "doctor INPUT --json",
    "report": "report INPUT --out NEW.html --json",
    "timeline": "timeline INPUT --out NEW.png --json",
}
"""Command lines by name. INPUT is a path and NEW one that is not there yet; other capitals are options of an input."""
PROMPTS, GROUP, CAP = 256, 8, 32_768
SMALL = 24
"""Most RL steps of a CSV on which a bandit is simulated alone."""
SAMPLE_S = 0.02
_MARKS = ("VmRSS", "VmHWM")


@dataclass(frozen=True, kw_only=True)
class Input:
    """What commands read: `rl_steps` of a CSV that is made, None of a trace; `options` by their word in `COMMANDS`."""

    name: str
    path: Path
    rl_steps: int | None
    options: Mapping[str, str]

    def unfit(self, command: str) -> str | None:
        """Why a command does not apply; None where it does."""
        if command == "trace import" and self.rl_steps is None:
            return "it is a trace already"
        if command in ("verify", "timeline") and not (self.path / "iterations.parquet").exists():
            return "nothing in it was timed"
        if command == "simulate beg-mab" and self.rl_steps is not None and self.rl_steps > SMALL:
            return "a bandit decides for each worker by itself: minutes"
        return None

    def line(self, command: str, new: Path) -> list[str]:
        """Arguments of a command, `new` the path that it may write to."""
        words: list[str] = []
        for word in COMMANDS[command].split():
            paths = word.replace("INPUT", str(self.path)).replace("NEW", str(new))
            words += self.options[word].split() if word in self.options else [paths]
        return words


def bench_commands(
    sizes: Sequence[str],
    only: Sequence[str] = (),
    *,
    rounds: int = 3,
    timeout_s: float = 300.0,
    progress: Progress = quiet,
) -> dict[str, Any]:
    """A row per command and input, medians over rounds; the floor and the base always run.

    `wall_s` is what a user waits and `cpu_s` the user and system time of the process and of those that it waited for.
    `peak_bytes` is the largest sum of resident memory over the tree of processes, sampled every 20 ms, and never less
    than the high-water mark of one process; pages that processes share count once for each. `over_base` is the ratio of
    `wall_s` to that of `trace describe`. A command that takes longer than `timeout_s` is ended, has `more_than_s` in
    place of all that, and does not run again. `growth` has, between the smallest and the largest CSV, the exponents
    log(ratio) / log(ratio of RL steps) of `wall_s` and `peak_bytes`, start-up included, since it is waited for:
    a command that is linear in RL steps stays below 1. `left_out` says which commands an input is not for, and which
    failed, with the last line of what they wrote.
    ConfigError for a command or a size that there is not.
    """
    chosen = _chosen(only)
    with tempfile.TemporaryDirectory() as folder:
        inputs = {size: _input(size, Path(folder)) for size in sizes}
        left_out = [
            {"command": command, "input": name, "reason": reason}
            for name, source in inputs.items()
            for command in chosen
            if (reason := source.unfit(command))
        ]
        unfit = {(row["command"], row["input"]) for row in left_out}
        cases = [(FLOOR, "")] + [(c, name) for name in inputs for c in chosen if c != FLOOR and (c, name) not in unfit]
        numbers = count()
        ended: dict[tuple[str, str], dict[str, Any]] = {}

        def measure(case: tuple[str, str], number: int) -> dict[str, Any]:
            if case in ended:
                return ended[case]
            command, name = case
            new = Path(folder) / f"new-{next(numbers)}"
            found = measured(inputs[name].line(command, new) if name else [FLOOR], Path(folder), timeout_s)
            progress(f"{command} {name}: " + (found.get("reason") or f"{found['took_s']:.1f} s"))
            if "wall_s" not in found:
                ended[case] = found
            return found

        taken = in_turn(cases, measure, rounds, warm_up=0)
    left_out += [
        {"command": c, "input": name, "reason": e["reason"]} for (c, name), e in ended.items() if "reason" in e
    ]
    rows = [_row(case, taken[case], taken.get((BASE, case[1]))) for case in cases if "reason" not in taken[case][-1]]
    return {"rows": rows, "growth": _growth(rows, inputs), "left_out": left_out, "rounds": rounds, "cores": cores()}


def measured(arguments: Sequence[str], folder: Path, timeout_s: float) -> dict[str, Any]:
    """Run `tltlab` with these arguments in `folder`: `wall_s`, `cpu_s`, `peak_bytes` and `took_s`.

    In place of the first three there is `more_than_s` where it was ended, and `reason` where it failed.
    """
    over, ended, peak = threading.Event(), threading.Event(), 0
    with tempfile.TemporaryFile() as errors:
        began = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "tltlab", *arguments],
            cwd=folder, stdout=subprocess.DEVNULL, stderr=errors, stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

        def watch() -> None:
            nonlocal peak
            while not over.wait(SAMPLE_S):
                peak = max(peak, _resident_bytes(process.pid))
                if time.perf_counter() - began > timeout_s and not ended.is_set():
                    ended.set()
                    os.killpg(process.pid, signal.SIGKILL)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            _, status, used = os.wait4(process.pid, 0)
            took_s = time.perf_counter() - began
            process.returncode = os.waitstatus_to_exitcode(status)
        finally:
            over.set()
            watcher.join()
            with suppress(ProcessLookupError):  # also what outlives the command, after an interrupt the command itself
                os.killpg(process.pid, signal.SIGKILL)
        if ended.is_set():
            return {"more_than_s": timeout_s, "took_s": took_s}
        if process.returncode:
            errors.seek(0)
            last = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
            return {"reason": f"exit code {process.returncode}: {last}", "took_s": took_s}
    peak = peak or used.ru_maxrss * 1024  # where there is no /proc, the largest process
    return {"wall_s": took_s, "cpu_s": used.ru_utime + used.ru_stime, "peak_bytes": peak, "took_s": took_s}


def text(result: Mapping[str, Any]) -> str:
    """A table for people, what grows how, and what was left out and why."""
    rows = [
        row | {"seconds": f"> {row['more_than_s']:g}" if row["more_than_s"] else f"{row['wall_s']:.2f}"}
        for row in result["rows"]
    ]
    parts = (
        Table(
            "rows",
            "command: {command}; input: {input}; seconds: {seconds}; processor s: {cpu_s:.2f}; "
            "peak MB: {peak_bytes:1e-6*.0f}; over describe: {over_base:.2f}",
            left=2,
        ),
        Table(
            "growth", "growth: {command}; RL steps: {from}; to: {to}; time ~ n^: {wall:.2f}; memory ~ n^: {peak:.2f}"
        ),
        Table("left_out", "left out: {command}; input: {input}; why: {reason}", left=3),
        "{rounds} rounds, in turn, {cores} cores; median seconds, start-up included",
    )
    return shown({**result, "rows": rows}, parts)


def write_lengths(path: Path, rl_steps: int) -> None:
    """Write a CSV of lengths, as `trace import` reads it; the same rows each time."""
    rng = np.random.default_rng(7)
    frames = []
    for rl_step in range(rl_steps):
        location = np.log(2000 * (1 + rl_step / 200)) + rng.normal(0, 0.5, PROMPTS)
        prompts = rng.integers(80, 600, PROMPTS)
        lengths = np.exp(np.repeat(location, GROUP) + rng.normal(0, 0.8, PROMPTS * GROUP)).clip(1, CAP)
        columns = {"group": np.arange(PROMPTS), "prompt_len": prompts}
        frame = pd.DataFrame({name: np.repeat(values, GROUP) for name, values in columns.items()})
        frame.insert(0, "step", rl_step)
        frames.append(frame.assign(response_len=lengths.astype(int)))
    pd.concat(frames).to_csv(path, index=False)


def _chosen(only: Sequence[str]) -> list[str]:
    """Names in `COMMANDS`, each named by itself or, with others, by its first word; the floor and the base always."""
    names = {name: {command for command in COMMANDS if name in (command, command.split()[0])} for name in only}
    for name, found in names.items():
        if not found:
            known = list(dict.fromkeys(command.split()[0] for command in COMMANDS))
            raise ConfigError(
                f"--only: no command named {name!r}{did_you_mean(name, known)}; there are: {', '.join(known)}"
            )
    picked = set(COMMANDS) if not only else {FLOOR, BASE}.union(*names.values())
    return [command for command in COMMANDS if command in picked]


def _input(size: str, folder: Path) -> Input:
    """The trace of that name, or a CSV in `folder` of so many RL steps."""
    if size.isdecimal() and int(size):
        path = folder / f"lengths-{size}.csv"
        write_lengths(path, int(size))
        options = {
            "WORKERS": "--workers 64", "ACCEPTANCE": "--acceptance default", "BLOCK": "--decision-block 32",
            "GPUS": "--gpus 64xH100", "POINTS": "--workers 32,64",
        }  # fmt: skip
        return Input(name=size, path=path, rl_steps=int(size), options=options)
    known = sorted(manifest.parent.name for manifest in TRACES.glob("*/manifest.json"))
    if size not in known:
        raise ConfigError(
            f"--sizes: no trace named {size!r}{did_you_mean(size, known)}; there are: {', '.join(known)}, "
            "and numbers of RL steps from 1 on"
        )
    path = TRACES / size
    acceptance = "" if (path / "acceptance.json").exists() else "--acceptance default"
    options = {
        "WORKERS": "", "ACCEPTANCE": acceptance, "BLOCK": "", "GPUS": "--gpus 8xH100", "POINTS": "--workers 1,2",
    }  # fmt: skip
    return Input(name=size, path=path, rl_steps=None, options=options)


def _row(
    case: tuple[str, str], taken: Sequence[dict[str, Any]], base: Sequence[dict[str, Any]] | None
) -> dict[str, Any]:
    """Medians of what a command took; None in each where a round was ended."""
    whole = all("wall_s" in found for found in taken)

    def median(key: str) -> float:
        return float(np.median([found[key] for found in taken]))

    row: dict[str, Any] = {"command": case[0], "input": case[1] or None}
    row |= {key: median(key) if whole else None for key in ("wall_s", "cpu_s", "peak_bytes")}
    row["more_than_s"] = None if whole else max(found.get("more_than_s", 0.0) for found in taken)
    if not whole or base is None or not all("wall_s" in found for found in base):
        return row | {"over_base": None}
    above, below = ([found["wall_s"] for found in each] for each in (taken, base))
    return row | {"over_base": ratio(above, below)}


def _growth(rows: Sequence[dict[str, Any]], inputs: Mapping[str, Input]) -> list[dict[str, Any]]:
    """Exponents between the smallest and the largest CSV, of commands that have both."""
    sizes = sorted((source.rl_steps, name) for name, source in inputs.items() if source.rl_steps is not None)
    if len(sizes) < 2:
        return []
    (few, small), (many, large) = sizes[0], sizes[-1]
    at = {(row["command"], row["input"]): row for row in rows if row["wall_s"] is not None}
    grown = []
    for command in COMMANDS:
        below, above = at.get((command, small)), at.get((command, large))
        if below and above and many > few:
            wall, peak = (math.log(above[key] / below[key]) / math.log(many / few) for key in ("wall_s", "peak_bytes"))
            grown.append({"command": command, "from": few, "to": many, "wall": wall, "peak": peak})
    return grown


def _resident_bytes(pid: int) -> int:
    """Resident memory of a process and all below it: their sum, or the high-water mark of one of them if that is more.

    0 where there is no /proc, or the process is gone.
    """
    pids, resident, highest = [pid], 0, 0
    for one in pids:
        with suppress(OSError):
            for children in Path(f"/proc/{one}/task").glob("*/children"):
                pids += map(int, children.read_text().split())
            lines = Path(f"/proc/{one}/status").read_text().splitlines()
            values = (line.partition(":") for line in lines)
            kib = {key: int(value.split()[0]) for key, _, value in values if key in _MARKS}
            resident += kib.get("VmRSS", 0)
            highest = max(highest, kib.get("VmHWM", 0))
    return max(resident, highest) * 1024
