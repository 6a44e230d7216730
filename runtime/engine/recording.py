"""A trace that an engine writes by itself, without tltlab's trainer: `vllm_options(record=...)`.

Requests with keys have their RL step in the key; `Grouping` puts those without keys into RL steps.
"""

from __future__ import annotations

import atexit
import math
import os
import re
import sys
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from itertools import chain, count
from pathlib import Path
from threading import Event, Thread
from typing import Any, ClassVar, TypeVar

from tltlab.drafters.base import Key
from tltlab.errors import ConfigError, RunError
from tltlab.traces.recorder import Recorder
from tltlab.traces.schema import Manifest, Row, columns, is_trace, key_columns

from .control import Control
from .guard import FAULTS, Guard
from .requests import LiveRequest, Observer, RlStepEnd
from .tracker import NEWEST, Clock, EndedIterations, Iteration

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

_LARGEST = 2**31 - 1
"""Largest of the numbers in a key, as traces have them."""
_TOKEN_BYTES, _ROW_BYTES = 48, 1024
"""Approximate memory of a token and of a row that wait to be written."""
_CHUNK = 64
"""Iterations handed to the writing thread at a time."""

_Given = Mapping[str, Row] | EndedIterations
"""One row of each of some tables, or of the manifest, which become durable together; or iterations."""
_MANIFEST = "manifest"


def finish_reason_of(finish_reason: str | None, num_tokens: int) -> str:
    """Return the one of `FINISH_REASONS` for vLLM's reason: a repetition stop is a stop, a failure an abort.

    >>> [finish_reason_of(reason, 7) for reason in (None, "stop", "length", "repetition", "abort", "error", "of later")]
    ['stop', 'stop', 'length', 'stop', 'abort', 'abort', 'abort']
    >>> finish_reason_of("stop", 0)
    'abort'
    """
    ended = {"stop": "stop", "length": "length", "repetition": "stop"}.get(finish_reason or "stop", "abort")
    return ended if num_tokens else "abort"


BRINGS_WEIGHTS = re.compile(r"(update|load|receive|sync|finish)\w*_(weight|param|state_dict)")
"""Methods of vLLM's workers that load new weights or end such an update: `reload_weights`, not `init_weights`."""


class Grouping:
    """Grouping of requests without keys into RL steps, by what ends one.

    update: a weight update. call: the next `LLM.generate`, `chat` or `beam_search` of an offline program. gap: an idle
    gap longer than `GAP_S` and than `GAP_SHARE` of the RL step. Without a `rule` it is the first of these that the
    engine has seen.

    `version` counts weight updates. Several update calls with no progress between them are one update, and calls before
    the first request are none.
    """

    GAP_S: ClassVar[float] = 1.0
    GAP_SHARE: ClassVar[float] = 0.1

    def __init__(self, clock: Clock, rule: RlStepEnd | None):
        self.version = 0
        self._given = rule
        self._is_offline = self._is_called = False
        self._clock = clock
        self._start_s = self._leave_s = -math.inf
        self._version_before = 0
        self._progress = 0

    def updated(self, progress: int) -> bool:
        """Note an update call after `progress` requests and tokens; return True if it is another update."""
        if progress == self._progress:
            return False
        self._progress = progress
        self.version += 1
        return True

    def left(self) -> None:
        """Note that a request has left."""
        self._leave_s = self._clock()

    def called(self) -> None:
        """Note a call of an offline program, before its requests, while the engine is idle."""
        self._is_offline = self._is_called = True

    @property
    def rule(self) -> RlStepEnd:
        return self._given or ("update" if self.version else "call" if self._is_offline else "gap")

    def ends(self, busy: bool) -> bool:
        """Return True if the request arriving now, in an engine that may be `busy`, belongs to another RL step."""
        if self.rule == "update":
            return self.version != self._version_before
        if busy or self.rule == "call":
            return self._is_called and not busy
        return self._clock() - self._leave_s > max(self.GAP_S, self.GAP_SHARE * (self._leave_s - self._start_s))

    def begin(self) -> None:
        """Begin an RL step."""
        self._start_s = self._leave_s = self._clock()
        self._version_before = self.version
        self._is_called = False

    @property
    def notes(self) -> str:
        """How requests without keys were put into RL steps, for users."""
        what = {
            "update": "a weight update, or the prefix cache being reset",
            "call": "the next call of LLM.generate, chat or beam_search",
            "gap": f"an idle gap longer than {self.GAP_S:g} s and {self.GAP_SHARE:.0%} of it",
        }
        return f"recorded by the engine itself; an RL step of requests without keys ends with {what[self.rule]}"


