"""The Ray actors of a run: rollout workers, each around one engine, and the trainer. Also how Ray is started."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
import torch

from tltlab.canary import CanaryConfig
from tltlab.drafters import DrafterSpec
from tltlab.policy import Policy

from .drafting import DrafterReport
from .drafting import Response as Remembered
from .engine import Engine, GenerationRequest, Rollout
from .feed import FeedSender, NoFeed
from .recipe import Recipe
from .samples import Sample
from .target_states import FrozenTarget
from .trainer import Trainer

# One thread per engine: two on a busy machine stall for seconds. Numba's own threads belong to vLLM's n-gram drafter.
_WORKER_ENV = {
    "OMP_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TQDM_DISABLE": "1",
    "RAY_DEDUP_LOGS": "0",
}


def start_ray() -> bool:
    """Join the Ray cluster that RAY_ADDRESS names, else start one on this machine; whether it was started here."""
    if ray.is_initialized():
        return False
    address = os.environ.get("RAY_ADDRESS")
    # Ray starts workers at niceness 15: on a busy machine whatever else runs would be served first, and be measured.
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray.init(
        address=address,
        include_dashboard=None if address else False,
        object_store_memory=None if address else 512 << 20,
        log_to_driver=False,
        logging_level="ERROR",
    )
    return not address


def start_workers(
    recipe: Recipe, drafters: Mapping[str, DrafterSpec], feed: Callable[[int], str | None]
) -> tuple[list[Any], Any]:
    """Start the rollout workers, each with `drafters`, and the trainer; their handles. They start in parallel.

    `feed(n)` is where worker n hands over what its responses can teach a drafter, None for nowhere.
    """
    rollout, train = recipe.rollout, recipe.train
    env = _WORKER_ENV | {"PYTHONPATH": os.pathsep.join(_user_paths())}
    workers = [
        RolloutWorker.options(  # type: ignore[attr-defined]
            num_cpus=0, num_gpus=rollout.gpus_per_worker or 0, runtime_env={"env_vars": env}
        ).remote(recipe, number, drafters, feed(number))
        for number in range(rollout.num_workers)
    ]
    env |= {"OMP_NUM_THREADS": str(train.threads)}
    trainer = TrainerActor.options(  # type: ignore[attr-defined]
        num_cpus=0, num_gpus=train.gpus or 0, runtime_env={"env_vars": env}
    ).remote(recipe)
    return workers, trainer


def _user_paths() -> list[str]:
    """Where this process finds modules outside its installation: a user's policy must import in the actors too."""
    installed = (sys.prefix, sys.base_prefix)
    return [path or os.getcwd() for path in sys.path if not path.startswith(installed)]


@ray.remote
class RolloutWorker:
    """One engine in its own process."""

    def __init__(self, recipe: Recipe, number: int, drafters: Mapping[str, DrafterSpec], feed: str | None) -> None:
        self.recipe = recipe
        self.number = number
        self.drafters = drafters
        self.feed = FeedSender(feed) if feed is not None else NoFeed()
        self.temperature = recipe.rollout.temperature

    def start(self) -> None:
        """Build the engine and run it warm. Not in the constructor: Ray does not hand on its errors as they are."""
        rollout = self.recipe.rollout
        torch.set_num_threads(1)
        self.engine = Engine(
            self.recipe.model,
            worker=self.number,
            drafters=self.drafters,
            max_draft_depth=rollout.max_draft_depth,
            seed=self.recipe.seed + self.number,
            vllm_args=rollout.vllm,
        )
        self.engine.warm_up(self.temperature)
        if isinstance(self.feed, FeedSender):
            self.engine.capture(self.feed.sequence)

    def place(self) -> tuple[str, dict[str, str]]:
        """The node, and what makes another process see the same devices."""
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        return ray.get_runtime_context().get_node_id(), {} if seen is None else {"CUDA_VISIBLE_DEVICES": seen}

    def set_policy(self, policy: Policy, rl_step: int) -> None:
        self.engine.set_policy(policy, seed=[self.recipe.seed, self.number, rl_step])

    def update_weights(self, weights: dict[str, torch.Tensor], version: int) -> None:
        self.engine.update_weights(weights.items(), version)

    def update_draft_weights(self, weights: dict[str, torch.Tensor], predicted: Sequence[float], updates: int) -> None:
        self.engine.update_draft_weights(weights.items(), predicted, updates)

    def guard_drafter(self, config: CanaryConfig) -> None:
        self.engine.guard_drafter(config)

    def drafter_report(self) -> DrafterReport:
        return self.engine.drafter_report()

    def generate(self, requests: list[GenerationRequest], rl_step: int, *, repeatable: bool) -> Rollout:
        """Roll out; `repeatable` keeps the state before, so that `repeat` can follow."""
        if repeatable:
            self.before = self.engine.snapshot()
        self.feed.status(rl_step, busy=True)
        try:
            return self.engine.generate(requests, rl_step=rl_step, temperature=self.temperature)
        finally:
            self.feed.status(rl_step, busy=False)

    def repeat(self, requests: list[GenerationRequest], rl_step: int) -> Rollout:
        """Do the last, repeatable, rollout again from the state it started in, and leave no trace of it."""
        after = self.engine.snapshot()
        self.engine.restore(self.before)
        try:
            with self.engine.uncaptured():
                return self.engine.generate(requests, rl_step=rl_step, temperature=self.temperature)
        finally:
            self.engine.restore(after)

    def rehearse(self, requests: list[GenerationRequest], rl_step: int) -> Rollout:
        """Do a rollout that is still to come, and leave no trace of it."""
        self.before = self.engine.snapshot()
        return self.repeat(requests, rl_step)

    def remember(self, responses: list[Remembered]) -> None:
        """Show the drafters what other workers generated."""
        self.engine.remember(responses)

    def evaluate(self, requests: list[GenerationRequest]) -> Rollout:
        return self.engine.evaluate(requests, temperature=self.temperature)


@ray.remote
class TrainerActor:
    """The trainer in its own process."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def start(self) -> None:
        """Load the model."""
        recipe = self.recipe
        self.trainer = Trainer(recipe.model, recipe.train, temperature=recipe.rollout.temperature, seed=recipe.seed)

    def old_logprobs(self, samples: list[Sample]) -> dict[str, float]:
        return self.trainer.old_logprobs(samples)

    def update(self) -> dict[str, float]:
        return self.trainer.update()

    def weights(self) -> dict[str, torch.Tensor]:
        return self.trainer.weights()

    def frozen(self) -> FrozenTarget:
        return self.trainer.frozen()

    def save(self, folder: str) -> None:
        self.trainer.save(folder)
