"""The drafter in service: its weights, their age, and the canaries' verdicts on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tltlab.coordination.canary import Verdict
from tltlab.errors import ConfigError, one_line
from tltlab.runtime.engine.drafter_pool import DrafterReport
from tltlab.runtime.ray.actors import get
from tltlab.runtime.run.state import RunEvents

from .heads.head import host_copies

WEIGHTS = "drafter.safetensors"
TRAINING = "drafter_training.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedDrafter:
    """The drafter that engines use since RL step `published`, after `updates` updates and `swaps` swaps of weights.

    `weights` are by the names that vLLM loads, and `training` is a reference to the state that trainers continue from,
    both None for the head that the run began with. `predicted`: the acceptance rate by draft position.
    """

    updates: int = 0
    swaps: int = 0
    published: int = 0
    predicted: Sequence[float] = ()
    weights: Mapping[str, Tensor] | None = None
    training: Any = None

    def state_dict(self, folder: Path) -> dict[str, Any]:
        """Return all but tensors, as JSON types; tensors go into two files in `folder`, which is made."""
        if self.weights is not None:
            folder.mkdir(exist_ok=True)
            for name, tensors in ((WEIGHTS, self.weights), (TRAINING, get(self.training))):
                save_file(host_copies(tensors), folder / name)
        return {
            "updates": self.updates,
            "swaps": self.swaps,
            "published": self.published,
            "predicted": list(self.predicted),
            "in_service": self.weights is not None,
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any], folder: Path | None) -> ServedDrafter:
        """Restore the drafter of `state`. ConfigError where its files are missing or damaged."""
        numbers = {name: state[name] for name in ("updates", "swaps", "published", "predicted")}
        if not state["in_service"]:
            return cls(**numbers)
        assert folder is not None
        try:
            weights, training = load_file(folder / WEIGHTS), load_file(folder / TRAINING)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{folder} does not hold the checkpoint's drafter: {one_line(error)[:200]}") from error
        return cls(**numbers, weights=weights, training=ray.put(training))


class CanaryWatch:
    """The canaries of a run's engines for the drafter `name`: each verdict reported once, and its acceptance."""

    def __init__(self, name: str, events: RunEvents) -> None:
        self.name, self.events = name, events
        self.accept_length: float | None = None
        """Tokens per draft in the last rollout, the bonus token included, and the number of its drafts."""
        self.drafts = 0
        self._verdicts: dict[int, tuple[Verdict, ...]] = {}
        self._counts: dict[int, tuple[int, int, int]] = {}

    def look(self, reports: Sequence[DrafterReport]) -> bool:
        """Report new verdicts in the reports of all workers; return True if all of them trust the drafter."""
        for worker, report in enumerate(reports):
            for verdict in report.verdicts:
                if verdict not in self._verdicts.get(worker, ()):
                    report_verdict = self.events.record if verdict.kind == "fine" else self.events.note
                    report_verdict(f"worker {worker}: {verdict.sentence}", worker=worker, verdict=asdict(verdict))
            self._verdicts[worker] = report.verdicts
        return all(report.trusted for report in reports)

    def rollout_ended(self, reports: Sequence[DrafterReport]) -> None:
        """Process the reports, and compute the acceptance of the rollout that has just ended."""
        self.look(reports)
        drafts = kept = 0
        for worker, report in enumerate(reports):
            positions = report.positions.get(self.name)
            counts = (report.updates, sum(positions.drafted[:1]), sum(positions.kept)) if positions else (0, 0, 0)
            earlier = self._counts.get(worker, (0, 0, 0))
            # A restarted engine counts from 0.
            base = earlier if earlier[0] == counts[0] and earlier[1] <= counts[1] else (counts[0], 0, 0)
            drafts, kept = drafts + counts[1] - base[1], kept + counts[2] - base[2]
            self._counts[worker] = counts
        self.accept_length, self.drafts = (1 + kept / drafts if drafts else None), drafts

    def state_dict(self) -> dict[str, Any]:
        return {
            "seen": {str(worker): list(counts) for worker, counts in self._counts.items()},
            "verdicts": {str(worker): [asdict(v) for v in verdicts] for worker, verdicts in self._verdicts.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of `state_dict`, after JSON, with no rollout ended yet."""
        self._counts = {int(worker): (n[0], n[1], n[2]) for worker, n in state["seen"].items()}
        self._verdicts = {int(worker): tuple(map(Verdict.from_row, rows)) for worker, rows in state["verdicts"].items()}
        self.accept_length, self.drafts = None, 0
