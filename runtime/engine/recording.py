"""A trace that an engine writes by itself, without a trainer of ours: `vllm_options(record=...)`.

A rollout is what runs between two moments of idleness, or, where requests carry keys, what carries one rl_step.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections import deque
from datetime import UTC, datetime
from itertools import chain, count
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any, ClassVar

from tltlab.drafters.base import Key
from tltlab.errors import ConfigError, RunError
from tltlab.traces.recorder import Recorder
from tltlab.traces.recording import recording_of
from tltlab.traces.schema import Manifest

from .control import Control, Live
from .ledger import Over, Row
from .seat import raised_at

logger = logging.getLogger(__name__)

_LARGEST = 2**31 - 1
"""Of the numbers in a key, as traces have them."""
_TOKEN_BYTES, _ROW_BYTES = 48, 1024
"""What a token and a row that wait to be written take of memory, about."""
_TOGETHER = 64
"""Iterations that are handed to the thread that writes at a time."""


def how_it_ended(finish_reason: str | None, num_tokens: int) -> str:
    """Which of `FINISH_REASONS` a trace has for vLLM's: what an engine ended by itself is a stop, what failed an abort.

    >>> how_it_ended("repetition", 7), how_it_ended("error", 7), how_it_ended("stop", 0)
    ('stop', 'abort', 'abort')
    """
    ended = {"stop": "stop", "length": "length", "repetition": "stop"}.get(finish_reason or "stop", "abort")
    return ended if num_tokens else "abort"


class LiveRecording:
    """Takes down what enters and leaves one engine, for a thread that writes it; a trace once closed.

    What happened is durable `flush_s` later at the latest, about a second later where the engine has fallen idle, and
    earlier where more than `flush_bytes` wait. The engine never waits for the disk: where it does not keep up, so that
    more than `most_bytes` wait, where it is full or the folder is gone, the recording says so once and has `ended`, and
    what is durable stays. Methods called after the end do nothing; an error of ours they raise, and whoever calls them
    is to `give_up`. ConfigError where a recording is at `path` already, or none can be made.

    `policy_version` counts how often the prefix cache was reset, which trainers do after each weight update. Rewards
    and log-probs are not known here and stay null. Of prompts and keys `remembered` are remembered, the newest ones:
    visits of others count from 0 again, and their keys are taken for used.
    """

    flush_s: ClassVar[float] = 5.0
    idle_s: ClassVar[float] = 1.0
    flush_bytes: ClassVar[int] = 16 << 20
    most_bytes: ClassVar[int] = 256 << 20
    close_s: ClassVar[float] = 40.0
    remembered: ClassVar[int] = 1 << 18

    def __init__(self, path: str | Path, control: Control, *, model: str, hardware: str, engine: str) -> None:
        self.control = control
        self.policy_version = 0
        self.ended = False
        self._visits: dict[str, int] = {}
        self._epochs: dict[tuple[int, str], int] = {}
        self._arrived_s: dict[Key, float] = {}
        self._seen: dict[Key, None] = {}
        self._forgotten_rl_step = -1
        self._waiting: deque[tuple[Over | tuple[str, Row], int]] = deque()
        self._given = self._written = 0
        self._is_idle = self._closing = False
        self._wake, self._ending = Event(), Lock()
        self.path = Path(path)
        self._recorder = Recorder(
            path,
            Manifest(
                kind="recorded",
                name=Path(path).name,
                created=datetime.now(UTC).isoformat(timespec="seconds"),
                model=Path(model).name,
                hardware=hardware,
                engine=engine,
                num_workers=control.ledger.worker + 1,
                source="tltlab",
                notes="recorded by the engine itself: a rollout is what ran between two moments of idleness, unless "
                "requests carried keys",
            ),
        )
        self._thread = Thread(target=self._write_on, name="tltlab-recording", daemon=True)
        self._thread.start()

    @classmethod
    def numbered(cls, path: str | Path, control: Control, **who: str) -> LiveRecording:
        """The same at the first of PATH, PATH-1, PATH-2, ... where there is nothing yet.

        Engines that know nothing of each other, of one process or several, in turn or at once, each get one.
        """
        first = Path(path)
        for place in chain([first], (first.with_name(f"{first.name}-{n}") for n in count(1))):
            if recording_of(place).exists() or place.is_symlink() or (place.exists() and not _is_empty(place)):
                continue
            try:
                return cls(place, control, **who)
            except ConfigError:
                if not recording_of(place).exists():
                    raise
        raise AssertionError("numbers do not end")

    def arrives(self, rl_step: int | None) -> None:
        """A request is about to enter, with the rl_step of its key if it has one; an idle engine begins a rollout."""
        self._is_idle = False
        if self.control.live:
            return
        following = self.control.ledger.rl_step + bool(self._seen) if rl_step is None else rl_step
        if following != self.control.ledger.rl_step or not self._seen:
            self._hand_over()
            self.control.begin(following)

    def arrived(self, live: Live) -> None:
        """A request has entered."""
        rl_step, prompt_id, _, _ = live.key
        epoch = self._epochs.get((rl_step, prompt_id))
        if epoch is None:
            # The newest last.
            epoch = self._visits.pop(prompt_id, 0)
            self._visits[prompt_id] = epoch + 1
            self._epochs[rl_step, prompt_id] = epoch
            if len(self._visits) > self.remembered:
                del self._visits[next(iter(self._visits))]
            if len(self._epochs) > self.remembered:
                del self._epochs[next(iter(self._epochs))]
        self._seen[live.key] = None
        if len(self._seen) > self.remembered:
            oldest = next(iter(self._seen))
            del self._seen[oldest]
            self._forgotten_rl_step = max(self._forgotten_rl_step, oldest[0])
        self._arrived_s[live.key] = time.perf_counter() - self.control.ledger.origin
        self._append(
            "workload",
            live.key,
            epoch=epoch,
            prompt_tokens=len(live.prompt),
            max_response_tokens=live.max_response_tokens,
            policy_version=self.policy_version,
        )

    def left(self, live: Live, finish_reason: str | None) -> None:
        """A request has left, for good; None where it did not say why."""
        tokens, prompt, ledger = list(live.output), list(live.prompt), self.control.ledger
        self._append(
            "outcomes",
            live.key,
            response_tokens=len(tokens),
            finish_reason=how_it_ended(finish_reason, len(tokens)),
            worker=ledger.worker,
            t_submit=self._arrived_s.pop(live.key),
            t_first_token=ledger.first_token_s.pop(live.key, None),
            t_finish=time.perf_counter() - ledger.origin,
        )
        versions = [self.policy_version] * len(tokens)
        self._append("tokens", live.key, prompt_token_ids=prompt, token_ids=tokens, token_versions=versions)

    def iterated(self) -> None:
        """An iteration is over, or will be with the next one."""
        if self.control.ledger.num_over >= _TOGETHER:
            self._hand_over()

    def idle(self) -> None:
        """Nothing is left to run."""
        self._hand_over()
        self._is_idle = True

    def is_new(self, key: Key) -> bool:
        """Whether no request had this key before: a trace has one response to a key."""
        return key not in self._seen and key[0] > self._forgotten_rl_step

    def can_have(self, key: Key) -> bool:
        """Whether a trace can have this key: its numbers fit. A prompt id that is no text is a ValueError."""
        rl_step, prompt_id, sample, turn = key
        prompt_id.encode()
        return all(0 <= number <= _LARGEST for number in (rl_step, sample, turn))

    def close(self) -> None:
        """Write the trace; waits until the disk has what waits, at most `close_s`."""
        try:
            if not self.ended:
                self.control.end()
                self._hand_over()
            self._closing = True
            self._wake.set()
            if not sys.is_finalizing():  # threads are gone then, and none is to be waited for
                self._thread.join(self.close_s)
                if self._thread.is_alive():
                    self._end(f"the disk has not answered for {self.close_s:g} s")
            if not self.ended:
                self._write()
                self._recorder.close()
                self.ended = True
        except Exception as error:  # whatever the disk does, or a bug of ours: the engine's process goes on
            self._end(error)

    def give_up(self, error: Exception) -> None:
        """Record nothing more after `error`. What happened before it becomes durable and stays."""
        self._hand_over()
        self._end(error)

    def _append(self, table: str, key: Key, **columns: Any) -> None:
        rl_step, prompt_id, sample, turn = key
        row = {"rl_step": rl_step, "prompt_id": prompt_id, "sample": sample, "turn": turn, **columns}
        tokens = len(columns["token_ids"]) + len(columns["prompt_token_ids"]) if table == "tokens" else 0
        self._give((table, row), _ROW_BYTES + _TOKEN_BYTES * tokens)

    def _hand_over(self) -> None:
        over = self.control.ledger.take()
        if over.passed:
            self._give(over, sum(_ROW_BYTES + 8 * len(it.drafted) for it in over.passed))

    def _give(self, what: Over | tuple[str, Row], num_bytes: int) -> None:
        """Leave something to the thread that writes."""
        if self.ended:
            return
        self._waiting.append((what, num_bytes))
        self._given += num_bytes
        waiting = self._given - self._written
        if waiting > self.most_bytes:
            self._waiting.clear()
            self._end(f"the disk does not keep up, {waiting >> 20} MiB wait to be written")
        elif waiting > self.flush_bytes and not self._wake.is_set():
            self._wake.set()

    def _write_on(self) -> None:
        """Write what waits, now and then, until the recording ends or closes."""
        flushed_s = time.monotonic()
        while not (self._closing or self.ended):
            is_full = self._wake.wait(self.idle_s)
            self._wake.clear()
            if self.ended:
                break
            now_s = time.monotonic()
            if is_full or self._is_idle or now_s - flushed_s >= self.flush_s:
                try:
                    self._write()
                except Exception as error:  # whatever it is, others are being served
                    self._end(error)
                flushed_s = now_s
        if self.ended:
            ended = RunError("the recording has ended")
            with contextlib.suppress(Exception):
                self._append_waiting()
                self._recorder.__exit__(type(ended), ended, None)

    def _write(self) -> None:
        """Make durable what waits. Not in two threads at a time."""
        num_bytes = self._append_waiting()
        self._recorder.flush()
        self._written += num_bytes

    def _append_waiting(self) -> int:
        num_bytes = 0
        rows: dict[str, list[Row]] = {}
        while self._waiting:
            what, size = self._waiting.popleft()
            num_bytes += size
            if isinstance(what, Over):
                iterations, decisions = what.rows()
                rows.setdefault("iterations", []).extend(iterations)
                rows.setdefault("decisions", []).extend(decisions)
            else:
                rows.setdefault(what[0], []).append(what[1])
        for table, of_table in rows.items():
            self._recorder.append(table, of_table)
        return num_bytes

    def _end(self, why: str | Exception) -> None:
        with self._ending:
            if self.ended:
                return
            self.ended = True
        if isinstance(why, Exception):
            at = "" if isinstance(why, RunError) else f" ({raised_at(why)})"
            why = f"{type(why).__name__}: {why}{at}"
        logger.error(
            "the recording %s ends here, and the engine goes on: %s; what is durable stays in %s",
            *(self.path, why, recording_of(self.path)),
        )
        self._wake.set()


def _is_empty(place: Path) -> bool:
    return place.is_dir() and not any(place.iterdir())
