"""What happened in a run besides its steps, as lines of JSON: `events.jsonl`."""

from __future__ import annotations

import json
import os
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


class RunEvents:
    """Appends a line to `path` for each event, at once, so that a run that is killed has told all it knew.

    Every line has `time` (ISO 8601, UTC), `rl_step` (the step under way) and `event`, a sentence; what else there is
    depends on it. A disk that is full costs the line, not the run. Safe to use from several threads.

    >>> RunEvents(Path("run/events.jsonl")).note("the trainer of worker 1 died", worker=1)          # doctest: +SKIP
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.rl_step = 0
        self._lock = threading.Lock()
        self._untold: list[str] = []

    def note(self, sentence: str, **fields: Any) -> None:
        """Something that whoever watches the run should know."""
        with self._lock:
            self._untold.append(sentence)
        self.record(sentence, **fields)

    def record(self, sentence: str, **fields: Any) -> None:
        """Something for the file alone."""
        row = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "rl_step": self.rl_step, "event": sentence}
        line = (json.dumps(row | fields) + "\n").encode()
        with self._lock:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
                try:
                    # One write in append mode: no line ends up inside another.
                    end = os.fstat(file).st_size
                    if os.write(file, line) < len(line):
                        os.ftruncate(file, end)
                finally:
                    os.close(file)
            except OSError:
                return

    def take(self) -> list[str]:
        """The sentences noted since the last call."""
        with self._lock:
            untold, self._untold = self._untold, []
        return untold
