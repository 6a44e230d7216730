"""Settings of drafter training: the `[drafter]` section of a recipe, and those of `tltlab train-drafter`."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from tltlab.config import Count, FiniteModel, Share
from tltlab.coordination.canary import CanaryConfig
from tltlab.coordination.machine import CoordinatorConfig
from tltlab.coordination.schedule import ScheduleConfig
from tltlab.options import Option

Beta = Annotated[float, Field(ge=0, lt=1)]
Method = Literal["eagle", "eagle3", "mtp"]


class LossConfig(FiniteModel):
    """Training objective of a drafter: `kind`, as published, but with means over steps and over the response's rows.

    "eagle" (arXiv 2401.15077): `hidden_weight` * SmoothL1 on the next hidden state + `token_weight` * cross-entropy
    against the target's distribution, one step, on the target's states. "hass" (arXiv 2408.15766): the same and
    `top_weight` * the part of that cross-entropy that is the target's 10 likeliest tokens', over `unroll` steps, each
    reading the states of the step before without their gradient. "eagle3" (arXiv 2503.01840): cross-entropy alone over
    `unroll` steps of training-time test, step i weighing `decay` ** i, and a row whose likeliest token a head of a part
    of the vocabulary cannot draft counting 0. None: 1, 3 and 7 steps, as in TLT. "mtp": the same loss, over 3 steps,
    for the model's own MTP layer. Not as published: no noise is added to the target's states.
    """

    kind: Literal["eagle", "hass", "eagle3", "mtp"] = "eagle"
    hidden_weight: NonNegativeFloat = 1.0
    token_weight: NonNegativeFloat = 0.1
    top_weight: NonNegativeFloat = 1.0
    unroll: Count | None = None
    decay: Annotated[float, Field(gt=0, le=1)] = 0.8

    @property
    def num_unrolled(self) -> int:
        return self.unroll or {"eagle": 1, "hass": 3, "eagle3": 7, "mtp": 3}[self.kind]

    @property
    def method(self) -> Method:
        """vLLM's name for the kind of head that is trained."""
        return "eagle" if self.kind == "hass" else self.kind


class OptimConfig(FiniteModel):
    """AdamW: the rate rises to `lr` over `warmup` updates.

    `betas`, `weight_decay` and `max_grad_norm`, at which gradients are clipped, are those of TLT's released trainer.
    """

    lr: PositiveFloat = 1e-3
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    weight_decay: NonNegativeFloat = 0.01
    max_grad_norm: PositiveFloat = 1.0
    warmup: NonNegativeInt = 20


class TextConfig(FiniteModel):
    """Selection of texts: at most `responses`, drawn at random, each cut to `max_response_tokens`.

    A file's columns hold text or token ids; text of a response ends in the end-of-sequence token. Where a file has no
    `response_column` the target answers its prompts, at `temperature`.
    """

    responses: Annotated[Count, Option("Most responses, drawn at random.", min=1)] = 512
    max_response_tokens: Annotated[Count, Option("Most tokens of a response.", min=1)] = 1024
    temperature: Annotated[
        float,
        Field(ge=0, allow_inf_nan=False),
        Option("Temperature of the model's responses to prompts alone.", min=0),
    ] = 1.0
    prompt_column: Annotated[str, Option("Column of the prompts, text or token ids.")] = "prompt"
    response_column: Annotated[str, Option("Column of the responses, text or token ids.")] = "response"
    chat: Annotated[bool, Option("Prompts go through the model's chat template.", names=("--chat",))] = False


