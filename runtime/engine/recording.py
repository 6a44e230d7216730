"""A trace that an engine writes by itself, without a trainer of ours: `vllm_options(record=...)`.

A rollout is what runs between two moments of idleness, or, where requests carry keys, what carries one rl_step.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from datetime import UTC, datetime
from itertools import chain, count
from pathlib import Path
from typing import Any

from tltlab.drafters.base import Key
from tltlab.errors import ConfigError
from tltlab.traces.recorder import Recorder
from tltlab.traces.recording import recording_of
from tltlab.traces.schema import Manifest

from .control import Control, Live

_LARGEST = 2**31 - 1
"""Of the numbers in a key, as traces have them."""


def how_it_ended(finish_reason: str | None, num_tokens: int) -> str:
    """Which of `FINISH_REASONS` a trace has for vLLM's: what an engine ended by itself is a stop, what failed an abort.

    >>> how_it_ended("repetition", 7), how_it_ended("error", 7), how_it_ended("stop", 0)
    ('stop', 'abort', 'abort')
    """
    ended = {"stop": "stop", "length": "length", "repetition": "stop"}.get(finish_reason or "stop", "abort")
    return ended if num_tokens else "abort"


class LiveRecording:
    """Takes down what enters and leaves one engine; durable each time the engine falls idle, a trace once closed.

    A killed engine leaves a recording that `tltlab trace repair` finishes. Where something cannot be taken down or
    written the methods raise, and whoever calls them is to `give_up`. `policy_version` counts how often the prefix
    cache was reset, which trainers do after each weight update. Rewards and log-probs are not known here and stay null.
    """

    def __init__(self, path: str | Path, control: Control, *, model: str, hardware: str, engine: str) -> None:
        self.path = path
        self.control = control
        self.policy_version = 0
        self._visits: Counter[str] = Counter()
        self._epochs: dict[tuple[int, str], int] = {}
        self._arrived_s: dict[Key, float] = {}
        self._seen: set[Key] = set()
        self._written: Counter[str] = Counter()
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
        if self.control.live:
            return
        following = self.control.ledger.rl_step + bool(self._seen) if rl_step is None else rl_step
        if following != self.control.ledger.rl_step or not self._seen:
            self.flush()
            self.control.begin(following)
            self._written.clear()

    def arrived(self, live: Live) -> None:
        """A request has entered."""
        rl_step, prompt_id, _, _ = live.key
        epoch = self._epochs.get((rl_step, prompt_id))
        if epoch is None:
            epoch = self._epochs[rl_step, prompt_id] = self._visits[prompt_id]
            self._visits[prompt_id] += 1
        self._seen.add(live.key)
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
        tokens = list(live.output)
        self._append(
            "outcomes",
            live.key,
            response_tokens=len(tokens),
            finish_reason=how_it_ended(finish_reason, len(tokens)),
            worker=self.control.ledger.worker,
            t_submit=self._arrived_s.pop(live.key),
            t_first_token=self.control.ledger.first_token_s.get(live.key),
            t_finish=time.perf_counter() - self.control.ledger.origin,
        )
        versions = [self.policy_version] * len(tokens)
        self._append("tokens", live.key, prompt_token_ids=list(live.prompt), token_ids=tokens, token_versions=versions)

    def is_new(self, key: Key) -> bool:
        """Whether no request had this key before: a trace has one response to a key."""
        return key not in self._seen

    def can_have(self, key: Key) -> bool:
        """Whether a trace can have this key: its numbers fit. A prompt id that is no text is a ValueError."""
        rl_step, prompt_id, sample, turn = key
        prompt_id.encode()
        return all(0 <= number <= _LARGEST for number in (rl_step, sample, turn))

    def flush(self) -> None:
        """Make everything so far durable."""
        ledger = self.control.ledger
        for table, rows in (("iterations", ledger.iterations), ("decisions", ledger.decisions)):
            if new := rows[self._written[table] :]:
                self._recorder.append(table, new)
            self._written[table] = len(rows)
        self._recorder.flush()

    def close(self) -> None:
        """Write the trace."""
        self.control.end()
        self.flush()
        self._recorder.close()

    def give_up(self, error: BaseException) -> None:
        """Record nothing more after `error`. What was durable stays, for `tltlab trace repair`."""
        self.control.ledger.end()
        with contextlib.suppress(Exception):
            self._recorder.__exit__(type(error), error, error.__traceback__)

    def _append(self, table: str, key: Key, **columns: Any) -> None:
        rl_step, prompt_id, sample, turn = key
        self._recorder.append(
            table, [{"rl_step": rl_step, "prompt_id": prompt_id, "sample": sample, "turn": turn, **columns}]
        )


def _is_empty(place: Path) -> bool:
    return place.is_dir() and not any(place.iterdir())
