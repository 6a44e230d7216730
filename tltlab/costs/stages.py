"""Costs of an RL step outside its rollout: log-probs, reward, training, weight sync, each linear in the work; and fits.

A response of n tokens, prompt included, attends over about n^2 / 2 (query, key) pairs. At 32K tokens that term is half
of what the weights cost in a 7B model (4 * 28 * 3584 * 16K FLOPs per token against 2 * 7.07e9), so it is its own term.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from pydantic import Field, PositiveInt

from tltlab.arrays import Flags, Floats, Ints
from tltlab.config import FrozenModel, StoredModel
from tltlab.errors import ConfigError
from tltlab.hardware import BYTES_PER_VALUE, Gpu, ModelShape, Positive, gpu, model
from tltlab.records import frozen

from .base import Seconds
from .samples import robust_fit

if TYPE_CHECKING:
    import pandas as pd

Share = Annotated[float, Field(gt=0, le=1)]
Trained = Literal["all", "informative"]

STAGES = ("inference_s", "reward_s", "train_s", "sync_s")
"""The columns of `steps` behind the rollout."""

_ADAM_BYTES = 28
"""Per parameter and update: read gradient and fp32 master weight and two moments (16), write the last three (12)."""


@frozen
class StepWorkload:
    """Work of an RL step's stages; tokens count prompt and response, pairs are sums of n^2 / 2.

    `informative_*` cover only groups whose rewards differ: the others have no advantage, and trainers may skip them.
    """

    num_responses: int
    num_response_tokens: int
    num_tokens: int
    num_pairs: float
    informative_tokens: int
    informative_pairs: float
    num_updates: int = 1

    @classmethod
    def of_rows(cls, rows: pd.DataFrame, *, num_updates: int = 1) -> StepWorkload:
        """Add up one RL step's rows of `workload` joined with `outcomes`; without rewards all are informative.

        A group with an unknown reward counts as informative. Raises ConfigError for an RL step without responses.
        """
        if not len(rows):
            raise ConfigError("an RL step without responses has no stages: give it at least one response")
        if num_updates < 1:
            raise ConfigError(f"num_updates must be at least 1, got {num_updates}")
        responses = rows["response_tokens"].to_numpy(np.int64)
        tokens = rows["prompt_tokens"].to_numpy(np.int64) + responses
        pairs = 0.5 * tokens.astype(np.float64) ** 2
        informative = _informative(rows) if "reward" in rows else np.ones(len(rows), bool)
        return cls(
            num_responses=len(tokens),
            num_response_tokens=int(responses.sum()),
            num_tokens=int(tokens.sum()),
            num_pairs=float(pairs.sum()),
            informative_tokens=int(tokens[informative].sum()),
            informative_pairs=float(pairs[informative].sum()),
            num_updates=num_updates,
        )


def _informative(rows: pd.DataFrame) -> Flags:
    of_group = rows["reward"].astype(np.float64).groupby(rows["prompt_id"])
    highest, lowest, known, all_of = (of_group.transform(name) for name in ("max", "min", "count", "size"))
    # An unknown reward may be anything.
    return np.asarray((highest > lowest) | (known < all_of), bool)


def served_s(arrive_s: Floats, work_s: Floats, free_s: float = 0.0) -> Floats:
    """When each piece of work is done by one server that is free from `free_s` on and takes them as they arrive.

    In the order given; seconds. O(n log n).

    >>> served_s(np.array([10.0, 1.0]), np.array([4.0, 4.0])).tolist()
    [14.0, 5.0]
    """
    order = np.argsort(arrive_s, kind="stable")
    done: Floats = np.cumsum(work_s[order])
    waited = np.maximum.accumulate(np.maximum(arrive_s[order], free_s) - (done - work_s[order]))
    ends: Floats = np.empty(len(order))
    ends[order] = done + waited
    return ends


def fit(columns: Mapping[str, Floats], seconds: Floats) -> dict[str, float]:
    """A stage's seconds, or other times of RL steps, as non-negative multiples of columns of these RL steps."""
    num = len(seconds)
    # Each RL step is a separate block, so a step slowed down by other load does not raise the level of all others.
    found = robust_fit(dict(columns), seconds, groups=np.zeros(num, np.int64), blocks=np.arange(num))
    return {name: value or 0.0 for name, value in found.coefficients.items()}


class InferenceCosts(FrozenModel):
    """Log-probs of all responses under the policy, and under a reference where there is one."""

    base_s: Seconds = 0.0
    per_token_s: Seconds = 0.0
    per_pair_s: Seconds = 0.0

    def columns(self, work: StepWorkload) -> dict[str, float]:
        """Factors of the terms."""
        return {"base_s": 1.0, "per_token_s": work.num_tokens, "per_pair_s": work.num_pairs}

    def seconds(self, work: StepWorkload) -> float:
        return sum(float(getattr(self, name)) * value for name, value in self.columns(work).items())