class WarmUpConfig(FiniteModel):
    """Settings of `tltlab train-drafter`.

    At most `updates` updates of `tokens_per_update` tokens. Every `check_every` updates the acceptance of drafts of
    `depth` tokens is measured on held-out responses, `heldout` of the prompts, and training stops where their accept
    length reaches `until_accept_length`. `head` is a checkpoint to continue from. At most `memory_gb` of the target's
    hidden states stay on the host; others are recomputed.
    """

    loss: LossConfig = LossConfig()
    optim: OptimConfig = OptimConfig()
    texts: TextConfig = TextConfig()
    head: Annotated[str | None, Option("A head to continue from: a folder or a hub id.", names=("--from",))] = None
    updates: Annotated[int, Field(ge=0), Option("Most optimizer steps.", min=0)] = 500
    tokens_per_update: Annotated[int, Field(ge=2), Option("Tokens per step.", min=2)] = 4096
    until_accept_length: Annotated[
        float | None, Field(gt=1), Option("Stop when the held-out accept length reaches this.")
    ] = None
    check_every: Annotated[Count, Option("Updates between evaluations on held-out responses.", min=1)] = 50
    heldout: Annotated[float, Field(gt=0, lt=1), Option("Share of the prompts whose responses are held out.")] = 0.1
    depth: Annotated[
        int, Field(ge=1, le=255), Option("Tokens of a draft, where acceptance is measured.", min=1, max=255)
    ] = 8
    memory_gb: Annotated[PositiveFloat, Option("GB of hidden states kept; others are recomputed.")] = 1.0
    seed: Annotated[int, Field(ge=0), Option(min=0)] = 0


class ExportConfig(FiniteModel):
    """Check of an exported drafter on `num_prompts` prompts, with responses of at most `max_response_tokens`.

    Responses are greedy and at `temperature`, with drafts of `depth` tokens.
    """

    num_prompts: Annotated[Count, Option("Prompts on which acceptance is compared.", min=1)] = 10
    max_response_tokens: Annotated[int, Field(ge=2), Option("Most tokens of a response.", min=2)] = 128
    temperature: Annotated[PositiveFloat, Option("Temperature of the comparison, beside greedy.")] = 1.0
    depth: Annotated[Count, Option("Tokens of a draft.", min=1)] = 5
    seed: Annotated[int, Field(ge=0), Option(min=0)] = 0


class BufferConfig(FiniteModel):
    """A worker's training data: sequences of the last `rl_steps` RL steps, at most `max_bytes`.

    One-step-off sampling (TLT section 4.2): `carried_share` of an update's tokens come from the longest sequences of
    earlier RL steps, the rest from finished ones of this step; a shortage on one side is filled from the other.
    """

    max_bytes: PositiveInt = 1 << 30
    rl_steps: Count = 2
    carried_share: Share = 0.5

    @property
    def extra_bytes(self) -> int:
        """Most bytes of held-out sequences, and of prompts kept for other samples, each."""
        return self.max_bytes // 8


class DrafterConfig(FiniteModel):
    """A recipe's `[drafter]`: the learned drafter named `name`, trained on rollout workers while others still generate.

    `checkpoint` is a head's folder, or its name on the Hugging Face Hub, in a layout that `drafter.heads.layouts`
    reads. Without one the head starts from random weights and `fallback` serves until it was trained; an MTP layer
    starts from the model's own weights. An update trains `tokens_per_update` tokens per member. A trainer saves its
    state every `checkpoint_every` updates, and when it stops.
    `annotate` responses per worker and RL step are annotated for the trace with the drafter in service and with those
    of the last `ages` trainings.

    Engines of a machine share a quarter of its free memory for the hidden states of running responses. Beyond that,
    responses likely to be in the tail are kept.

    A trainer runs on `threads` CPU threads at priority `nice`. Members of a group train over nccl where each has its
    own CUDA device, and over gloo elsewhere. They meet at a free port of the driver's machine, to which only its own
    processes can connect unless workers are on other machines.
    """

    name: str = "learned"
    checkpoint: str | None = None
    fallback: str | None = "suffix"
    loss: LossConfig = LossConfig()
    optim: OptimConfig = OptimConfig()
    buffer: BufferConfig = BufferConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    canary: CanaryConfig = CanaryConfig()
    coordinator: CoordinatorConfig = CoordinatorConfig(gone_after_s=30.0)
    tokens_per_update: Count = 4096
    checkpoint_every: Count = 100
    annotate: NonNegativeInt = 4
    ages: NonNegativeInt = 3
    threads: Count = 1
    nice: Annotated[int, Field(ge=0, le=19)] = 19

    @property
    def pretrained(self) -> bool:
        """True if it serves before the run has trained it: from a checkpoint, or as the model's own."""
        return self.checkpoint is not None or self.loss.method == "mtp"
