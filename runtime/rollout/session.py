"""A session: policies rolled out in turn on real engines, one schedule of rollouts and one folder for all engines.

The folder is a RUN of rollouts alone, which `tltlab.sim.verification.played` reads: a trace with one RL step for each
rollout, and `policies.json` as a training run writes it.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from tltlab.config import FrozenModel
from tltlab.drafters.base import Key
from tltlab.files import sealed, write_json
from tltlab.policies.policy import Policy
from tltlab.records import Json
from tltlab.runtime.engine.generation import Rollout
from tltlab.runtime.run.rows import Shares, rollout_alone
from tltlab.traces.recorder import Recorder
from tltlab.traces.schema import Manifest

from .collected import all_requests


class Visit(FrozenModel):
    """One rollout of a session: its RL step in the trace, its round and its policy's name."""

    rl_step: int
    round: int
    policy: str


def visits(policies: Sequence[str], rounds: int, seed: int) -> list[Visit]:
    """Return every rollout, round by round, each round in a random order."""
    return [
        Visit(rl_step=number * len(policies) + place, round=number, policy=policies[at])
        for number in range(rounds)
        for place, at in enumerate(np.random.default_rng([seed, number]).permutation(len(policies)))
    ]


class SessionRecorder(Recorder):
    """Recorder of a session in the folder `out`."""

    def __init__(self, out: Path, manifest: Manifest, policies: Mapping[str, Policy], seed: int):
        super().__init__(out / "trace", manifest)
        self._file, self._policies, self._seed = out / "policies.json", policies, seed
        self._in_force: list[Json] = []
        self._played_s = 0.0

    def add(
        self,
        visit: Visit,
        shares: Shares,
        parts: Sequence[Rollout],
        epochs: Mapping[Key, int] | None = None,
        *,
        tokens: bool = True,
    ) -> float:
        """Write a rollout, if asked for without its token ids, and return its seconds.

        `epochs` are those of the responses by key, by default the first.
        """
        rows = rollout_alone(
            visit.rl_step, visit.policy, all_requests(shares, parts), parts, epochs=epochs or defaultdict(int),
            t_start=self._played_s,
        )  # fmt: skip
        for table, new in rows.items():
            if tokens or table != "tokens":
                self.append(table, new)
        self.flush()
        policy = self._policies[visit.policy].model_dump(mode="json")
        self._in_force.append({"rl_step": visit.rl_step, "name": visit.policy, "policy": policy})
        write_json(self._file, sealed({"seed": self._seed, "policies": self._in_force}))
        seconds = max(part.duration_s for part in parts)
        self._played_s += seconds
        return seconds