class RewardCosts(FrozenModel):
    """Grading, one response after the other: `after` the rollout, or `overlapped`, each as soon as it is finished.

    `per_token_s` is per response token. Where graders work in parallel the terms are those of all of them together.
    """

    base_s: Seconds = 0.0
    per_response_s: Seconds = 0.0
    per_token_s: Seconds = 0.0
    when: Literal["after", "overlapped"] = "after"

    def seconds(self, finish_s: Floats, response_tokens: Ints) -> float:
        """Seconds that grading adds behind the rollout's last finish.

        Two responses done at 1 s and 10 s, 4 s each: 8 s after the rollout, 4 s overlapped.
        """
        each_s = self.each_s(response_tokens)
        if self.when == "after":
            return self.base_s + float(each_s.sum())
        return self.base_s + float(served_s(finish_s, each_s).max() - finish_s.max())

    def each_s(self, response_tokens: Ints) -> Floats:
        """Seconds of grading each response."""
        return np.asarray(self.per_response_s + self.per_token_s * response_tokens, np.float64)


class TrainCosts(InferenceCosts):
    """Forward, backward and optimizer. `trains`: all responses, or those of groups whose rewards differ."""

    per_update_s: Seconds = 0.0
    trains: Trained = "all"

    def columns(self, work: StepWorkload) -> dict[str, float]:
        columns = {"base_s": 1.0, "per_update_s": work.num_updates}
        if self.trains == "all":
            return columns | {"per_token_s": work.num_tokens, "per_pair_s": work.num_pairs}
        return columns | {"per_token_s": work.informative_tokens, "per_pair_s": work.informative_pairs}


class SyncCosts(FrozenModel):
    """The new weights' way to the engines: a latency and `num_bytes` at `bytes_per_s`."""

    base_s: Seconds = 0.0
    num_bytes: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    bytes_per_s: Positive = 1e9

    def seconds(self) -> float:
        return self.base_s + self.num_bytes / self.bytes_per_s


class StageCosts(StoredModel):
    """The stages of an RL step on the trainer's GPUs; None is a stage that the data did not identify.

    `num_gpus` is how many GPUs the figures hold for (None: not counted in GPUs). `sleep_s` and `wake_s` are what an
    engine on the trainer's GPUs takes to free its memory after a rollout and to take it back before the next.
    The default costs nothing. Written as JSON: `write`, `load_stages`.
    """

    kind: Literal["linear"] = "linear"
    num_gpus: PositiveInt | None = None
    inference: InferenceCosts | None = InferenceCosts()
    reward: RewardCosts | None = RewardCosts()
    train: TrainCosts | None = TrainCosts()
    sync: SyncCosts | None = SyncCosts()
    sleep_s: Seconds = 0.0
    wake_s: Seconds = 0.0
    provenance: str | None = None


class RooflineStages(FrozenModel):
    """Stage costs from FLOPs: 2P per token forward, 6P to train, 8P with all activations recomputed.

    `gpu` and `model` are names that `tltlab.hardware` knows, or records of one's own. P is the model's `active_params`;
    attention adds 4 * layers * heads * head_dim FLOPs per pair forward, times 3 or 4 to train. `mfu_*` are the shares
    of peak FLOPs that a stage reaches: assumptions, as is everything below, where nothing was measured.
    `inference_passes` is 2 with a reference model. An update streams 28 bytes per parameter of Adam's state through
    HBM, sharded. The sync moves the bf16 weights once at `sync_bytes_per_s` (default: a GPU's link; receivers are fed
    in a pipeline). Not in it: offloading, padding, communication beyond the MFU, so of experts neither the exchange of
    tokens between GPUs nor their uneven load.
    """

    kind: Literal["roofline"]
    gpu: str | Gpu
    model: str | ModelShape
    num_gpus: PositiveInt
    mfu_inference: Share = 0.4
    mfu_train: Share = 0.35
    inference_passes: PositiveInt = 1
    recompute: bool = True
    sync_bytes_per_s: Positive | None = None
    reward: RewardCosts = RewardCosts()
    trains: Trained = "all"
    sleep_s: Seconds = 0.0
    wake_s: Seconds = 0.0
    provenance: str | None = None

    def build(self) -> StageCosts:
        """The costs by the data sheets; ConfigError for a name that is not known."""
        device, shape = gpu(self.gpu), model(self.model)
        flops_per_token = 2.0 * shape.active_params
        flops_per_pair = 4.0 * shape.layers * shape.heads * shape.head_dim
        forward = self.inference_passes / (self.num_gpus * device.peak_flops * self.mfu_inference)
        training = (4 if self.recompute else 3) / (self.num_gpus * device.peak_flops * self.mfu_train)
        return StageCosts(
            num_gpus=self.num_gpus,
            inference=InferenceCosts(per_token_s=flops_per_token * forward, per_pair_s=flops_per_pair * forward),
            reward=self.reward,
            train=TrainCosts(
                per_token_s=flops_per_token * training,
                per_pair_s=flops_per_pair * training,
                per_update_s=_ADAM_BYTES * shape.stored_params / (self.num_gpus * device.hbm_bytes_per_s),
                trains=self.trains,
            ),
            sync=SyncCosts(
                num_bytes=BYTES_PER_VALUE * shape.stored_params,
                bytes_per_s=device.link_bytes_per_s if self.sync_bytes_per_s is None else self.sync_bytes_per_s,
            ),
            sleep_s=self.sleep_s,
            wake_s=self.wake_s,
            provenance=self.provenance or f"roofline: {shape.name} on {self.num_gpus} x {device.name}",
        )
