"""Sections of recipes, each validated by itself."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, field_validator, model_validator

from tltlab.config import Count, FiniteModel, leaves
from tltlab.drafters.specs import DrafterSpec
from tltlab.errors import did_you_mean, refuse
from tltlab.own import paths_in
from tltlab.planning.rollout import Shape
from tltlab.records import Json

from .drafter import Beta, DrafterConfig

_SECRET = re.compile(r"(^|[._-])(hf_token|api_key|password|secret|access_token|auth_token)$", re.IGNORECASE)
_SET_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
SYSTEMS_POLICY = "system"
"""`rollout.policy` of a recipe whose `rollout.system` defines the policy."""
MOST_SAMPLES = 512
"""Largest `rollout.group_size`."""
_VLLM_COUNTS = ("max_num_seqs", "max_model_len", "kv_cache_memory_bytes")


class DataConfig(FiniteModel):
    """Prompts and answers: `train`, and `heldout` for evaluations (None: none), one source or several by name.

    Each is a JSONL or Parquet file or a Hugging Face dataset: a folder or id, of its `subset` the `split` and the
    `heldout_split`. `prompt_column` and `answer_column` may be dotted paths into structs ("reward_model.ground_truth").
    A prompt is text, or a list of messages {role, content}. With `chat` the model's chat template is applied, with the
    variables `chat_template_kwargs`, such as {enable_thinking = false}, and `system` before a prompt that is text.
    Prompts of more than `max_prompt_tokens` are left out, and the run reports their number; None takes all. A prompt
    that fills the engine's context is refused, with its place, before anything starts.
    """

    train: str
    heldout: str | dict[str, str] | None = None
    split: str = "train"
    heldout_split: str = "test"
    subset: str | None = None
    prompt_column: str = "prompt"
    answer_column: str = "answer"
    chat: bool = False
    system: str | None = None
    chat_template_kwargs: Json = Field(default={})
    max_prompt_tokens: int | None = Field(default=None, ge=1)

    @field_validator("heldout")
    @classmethod
    def _check_names(cls, heldout: str | dict[str, str] | None) -> str | dict[str, str] | None:
        if isinstance(heldout, dict) and not all(map(_SET_NAME.fullmatch, heldout or [""])):
            raise ValueError(f"needs names of letters, digits and . _ -, got {', '.join(map(repr, heldout)) or 'none'}")
        return heldout

    @property
    def heldout_sets(self) -> dict[str, str]:
        """Sources of evaluations by name; a single one has the empty name."""
        return {"": self.heldout} if isinstance(self.heldout, str) else self.heldout or {}

    @property
    def sources(self) -> dict[str, str]:
        """All sources, by setting."""
        heldout = {f"data.heldout.{name}".rstrip("."): source for name, source in self.heldout_sets.items()}
        return {"data.train": self.train, **heldout}


class RewardTerm(FiniteModel):
    """One reward function by import path, `package.module:function`, and its weight in the sum.

    Its values are logged as `reward/terms/NAME`: `name`, or the function's.
    """

    path: str
    weight: float = 1.0
    name: str | None = Field(default=None, pattern=r"^[\w.-]+$")

    @property
    def label(self) -> str:
        return self.name or self.path.rpartition(":")[2]


class RewardPoolConfig(FiniteModel):
    """Rewards are computed in `processes` processes; one that takes longer than `timeout_s` is killed.

    Its value then is `on_failure`, as is that of a reward function that raises; of several terms only the failed one
    has it, times its weight. With 0 processes rewards are computed in the driver, without a time limit. A process may
    map `memory_bytes` of memory, None: no limit.
    """

    processes: NonNegativeInt = 1
    timeout_s: PositiveFloat = 10.0
    on_failure: float = Field(default=0.0, ge=-1e38, le=1e38)
    memory_bytes: int | None = Field(default=None, ge=1 << 28)


class PartialConfig(FiniteModel):
    """Partial rollout: it ends once prompts_per_step groups are complete, and cuts what still runs.

    `concurrency` requests run at any time, over all workers (CoPRIS, arXiv 2511.05589). With None a rollout begins
    `issue` x prompts_per_step prompts at once (APRIL, arXiv 2509.18521) with `samples` x group_size responses each, of
    which the first group_size that are whole complete the group.

    By `leftover`, what is cut continues first in the next RL step ("resume"), off-policy; or prompts that did not
    complete begin anew ("restart"), on-policy, in a rollout of their own once they are prompts_per_step (RollPacker,
    arXiv 2509.21009). Resumed groups older than `max_age` RL steps are dropped, None never.
    """

    concurrency: Count | None = None
    issue: float = Field(default=1.0, ge=1, le=64)
    samples: float = Field(default=1.0, ge=1, le=64)
    leftover: Literal["resume", "restart"] = "resume"
    max_age: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _check_begun(self) -> PartialConfig:
        more = self.issue > 1 or self.samples > 1
        if (self.concurrency is None) is not more:
            raise ValueError("give concurrency, or how much more is begun: issue or samples above 1; not both")
        if self.leftover == "restart" and (not more or self.max_age is not None):
            raise ValueError("leftover = 'restart' is for issue or samples above 1, without max_age: nothing grows old")
        return self


class ReuseConfig(FiniteModel):
    """Reuse of the previous epoch's response to the same prompt and sample as a prefix (SPEC-RL, arXiv 2509.23232).

    A token is kept with probability min(1, `leniency` * pi_now / pi_then); the first rejected one ends the prefix.
    """

    leniency: PositiveFloat = 1.0


class EnvironmentConfig(FiniteModel):
    """Tools that responses call: `path` is `package.module:Class` or a built-in, `calculator`.

    A turn ends at a string of `stop` (empty: the class's own), each one token of the model. The environment's
    observation is appended, between `before` and `after`, and generation continues, up to `max_turns` turns and the
    cap, which includes observations. Every worker calls the environment in `processes` processes, and a call that takes
    longer than `timeout_s` is killed. With 0 processes calls are synchronous and unlimited, and the rollout can be
    repeated bit by bit.
    """

    path: str
    stop: tuple[str, ...] = ()
    max_turns: Count = 8
    before: str = ""
    after: str = ""
    processes: NonNegativeInt = 1
    timeout_s: PositiveFloat = 10.0

    @model_validator(mode="before")
    @classmethod
    def _from_path(cls, fields: Any) -> Any:
        return {"path": fields} if isinstance(fields, str) else fields


class RolloutConfig(FiniteModel):
    """`num_workers` engines share each step's `prompts_per_step` x `group_size` responses, split by `placement`.

    `placement` is contiguous (in order), round_robin, least_loaded, by lengths of the epoch before longest_expected,
    rank_groups (RhymeRL) or two_pools (StreamRL), or a class, `package.module:Class`, which receives the lengths of
    earlier RL steps (`tltlab.planning.placement`); the simulator's clairvoyant ones cannot run here.

    With a `planner`, gather, rebalance or `module:Class` (`tltlab.planning.rollout`), requests move between engines
    during a rollout; without one none does. A request continues in the random state of the engine that it comes to.
    Engines of the `tail_shape` too, such as 2x4 (engines x GPUs of each), are on the same GPUs, asleep, for planners to
    gather requests onto; they get new weights when they wake. On CPUs sleep frees no memory. Planners reckon with plain
    decoding at `planner_costs`, two presets or files of `tltlab calibrate`: of these engines and of the tail shape's.
    By default they are a profile of `cluster.gpu`, on CPUs cpu-small for both.

    Tokens are drawn at `temperature` from the `top_k` likeliest (0: from all), the least set of them that has `top_p`
    of the mass, and those of at least `min_p` times the likeliest one's; responses end at `max_response_tokens`.
    `policy` is a policy's name, drafts such as ngram:4, or a file; engines make room for drafts of up to
    `max_draft_depth` tokens. `drafters` add to those of the policy, or replace them by name. Every `repeat_every`-th
    rollout runs a second time, only to measure the variation of the machine's time on the same work (`repeats.json`); 0
    is never. A policy's file may name a class of the modules `allow_code`. Each engine spans `tensor_parallel_size`
    GPUs; a worker without tensor parallelism may take a share of a GPU (`gpus_per_worker`, None: 1 where there are
    GPUs). vLLM's own arguments go into `vllm`.

    A response also ends with the token that completes a string of `stop` in its text, special tokens included: this
    token is the last one, with and without drafts, and is trained on.

    With `one_step_off` engines roll out the next RL step, under their current weights, while the trainer learns from
    this one: off-policy by one update, weighted by `train.correction`. Rollouts do not overlap a checkpoint, so that a
    resumed run equals an unbroken one. With `staleness` = N above 0 training is asynchronous: engines continue, new
    weights reach them between two iterations, and a response begins only if it will be at most N updates old when
    trained on (AReaL, arXiv 2505.24298); `stale` = "hold" waits for responses about to exceed `staleness`, "drop" drops
    them.

    On GPUs engines capture the CUDA `graphs` that are planned for the policy, of as many batch sizes as `graph_gib` GiB
    on each GPU allow ("planned"), or vLLM's default graphs ("stock"). Planned, engines run this policy and no deeper
    drafts or other drafters.

    `system` is a row of `tltlab.planning.systems`, such as copris: its parts decide `policy`, `max_draft_depth`,
    `partial`, `reuse`, `one_step_off`, `staleness`, `drafter.schedule.kind`, and of some `placement` or `planner`. dler
    shortens `max_response_tokens`, and brorl has more samples of fewer prompts than the recipe. A run writes as
    `workload` the system whose sizes its recipe has already.
    """

    num_workers: Count = 2
    prompts_per_step: Count = 24
    group_size: int = Field(default=8, ge=1, le=MOST_SAMPLES)
    temperature: PositiveFloat = 1.0
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: NonNegativeInt = 0
    min_p: float = Field(default=0.0, ge=0, lt=1)
    max_response_tokens: Count = 768
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    max_draft_depth: NonNegativeInt = 8
    policy: str = "none"
    placement: str = "contiguous"
    allow_code: tuple[str, ...] = ()
    graphs: Literal["planned", "stock"] = "planned"
    graph_gib: PositiveFloat = 6.0
    drafters: dict[str, DrafterSpec] = Field(default={})
    repeat_every: NonNegativeInt = 0
    tensor_parallel_size: Count = 1
    gpus_per_worker: float | None = Field(default=None, ge=0)
    partial: PartialConfig | None = None
    reuse: ReuseConfig | None = None
    environment: EnvironmentConfig | None = None
    planner: str | None = None
    tail_shape: str | None = None
    planner_costs: tuple[str, ...] = ()
    one_step_off: bool = False
    staleness: NonNegativeInt = 0
    stale: Literal["hold", "drop"] = "hold"
    system: str | None = None
    workload: str | None = None
    vllm: Json = Field(default={})

    @field_validator("vllm")
    @classmethod
    def _check_rules(cls, vllm: Json) -> Json:
        refuse(vllm_arguments(vllm), ValueError)
        return vllm

    @property
    def chosen_by(self) -> str:
        """The setting that determines the policy, with its value."""
        name = "system" if self.policy == SYSTEMS_POLICY else "policy"
        return f"rollout.{name} = {getattr(self, name)}"

    @property
    def shapes(self) -> list[Shape]:
        """The shape of the engines, and that of `tail_shape` if there is one; ConfigError for a faulty one."""
        base = Shape(engines=self.num_workers, gpus=self.tensor_parallel_size)
        return [base] if self.tail_shape is None else [base, Shape.of(self.tail_shape)]

    @property
    def batched_tokens(self) -> int:
        """Tokens of an iteration; by default vLLM's least for offline engines (`get_batch_defaults`)."""
        return int(self.vllm.get("max_num_batched_tokens") or 8192)


ALGORITHMS: dict[str, Json] = {
    # Shao et al. 2024, arXiv 2402.03300, Eq. 3; KL coefficient 0.04 (section 4.2). No clip range given: PPO's 0.2.
    "grpo": {"aggregation": "sequence", "clip_high": 0.2, "kl_coef": 0.04},
    # Liu et al. 2025, arXiv 2503.20783: neither standard deviation nor length in a denominator, no reference model.
    "dr-grpo": {"advantage_scale": "none", "aggregation": "constant", "clip_high": 0.2},
    # Yu et al. 2025, arXiv 2503.14476, Eqs. 8-13: clip-higher, token-level loss, soft overlong punishment, dynamic
    # sampling (at most 10 rollouts, as in its published scripts); overlong filtering is its other way: "filter".
    "dapo": {"overlong": "penalty", "sampling_rounds": 10},
    # Liu et al. 2025, arXiv 2510.15110: DAPO's clip and dynamic sampling, rewards normalised over the batch, and
    # truncation as the only length penalty.
    "dler": {"advantage_scale": "batch", "overlong": "zero", "sampling_rounds": 10},
    # Ahmadian et al. 2024, arXiv 2402.14740: a response is one action, so that its tokens' log-probs are summed. No
    # clip range: it takes one optimizer step per RL step. Its KL penalty, and that of the next two, is left to kl_coef.
    "rloo": {"baseline": "leave_one_out", "advantage_scale": "none", "aggregation": "constant", "clip_high": 0.2},
    # Hu et al. 2025, arXiv 2501.03262: advantages normalised over the batch, without a baseline for any number of
    # responses to a prompt, or less the group's mean.
    "reinforce++": {"baseline": "none", "advantage_scale": "batch", "clip_high": 0.2},
    "reinforce++-baseline": {"advantage_scale": "batch", "clip_high": 0.2},
    # Zheng et al. 2025, arXiv 2507.18071, Eq. 5 and section 5.1: one ratio for a response, and clip ranges as narrow as
    # its geometric mean; no reference model.
    "gspo": {
        "ratio": "sequence", "correction_level": "sequence", "aggregation": "sequence", "clip_low": 3e-4,
        "clip_high": 4e-4,
    },
    # MiniMax-M1, arXiv 2506.13585, section 3.1: no lower bound, DAPO's length penalty and dynamic sampling, no
    # reference model. Its upper bound is not published: weights of up to 5 are a choice of ours.
    "cispo": {"objective": "cispo", "clip_low": 1.0, "clip_high": 4.0, "overlong": "penalty", "sampling_rounds": 10},
}  # fmt: skip
"""Published algorithms as settings of one loss: values of `train.algorithm` for fields that a recipe leaves out.

Those in which they differ from the defaults of `TrainConfig`, which are DAPO's clip range and mean over tokens.
"""


OBJECTIVES = ("clip", "cispo")
"""Values of `train.objective`, besides the user's own."""


class LoraConfig(FiniteModel):
    """Low-rank adapters (LoRA, arXiv 2106.09685) are trained in place of all weights; without the section all are.

    Each linear module of a decoder layer named in `targets` ("all-linear": every one) adds `alpha` / `rank` x B A, with
    A and B of that `rank`. Engines get new weights as `serve` says: "merged", the matrices of the adapted blocks with
    their adapters added, or "adapter", the adapters alone, which vLLM then loads and applies by itself. In bfloat16
    "adapter" computes as the trainer does, and merged matrices are rounded; on a GPU its CUDA graphs are vLLM's own.
    Checkpoints hold adapters; `checkpoints/final` is merged, with the adapters alone in its folder `adapter`.
    """

    rank: int = Field(default=16, ge=1, le=512)
    alpha: Count = 32
    targets: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = "all-linear"
    serve: Literal["merged", "adapter"] = "merged"


class TrainConfig(FiniteModel):
    """GRPO and its relatives; `algorithm` sets fields that are not set here (`ALGORITHMS`).

    `lr` has a default for models of a few million parameters: above 100 M it has to be set (1e-6 is usual).

    A run has `steps` RL steps. With `epochs` instead it has as many as it takes to draw every prompt so often,
    `rollout.prompts_per_step` in each (dynamic sampling draws more: a group that it drops counts as drawn, and its
    prompt comes again in the next epoch). AdamW with `betas` and `weight_decay`; with `decay_all` false norms and
    biases, parameters of one dimension, do not decay; gradients are clipped at a norm of `max_grad_norm`. The rate
    rises linearly over the first `warmup_steps` optimizer steps. Then it stays, or with an `lr_schedule` falls by a
    "linear" ramp or half a "cosine" over all mini-batches, with or without a gradient, until the run ends.
    `lr_min_share` is the share of `lr` that it falls to. Resumed with more RL steps, a run continues on the ramp of the
    longer run. `passes` is how often an RL step's responses are trained on, each time in another random order; ratios
    are to the policy before the first pass.

    Loss. `minibatches` optimizer steps per RL step; ratios are clipped to [1 - `clip_low`, 1 + `clip_high`]. `kl_coef`
    weighs the divergence from the initial model (0: none). `baseline` of a reward: its group's mean ("group"), the mean
    of the group's other responses ("leave_one_out"), or "none". `advantage_scale`: rewards less their baselines are
    divided by the standard deviation of the group, of the batch (an RL step's responses, each once, in groups whose
    rewards differ, or with baseline "none" all less their mean), or by none, and 1e-4 is added to the deviation.
    `advantage` is a function of your own instead, `package.module:function`, which returns advantages [N] from N
    responses' rewards, groups, lengths, truncated (tensors [N]) and a mapping of the reward's terms [N] by name.
    `aggregation`: every token weighs the same ("token"), every response ("sequence"), or a token weighs 1 /
    max_response_tokens ("constant"). `overlong`: truncated responses are kept, filtered out of the loss, penalised
    softly over the last `overlong_buffer` tokens before the cap (0: a fifth of the cap), or get no reward ("zero"). Up
    to `sampling_rounds` rollouts an RL step replace groups that cannot train (1: none are replaced), as no response
    that counts has an advantage, or none would have by the reward's term `sampling_term` alone. `correction` of the
    mismatch between engine and trainer: weights min(pi_trainer / pi_engine, `correction_cap`) ("truncated"), or 0
    outside of [1 / `correction_cap`, `correction_cap`] ("masked"), the ratio taken to the behaviour's log-probs itself
    ("behaviour"), or "none". By `correction_level` weights are of each "token", or the product over the response
    ("sequence"). top_p, top_k and min_p change the engine's sampling distribution, which biases corrections.

    Objective. In the `objective` "clip", PPO's, tokens with a negative advantage A have a loss of at most `dual_clip`
    |A| (None: unbounded); in "cispo" the clipped ratio, without gradient, weighs A log pi; `module:function` is the
    user's own (`tltlab.runtime.trainer.losses.Objective`). A `ratio` is of each "token", or the geometric mean over the
    response ("sequence"). The divergence is estimated by `kl_estimator` k1, k2 or k3, with weights as `correction`
    chooses; `kl_in` the "loss" it has a gradient, in the "reward" it is subtracted from the response's reward.
    `entropy_coef` weighs a bonus for the entropy of the policy's distribution (0: none).

    Machine. `ranks` trainers of `threads` CPU threads share the work through FSDP2 over `backend`; with
    `activation_checkpointing` they recompute activations instead of keeping them. `dtype` "auto" is bfloat16 on CUDA,
    with float32 master weights, and float32 on CPU. A micro-batch has up to `tokens_per_microbatch` tokens. For long
    responses `sequence_parallel` neighbouring ranks compute each micro-batch together and hold that share of its
    activations (1: each rank has its own); it divides the ranks and the model's heads and KV heads. `offload` moves the
    trainer's tensors to the host while engines generate. A rank takes `gpus` (None: 1 where there are GPUs).
    `deterministic` makes torch compute the same bits each time, which is slower on GPUs (`bench gpu update`): only then
    does a resumed run equal the unbroken one bit by bit there.
    """

    steps: Count = 12
    epochs: float | None = Field(default=None, gt=0)
    algorithm: (
        Literal["grpo", "dr-grpo", "dapo", "dler", "rloo", "reinforce++", "reinforce++-baseline", "gspo", "cispo"]
        | None
    ) = None
    lr: PositiveFloat = 5e-4
    lr_schedule: Literal["constant", "cosine", "linear"] = "constant"
    lr_min_share: float = Field(default=0.0, ge=0, lt=1)
    warmup_steps: NonNegativeInt = 0
    betas: tuple[Beta, Beta] = (0.9, 0.99)
    weight_decay: NonNegativeFloat = 0.0
    decay_all: bool = True
    max_grad_norm: PositiveFloat = 1.0
    passes: Count = 1
    minibatches: Count = 2
    objective: str = "clip"
    ratio: Literal["token", "sequence"] = "token"
    clip_low: float = Field(default=0.2, gt=0, le=1)
    clip_high: PositiveFloat = 0.28
    dual_clip: float | None = Field(default=None, gt=1)
    kl_coef: NonNegativeFloat = 0.0
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    kl_in: Literal["loss", "reward"] = "loss"
    entropy_coef: NonNegativeFloat = 0.0
    baseline: Literal["group", "leave_one_out", "none"] = "group"
    advantage_scale: Literal["group", "batch", "none"] = "group"
    advantage: str | None = None
    aggregation: Literal["token", "sequence", "constant"] = "token"
    overlong: Literal["keep", "filter", "penalty", "zero"] = "keep"
    overlong_buffer: NonNegativeInt = 0
    sampling_rounds: Count = 1
    sampling_term: str | None = None
    correction: Literal["truncated", "masked", "behaviour", "none"] = "truncated"
    correction_level: Literal["token", "sequence"] = "token"
    correction_cap: float = Field(default=2.0, ge=1)
    tokens_per_microbatch: Count = 8192
    ranks: Count = 1
    sequence_parallel: Count = 1
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    activation_checkpointing: bool = False
    offload: bool = False
    deterministic: bool = False
    threads: Count = 1
    gpus: float | None = Field(default=None, ge=0)
    lora: LoraConfig | None = None

    @field_validator("objective")
    @classmethod
    def _check_objective(cls, name: str) -> str:
        if name not in OBJECTIVES and not paths_in(name):
            raise ValueError(f"{name!r} is neither clip, cispo nor module:function{did_you_mean(name, OBJECTIVES)}")
        return name

    @model_validator(mode="before")
    @classmethod
    def _fill_from_algorithm(cls, fields: Any) -> Any:
        name = fields.get("algorithm") if isinstance(fields, dict) else None
        return ALGORITHMS.get(name, {}) | fields if isinstance(name, str) else fields

    @property
    def served_adapter(self) -> LoraConfig | None:
        """The adapters that engines apply by themselves, None where weights come merged or there are no adapters."""
        return self.lora if self.lora is not None and self.lora.serve == "adapter" else None

    @property
    def data_ranks(self) -> int:
        """Number of sets of `sequence_parallel` ranks, each with its own samples."""
        return self.ranks // self.sequence_parallel


class EvalConfig(FiniteModel):
    """Held-out reward before the first and after the last step, and after every `every` steps (0: at no other time).

    `samples` responses to each of the first `num_prompts` prompts of a held-out set (0: no evaluation) are drawn as in
    rollouts, at `temperature` (None: the rollouts', 0: greedily). `reward/heldout` is their mean reward (mean@samples),
    where there are several sets the mean of `reward/heldout/NAME`. For each k of `pass_at`, `pass@k` is the probability
    that one of k responses to a prompt passes, a mean over prompts of 1 - C(n - c, k) / C(n, k), where c of n responses
    pass (unbiased: Chen et al. 2021, arXiv 2107.03374, Eq. 1). A response passes with a reward above `pass_above`. A
    run that is resumed where an evaluation is due makes it again.
    """

    num_prompts: NonNegativeInt = 256
    every: NonNegativeInt = 0
    temperature: float | None = Field(default=None, ge=0)
    samples: Count = 1
    pass_at: tuple[Count, ...] = ()
    pass_above: float = 0.0


class ClusterConfig(FiniteModel):
    """Machines, and placement of actors.

    `placement` "separate": engines and trainers on their own GPUs; "colocated": on the same GPUs, and engines sleep
    while trainers train. There are `num_nodes` machines with `gpus_per_node` GPUs. Ray listens on `host` alone by
    default.

    `weights` is the transport of new weights to engines: "host" by shared memory of a machine, "nccl" between GPUs,
    "ipc" within each; "auto" is the shortest possible. `gpu` is the kind of GPU (`tltlab.hardware`) whose memory a dry
    run checks.
    """

    placement: Literal["separate", "colocated"] = "separate"
    weights: Literal["auto", "host", "nccl", "ipc"] = "auto"
    num_nodes: Count = 1
    gpus_per_node: NonNegativeInt = 0
    gpu: str | None = None
    host: str = "127.0.0.1"


class CheckpointConfig(FiniteModel):
    """A checkpoint after every `every` RL steps (0: only at the end and at Ctrl-C); the newest `keep` stay.

    With `best` the policy of the highest held-out reward of all evaluations after an RL step stays too, the first of
    equals: `checkpoints/best` is a Hugging Face folder, with RL step and reward in its `heldout.json`.
    """

    every: NonNegativeInt = 10
    keep: Count = 2
    best: bool = False


class LogConfig(FiniteModel):
    """Destinations of metrics next to the trace.

    With `tensorboard` event files in the run's folder; the project `wandb` of Weights & Biases.
    """

    tensorboard: bool = True
    wandb: str | None = None


class FaultConfig(FiniteModel):
    """Handling of actors that fail or hang: each is restarted up to `max_restarts` times, then the run ends.

    A start may take `start_timeout_s`, by default 600 s and 20 for each 10^9 parameters of the model that it loads. A
    trainer rank that waits `collective_timeout_s` for another in one exchange of tensors gives up; set it longer than
    the slowest rank may work or write alone, as dead ranks are noticed without it. An engine or trainer rank that is
    stopped (SIGSTOP) for `stopped_timeout_s` is killed and restarted, as is one that does not answer a call within
    `call_timeout_s` and 20 times the longest such call so far.
    """

    max_restarts: NonNegativeInt = 3
    start_timeout_s: PositiveFloat | None = None
    collective_timeout_s: PositiveFloat = 3600.0
    stopped_timeout_s: PositiveFloat = 60.0
    call_timeout_s: PositiveFloat = 36_000.0

    def start_s(self, num_params: float = 0.0) -> float:
        """Return the time limit of a start that loads a model of so many parameters."""
        return self.start_timeout_s or 600.0 + 20e-9 * num_params

    def patience_s(self, longest_s: float) -> float:
        """Return the time limit of a call, given the longest such call so far."""
        return self.call_timeout_s + 20 * longest_s


class Sections(FiniteModel):
    """A recipe whose sections are each valid by themselves."""

    model: str
    reward: str | tuple[RewardTerm, ...]
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    train: TrainConfig = TrainConfig()
    drafter: DrafterConfig | None = None
    eval: EvalConfig = EvalConfig()
    reward_pool: RewardPoolConfig = RewardPoolConfig()
    cluster: ClusterConfig = ClusterConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    faults: FaultConfig = FaultConfig()
    code: tuple[str, ...] = ()
    seed: int = Field(default=0, ge=0, lt=2**32)

    @property
    def reward_terms(self) -> tuple[RewardTerm, ...]:
        """The reward's terms: one where it is a path."""
        return (RewardTerm(path=self.reward),) if isinstance(self.reward, str) else self.reward


def vllm_arguments(vllm: Mapping[str, Any]) -> Iterator[str]:
    """Check `rollout.vllm`: vLLM reports faults of its arguments much later, and in a traceback."""
    for name, value in leaves(vllm, in_lists=True):
        if isinstance(value, str) and _SECRET.search(name):
            yield f"{name} would be written into the run's folder: give it by an environment variable"
        if isinstance(value, float) and not isfinite(value):
            yield f"{name} = {value} is not a finite number"
    for name in _VLLM_COUNTS:
        value = vllm.get(name)
        if value is not None and (type(value) is not int or value < 1):
            yield f"{name} = {value!r} is not a whole number above 0"
    share = vllm.get("gpu_memory_utilization", 0.5)
    if type(share) not in (int, float) or not 0 < share <= 1:
        yield f"gpu_memory_utilization = {share!r} is not a number above 0 and up to 1"