class Newest(dict[_Key, _Value]):
    """The `most` newest entries."""

    def __init__(self, most: int):
        self._most = most

    def put(self, key: _Key, value: _Value) -> tuple[_Key, _Value] | None:
        """Make an entry the newest one; return the oldest, which goes where there are too many."""
        self.pop(key, None)
        self[key] = value
        if len(self) <= self._most:
            return None
        oldest = next(iter(self))
        return oldest, self.pop(oldest)


class LiveRecording(Observer):
    """Recording of one engine's requests and iterations, written by a thread; a trace once closed.

    Events are durable after `flush_s` at the latest, after about a second where the engine has fallen idle, and earlier
    where more than `flush_bytes` wait. The engine never waits for the disk: where more than `most_bytes` wait, or the
    disk is full or the folder gone, the recording logs that once and has `ended`; durable rows stay. Methods called
    after the end do nothing; calls from an engine go through its `guard`. ConfigError where no recording can be
    made.

    The thread closes the recording at the latest when its process ends; a forked process has no part in it. Requests
    then under way are aborted ones. An RL step never begins again: late requests have the times of their own RL step
    and run in the iterations of the newest. Rewards and log-probs are unknown here and stay null. Only the newest
    `remembered` prompts and keys are kept: visits of other prompts count from 0 again, and other keys are taken for
    used.
    """

    flush_s: ClassVar[float] = 5.0
    idle_s: ClassVar[float] = 1.0
    flush_bytes: ClassVar[int] = 16 << 20
    most_bytes: ClassVar[int] = 256 << 20
    close_s: ClassVar[float] = 40.0
    finish_s: ClassVar[float] = 600.0
    remembered: ClassVar[int] = 1 << 18

    def __init__(
        self,
        path: str | Path,
        control: Control,
        *,
        model: str,
        hardware: str,
        engine: str,
        rl_step_ends: RlStepEnd | None = None,
    ):
        self.control = control
        self.guard = Guard(
            f"the recording {path} ends here, and the engine continues:",
            f"durable rows stay in {path}",
            self.give_up,
        )
        self.ended = False
        # Requests and iterations have their times by the tracker's.
        self._clock: Clock = lambda: control.tracker.clock()
        self._grouping = Grouping(self._clock, rl_step_ends)
        self._start_s = self._clock()
        self._origins: dict[int, float] = {}
        self._updates_drafter = False
        self._num_arrived = self._num_tokens = 0
        self._visits = Newest[str, int](self.remembered)
        self._epochs = Newest[tuple[int, str], int](self.remembered)
        self._keys = Newest[Key, None](self.remembered)
        self._forgotten_rl_step = -1
        # Only the engine's thread adds to `_queued_bytes`.
        self._queue: deque[tuple[_Given, int]] = deque()
        self._without_iterations: tuple[int, ...] = ()
        self._queued_bytes = self._durable_bytes = 0
        self._is_idle = self._is_closing = False
        self._wake, self._durable = Event(), Event()
        self._process = os.getpid()
        self.path = Path(path)
        self._recorder = Recorder(
            path,
            Manifest(
                kind="recorded",
                name=Path(path).name,
                created=datetime.now(UTC).isoformat(timespec="milliseconds"),
                model=Path(model).name,
                hardware=hardware,
                engine=engine,
                num_workers=control.tracker.worker + 1,
                source="tltlab",
                notes=self._grouping.notes,
                drafters=control.drafters.registry.own,
                without_iterations=(),
            ),
        )
        self._thread = Thread(target=self._write_on, name="tltlab-recording", daemon=True)
        self._thread.start()
        control.observers += (self,)
        # Before threads end: closing needs the writing thread, also for an engine that is only deleted at exit.
        atexit.register(self.close)

    @classmethod
    def numbered(cls, path: str | Path, control: Control, **labels: Any) -> LiveRecording:
        """Open a recording at the first of PATH, PATH-1, PATH-2, ... where there is nothing yet.

        Independent engines, of one process or several, in turn or at once, each get their own.
        """
        first = Path(path)
        for place in chain([first], (first.with_name(f"{first.name}-{n}") for n in count(1))):
            is_empty = place.is_dir() and not any(place.iterdir())
            if place.is_symlink() or (place.exists() and not is_empty):
                continue
            try:
                return cls(place, control, **labels)
            except ConfigError:
                if not is_trace(place):
                    raise
        raise AssertionError("numbers do not end")

    def arrives(self, rl_step: int | None) -> None:
        """Announce a request, with the rl_step of its key if it has one; it may begin a rollout."""
        self._is_idle = False
        newest = self.control.tracker.rl_step
        if not self._origins:
            self._begin(newest if rl_step is None else rl_step)
        elif rl_step is None:
            if self._grouping.ends(bool(self.control.live)):
                self._begin(newest + 1)
        elif rl_step > newest:
            self._begin(rl_step)
        elif rl_step not in self._origins:
            self._origins[rl_step] = self._clock()
            self._has_no_iterations(rl_step)

    def _has_no_iterations(self, rl_step: int) -> None:
        self._without_iterations += (rl_step,)
        self._give({_MANIFEST: {"without_iterations": self._without_iterations}})

    def _end_rollout(self) -> None:
        """End the rollout's last iteration at its own end, and hand over all rows."""
        self.control.end_iteration()
        self.control.tracker.end()
        self._hand_over()

    def _begin(self, rl_step: int) -> None:
        """Begin the rollout of an RL step; requests of the previous one may still run."""
        tracker = self.control.tracker
        if self._origins and not tracker.num_scheduled:
            # All its requests continue in the iterations of the next RL step.
            self._has_no_iterations(tracker.rl_step)
        self._end_rollout()
        self.control.begin(rl_step)
        self._grouping.begin()
        self._origins[rl_step] = tracker.origin
        row = columns(
            "steps",
            rl_step=rl_step,
            t_start=tracker.origin - self._start_s,
            policy=self.control.policy_name,
            policy_version=self._grouping.version,
        )
        self._give({"steps": row})

    def new_weights(self, method: str | None = None) -> None:
        """Note new weights: `method` was called on all of the engine's workers, or None for indirect evidence.

        None stands for a reset of the prefix cache, which trainers do after an update, and for a new version of the
        weights.
        """
        if method == "start_draft_weight_update":
            self._updates_drafter = True
        if method is not None and (self._updates_drafter or not BRINGS_WEIGHTS.search(method)):
            self._updates_drafter &= method != "finish_weight_update"
            return
        lives = self.control.live.values()
        before = self._grouping.notes
        if self._grouping.updated(self._num_arrived + self._num_tokens + sum(len(live.output) for live in lives)):
            for live in lives:
                live.updates.append(len(live.output))
            self._note_change(before)

    def called(self) -> None:
        """Note a call of an offline program, which adds its requests next."""
        if not self.control.live:
            before = self._grouping.notes
            self._grouping.called()
            self._note_change(before)

    def _note_change(self, before: str) -> None:
        if self._grouping.notes != before:
            self._give({_MANIFEST: {"notes": self._grouping.notes}})

    def arrived(self, live: LiveRequest) -> None:
        live.version = self._grouping.version
        rl_step, prompt_id, _, _ = live.key
        epoch = self._epochs.get((rl_step, prompt_id))
        if epoch is None:
            epoch = self._visits.get(prompt_id, 0)
            self._visits.put(prompt_id, epoch + 1)
            self._epochs.put((rl_step, prompt_id), epoch)
        if (oldest := self._keys.put(live.key, None)) is not None:
            self._forgotten_rl_step = max(self._forgotten_rl_step, oldest[0][0])
        self._num_arrived += 1
        row = columns(
            "workload",
            **key_columns(live.key),
            epoch=epoch,
            prompt_tokens=live.num_prompt_tokens,
            max_response_tokens=live.max_response_tokens,
            policy_version=live.version,
        )
        self._give({"workload": row})

    def left(self, live: LiveRequest, reason: str | None) -> None:
        self._grouping.left()
        self._num_tokens += len(live.output)
        live.ended = live.ended or (reason, self._clock())
        # A copy: vLLM moves the output of a session's turn into its next prompt.
        live.output = list(live.output)

    def landed(self, live: LiveRequest) -> None:
        assert live.ended is not None
        tokens, origin, key = list(live.output[: live.kept]), self._origins[live.key[0]], key_columns(live.key)
        reason, end_s = live.ended
        versions: list[int] = []
        for version, until in enumerate([*live.updates, len(tokens)], live.version):
            versions += [version] * (min(until, len(tokens)) - len(versions))
        outcome = columns(
            "outcomes",
            **key,
            response_tokens=len(tokens),
            finish_reason=finish_reason_of(reason, len(tokens)),
            worker=self.control.tracker.worker,
            t_submit=live.arrived_s - origin,
            t_first_token=None if live.first_token_s is None or not tokens else live.first_token_s - origin,
            t_finish=end_s - origin,
            discarded_tokens=max(live.computed - len(tokens), 0),
        )
        prompt = list(live.prompt)
        text = columns("tokens", **key, prompt_token_ids=prompt, token_ids=tokens, token_versions=versions)
        self._give({"outcomes": outcome, "tokens": text}, len(prompt) + len(tokens))

    def returned(self) -> None:
        if len(self.control.tracker.ended) >= NEWEST + _CHUNK:
            self._hand_over(NEWEST)

    def idle(self) -> None:
        self._hand_over()
        self._is_idle = True

    def is_new(self, key: Key) -> bool:
        """Return True if no request had this key before: a trace has one response per key."""
        return key not in self._keys and key[0] > self._forgotten_rl_step

    def can_have(self, key: Key) -> bool:
        """Return True if the key's numbers fit a trace. A prompt id that is no text is a ValueError."""
        rl_step, prompt_id, sample, turn = key
        prompt_id.encode()
        return all(0 <= number <= _LARGEST for number in (rl_step, sample, turn))

    def close(self) -> None:
        """Write the trace: wait at most `close_s` for the disk, then for the trace to be made.

        May be called again, also after an interruption.
        """
        if self._process != os.getpid() or sys.is_finalizing():
            return
        try:
            if not (self.ended or self._is_closing):
                self.control.land(list(self.control.departing))
                for live in self.control.live.values():
                    # A copy: the request itself may continue.
                    under_way = replace(live)
                    self.left(under_way, "abort")
                    self.landed(under_way)
                self._end_rollout()
            self._is_closing = True
            self._wake.set()
            if not self._durable.wait(self.close_s):
                self._fail(f"the disk has not answered for {self.close_s:g} s")
            self._thread.join(0.0 if self.ended else self.finish_s)
            if self._thread.is_alive():
                self._fail(f"no trace was written within {self.finish_s:g} s")
        except FAULTS as error:  # a disk error or a bug here must not end the engine's process
            self._fail(error)
        atexit.unregister(self.close)

    def give_up(self) -> None:
        """Record nothing more. Earlier events become durable and stay. Raises nothing."""
        if self.ended:
            return
        with suppress(*FAULTS):
            self.control.land(list(self.control.departing))
        with suppress(*FAULTS):
            self._end_rollout()
        self._stop()

    def _stop(self) -> None:
        self.ended = True
        self.control.observers = tuple(each for each in self.control.observers if each is not self)
        self._wake.set()

    def _hand_over(self, keep: int = 0) -> None:
        drained = self.control.tracker.drain(keep)
        if drained.ended:
            self._give(drained, num_bytes=sum(_ROW_BYTES + 8 * len(it.drafted) for it in drained.ended))

    def _give(self, item: _Given, num_tokens: int = 0, *, num_bytes: int = _ROW_BYTES) -> None:
        num_bytes += _TOKEN_BYTES * num_tokens
        if self.ended:
            return
        self._queue.append((item, num_bytes))
        self._queued_bytes += num_bytes
        waiting_bytes = self._queued_bytes - self._durable_bytes
        if waiting_bytes > self.most_bytes:
            self._fail(f"the disk does not keep up, {waiting_bytes >> 20} MiB wait to be written")
            self._queue.clear()
        elif waiting_bytes > self.flush_bytes and not self._wake.is_set():
            self._wake.set()

    def _write_on(self) -> None:
        """Write waiting items at intervals, in the thread, until the recording ends or closes; then finish it."""
        try:
            flushed_s = time.monotonic()
            while not (self._is_closing or self.ended):
                is_full = self._wake.wait(self.idle_s)
                self._wake.clear()
                now_s = time.monotonic()
                if not self.ended and (is_full or self._is_idle or now_s - flushed_s >= self.flush_s):
                    self._write()
                    flushed_s = now_s
            if not self.ended:
                self._write()
                self._durable.set()
                self._recorder.close()
                self._stop()
                return
        except FAULTS as error:  # the engine keeps serving after any error here
            self._fail(error)
        ended = RunError("the recording has ended")
        with suppress(*FAULTS):
            self._append_waiting()
        with suppress(*FAULTS):
            self._recorder.__exit__(type(ended), ended, None)
        self._durable.set()

    def _write(self) -> None:
        num_bytes = self._append_waiting()
        self._recorder.flush()
        self._durable_bytes += num_bytes

    def _append_waiting(self) -> int:
        num_bytes = 0
        rows: defaultdict[str, list[Row]] = defaultdict(list)
        ended: defaultdict[tuple[int, int, float], list[Iteration]] = defaultdict(list)
        # Items that come meanwhile wait for the next flush: a fast engine would never leave the queue empty.
        for _ in range(len(self._queue)):
            try:
                item, size = self._queue.popleft()
            except IndexError:  # the engine has cleared the queue meanwhile
                break
            num_bytes += size
            if isinstance(item, EndedIterations):
                ended[item.rl_step, item.worker, item.origin] += item.ended
                continue
            for name, row in item.items():
                rows[name].append(row)
        for rollout, iterations in ended.items():
            tables = EndedIterations(*rollout, iterations).tables()
            for name, table in zip(("iterations", "decisions"), tables, strict=True):
                self._recorder.append(name, table)
        for fields in rows.pop(_MANIFEST, []):
            self._recorder.set_manifest(**fields)
        for name, table_rows in rows.items():
            self._recorder.append(name, table_rows)
        return num_bytes

    def _fail(self, why: BaseException | str) -> None:
        """End the recording where it is; the log has the reason."""
        self._stop()
        self.guard.fail(f"RunError: {why}" if isinstance(why, RunError) else why)
