"""The roofline cost model: seconds that the hardware needs, times a few constants; and the fit of these."""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Literal, TypeVar

import numpy as np
from pydantic import Field, PositiveInt, model_validator

from tltlab.arrays import Floats
from tltlab.config import FrozenModel
from tltlab.drafters.specs import STANDARD, Drafters
from tltlab.hardware import BYTES_PER_VALUE, DTYPE_BYTES, Dtype, Gpu, ModelShape, gpu, model, per_gpu_heads
from tltlab.records import frozen
from tltlab.strategy import Strategy

from .base import Coefficients, CostModel, IterationCost, Seconds, padded

Numbers = float | Floats
_Number = TypeVar("_Number", float, Floats, Numbers)
Share = Annotated[float, Field(gt=0, le=1)]
Times = Annotated[float, Field(ge=0, le=256)]


class Hardware(FrozenModel):
    """Hardware of one worker; names as in `tltlab.hardware`, else ConfigError, or records."""

    gpu: str | Gpu
    model: str | ModelShape
    tp: PositiveInt = 1

    @model_validator(mode="after")
    def _check_names(self) -> Hardware:
        gpu(self.gpu)
        per_gpu_heads(model(self.model), self.tp)
        return self


class Constants(Coefficients, FrozenModel):
    """Constants that data sheets do not state; None is a term that the data did not identify.

    The efficiencies are shares of the HBM bandwidth reached on weights and on the KV cache, of the peak FLOPs and of
    the link bandwidth. `knee` is how sharply reading weights gives way to multiplying by them: 1 adds the two up, a
    large value takes the larger. `prefill_efficiency` and `expert_efficiency` are relative to those of computing and of
    reading other weights. Requests choose experts independently; v tokens of one, a draft, as v**draft_spread requests
    would. An expert that is chosen is multiplied by `expert_rows` rows, full or not: a kernel's tile. `step_s` is per
    iteration, `layer_s` per layer (small kernels, launches), `allreduce_s` per all-reduce, of which a layer has two
    where tp > 1, `per_request_s` per request (engine's CPU). `sd_base_s`, `sd_idle_s`, `draft_level_s` and
    `draft_level_per_request_s` are as in the linear model, on top of what the hardware needs to draft; `tree_s` is what
    drafts with more than one branch take besides, `verify_token_s` what a token to verify takes beside the target's
    matrices (sampling, rejection). Where several queries of a request attend, its keys and values are read
    `verify_reads` times.
    """

    memory_efficiency: Share
    compute_efficiency: Share
    kv_efficiency: Share
    link_efficiency: Share
    prefill_efficiency: Annotated[float, Field(gt=0, le=2)] = 1.0
    expert_efficiency: Share = 1.0
    draft_spread: Share = 1.0
    expert_rows: Times = 0.0
    knee: Annotated[float, Field(ge=1, le=20)]
    step_s: Seconds
    layer_s: Seconds
    allreduce_s: Seconds
    per_request_s: Seconds
    sd_base_s: Seconds | None = None
    sd_idle_s: Seconds | None = None
    draft_level_s: Seconds | None = None
    draft_level_per_request_s: Seconds | None = None
    tree_s: Seconds = 0.0
    verify_token_s: Seconds = 0.0
    verify_reads: Times = 1.0


@frozen
class Ideal:
    """Seconds on `tp` GPUs at the rates of their data sheets, and counts; arrays where there are many measurements.

    Per forward pass: `weights_s` to read all weights but experts, `experts_s` to read all experts, of which a token
    takes the share `chosen`, and `expert_row_s` to multiply all of them by one row. Per token: `token_s` to multiply by
    its weights, `link_token_s` for the bytes of its all-reduces. Per token of context: `context_s` to read its keys and
    values, `query_context_s` for one query to attend to it. `window_s` per request: the same for layers that see only a
    window, which is taken to be full.
    `draft_*` are of one level of a drafter that has one dense decoder layer of the model, a projection of two hidden
    states to one, and an LM head (EAGLE), or of one pass of one with `draft_layers` layers.
    """

    weights_s: Numbers
    experts_s: Numbers
    expert_row_s: Numbers
    chosen: Numbers
    token_s: Numbers
    link_token_s: Numbers
    context_s: Numbers
    query_context_s: Numbers
    window_s: Numbers
    draft_weights_s: Numbers
    draft_token_s: Numbers
    layers: Numbers
    expert_layers: Numbers
    allreduces: Numbers

    @classmethod
    @lru_cache(maxsize=256)
    def of(
        cls,
        gpu_source: str | Gpu,
        model_source: str | ModelShape,
        tp: int,
        weights: Dtype | None = None,
        kv: Dtype = "bf16",
        draft_vocab: int | None = None,
        draft_layers: int = 1,
    ) -> Ideal:
        """Layers' weights in `weights` (default: the checkpoint's type), the LM head and the drafter in bf16.

        Each GPU holds its share of the experts. KV heads are shared out and, where there are more GPUs than heads,
        held twice; the latent of MLA lies on every GPU.
        """
        device, shape = gpu(gpu_source), model(model_source)
        kind = weights or shape.weights
        bandwidth, flops = tp * device.hbm_bytes_per_s, tp * device.peak_flops
        layers = shape.active_params - shape.head_params
        copies = tp if shape.latent else per_gpu_heads(shape, tp)[1] * tp / shape.kv_heads
        token_bytes = copies * shape.layer_kv_values * DTYPE_BYTES[kv]
        draft_layer = shape.attention_params + 3 * shape.hidden * (shape.intermediate or 3 * shape.hidden)
        draft = draft_layers * draft_layer + shape.hidden * (draft_vocab or shape.vocab) + 2 * shape.hidden**2
        allreduces = 2 * shape.layers if tp > 1 else 0
        width = shape.latent or shape.head_dim
        return cls(
            weights_s=(shape.body_params * DTYPE_BYTES[kind] + shape.head_params * BYTES_PER_VALUE) / bandwidth,
            experts_s=shape.expert_params * DTYPE_BYTES[kind] / bandwidth,
            expert_row_s=2 * shape.expert_params / (tp * device.flops(kind)),
            chosen=shape.experts_per_token / shape.experts if shape.experts else 0.0,
            token_s=2 * layers / (tp * device.flops(kind)) + 2 * shape.head_params / flops,
            # A ring sends and receives each value (tp - 1)/tp times, once to add up and once to hand out.
            link_token_s=allreduces * 2 * (tp - 1) / tp * shape.hidden * BYTES_PER_VALUE / device.link_bytes_per_s,
            context_s=shape.full_layers * token_bytes / bandwidth,
            query_context_s=4 * shape.full_layers * shape.heads * width / flops,
            window_s=shape.window_layers * shape.window * token_bytes / bandwidth,
            draft_weights_s=draft * BYTES_PER_VALUE / bandwidth,
            draft_token_s=2 * draft / flops,
            layers=shape.layers,
            expert_layers=shape.expert_layers,
            allreduces=allreduces,
        )


def forward_s(ideal: Ideal, c: Constants, *, tokens: Numbers, batch: Numbers) -> Numbers:
    """A forward pass of `tokens` tokens of `batch` requests, without the context's share."""
    fixed = c.step_s + c.layer_s * ideal.layers + c.allreduce_s * ideal.allreduces
    requests = (c.per_request_s + ideal.window_s / c.kv_efficiency) * batch
    return fixed + requests + matrices_s(ideal, c, tokens=tokens, batch=batch)


def matrices_s(ideal: Ideal, c: Constants, *, tokens: Numbers, batch: Numbers, prompt_tokens: Numbers = 0.0) -> Numbers:
    """Bytes of weights, operations of tokens and of prompts in the same iteration; bytes of all-reduces."""
    read_s = ideal.weights_s / c.memory_efficiency
    computed_s = ideal.token_s / c.compute_efficiency * (tokens + prompt_tokens / c.prefill_efficiency)
    if isinstance(ideal.experts_s, np.ndarray) or ideal.experts_s:
        independent = batch ** (1.0 - c.draft_spread) * tokens**c.draft_spread + prompt_tokens
        touched = expected_experts(ideal.chosen, independent)
        read_s = read_s + ideal.experts_s / (c.memory_efficiency * c.expert_efficiency) * touched
        computed_s = computed_s + ideal.expert_row_s / c.compute_efficiency * touched * c.expert_rows
    return rounded_max(read_s, computed_s, c.knee) + ideal.link_token_s / c.link_efficiency * (tokens + prompt_tokens)


def added_prefill_s(ideal: Ideal, c: Constants, *, tokens: Numbers, batch: Numbers, prompt_tokens: Numbers) -> Numbers:
    """Seconds that prompt tokens add to matrices that `tokens` are multiplied by anyway."""
    together: Numbers = matrices_s(ideal, c, tokens=tokens, batch=batch, prompt_tokens=prompt_tokens)
    return together - matrices_s(ideal, c, tokens=tokens, batch=batch)


def expected_experts(chosen: Numbers, tokens: Numbers) -> Numbers:
    """The share of experts that at least one of `tokens` tokens takes, each taking the share `chosen` at random.

    >>> round(expected_experts(8 / 128, 16), 3)
    0.644
    """
    return 1.0 - (1.0 - chosen) ** tokens


def context_slope_s(ideal: Ideal, c: Constants, *, queries: Numbers) -> Numbers:
    """Per token of context, for `queries` tokens per request that attend to it."""
    # Of requests without a draft the context is read once.
    read_s = ideal.context_s * (1.0 + (c.verify_reads - 1.0) * np.minimum(queries - 1.0, 1.0)) / c.kv_efficiency
    return rounded_max(read_s, ideal.query_context_s / c.compute_efficiency * queries, c.knee)


def draft_level_s(ideal: Ideal, c: Constants, *, batch: Numbers, top_k: Numbers, layers: int = 1) -> Numbers:
    """One pass of a drafter with weights, on `top_k` tokens of each request: a level, or a block."""
    network = rounded_max(
        ideal.draft_weights_s / c.memory_efficiency, ideal.draft_token_s / c.compute_efficiency * batch * top_k, c.knee
    )
    launched_s = c.need("draft_level_s") + c.layer_s * (layers - 1)
    return network + launched_s + c.need("draft_level_per_request_s") * batch


def prefill_token_s(ideal: Ideal, c: Constants) -> Numbers:
    """One prompt token: prompts are long enough to be bound by compute."""
    return ideal.token_s / (c.compute_efficiency * c.prefill_efficiency) + ideal.link_token_s / c.link_efficiency


def rounded_max(a: _Number, b: _Number | float, knee: float) -> _Number:
    """The larger of both, or with a `knee` below 0 the lesser, rounded off where they are equal.

    >>> round(rounded_max(1.0, 1.0, 4.0), 2), round(rounded_max(1.0, 3.0, 4.0), 2)
    (1.19, 3.01)
    """
    rounded: _Number = (a**knee + b**knee) ** (1.0 / knee)
    return rounded


class RooflineCosts(CostModel):
    """Costs of one model on `tp` GPUs of one kind, from their data sheets and fitted constants.

    `gpu` and `model` are names that `tltlab.hardware` knows, or records of one's own. With b requests whose contexts
    sum to S, v tokens to verify each and draft depth d, all terms at least 0 and hence monotone in b, v, S and d:

        step_s + layer_s*layers + allreduce_s*allreduces + per_request_s*b
          + rounded_max(weights, multiplying b*v tokens) + all-reduce bytes of b*v tokens
          + S * rounded_max(reading keys and values, v queries attending)
          + [if drafting]              sd_base_s + verify_token_s*b*v
                                       + d*(drafter's network on b*top_k tokens + draft_level_s + ...*b)
          + [a drafter loaded, d = 0]  sd_idle_s

    with rounded_max(x, y) = (x**knee + y**knee)**(1/knee). Model-free drafters have no levels, only `sd_base_s`; drafts
    of several branches pay `tree_s`. A block drafter runs once on b*(d + 1) tokens in place of d times on b*top_k. In a
    mixture of experts, only the weights that b*v tokens are expected to use are read. `weights` is how the layers'
    matrices lie in memory (None: as in the checkpoint), `kv` keys and values; `draft_vocab` the drafter's vocabulary
    where it has one of its own.
    """

    kind: Literal["roofline"] = "roofline"
    gpu: str | Gpu
    model: str | ModelShape
    tp: PositiveInt
    weights: Dtype | None = None
    kv: Dtype = "bf16"
    draft_vocab: PositiveInt | None = None
    constants: Constants

    @model_validator(mode="after")
    def _check_names(self) -> RooflineCosts:
        Hardware(gpu=self.gpu, model=self.model, tp=self.tp)
        return self

    @property
    def ideal(self) -> Ideal:
        return self._ideal_of(1)

    def _ideal_of(self, draft_layers: int) -> Ideal:
        return Ideal.of(self.gpu, self.model, self.tp, self.weights, self.kv, self.draft_vocab, draft_layers)

    @property
    def tensor_parallel(self) -> int:
        return self.tp

    @property
    def name(self) -> str:
        """Source for `load_costs` of an engine's profile of a known model; the kind for other constants."""
        if self.evidence is None:
            return self.kind
        return f"{self.evidence.engine}:{self.tp}x{gpu(self.gpu).name}:{model(self.model).name}"

    def iteration(
        self,
        strategy: Strategy,
        *,
        tokens_to_verify: float | None = None,
        drafter_loaded: bool = False,
        drafters: Drafters = STANDARD,
    ) -> RooflineIteration:
        once = self.constants.once_s(strategy, drafter_loaded)
        passes, width, layers = drafters.network_passes(strategy), 1, 1
        if passes:
            width, layers = drafters.tokens_per_pass(strategy), drafters[strategy.drafter].layers
            self.constants.need("draft_level_s")
            self.constants.need("draft_level_per_request_s")
            once += self.constants.tree_s * (strategy.top_k > 1)
        return RooflineIteration(
            ideal=self._ideal_of(layers),
            constants=self.constants,
            tokens_to_verify=float(strategy.tokens_to_verify) if tokens_to_verify is None else tokens_to_verify,
            passes=passes,
            width=width,
            layers=layers,
            once_s=once,
            sample_token_s=self.constants.verify_token_s if strategy.speculates else 0.0,
            graph_sizes=self.graph_sizes or (),
        )

    def prefill_s(self, tokens: float) -> float:
        return float(prefill_token_s(self.ideal, self.constants)) * tokens


@frozen
class RooflineIteration(IterationCost):
    """Seconds of one iteration under one strategy: `passes` of a drafting network, `once_s` besides the forward.

    A pass of the network, of `layers` decoder layers, computes `width` tokens of each request. `sample_token_s` is per
    token to verify.
    """

    ideal: Ideal
    constants: Constants
    tokens_to_verify: float
    passes: int
    width: int
    layers: int
    once_s: float
    sample_token_s: float = 0.0
    graph_sizes: tuple[int, ...] = ()

    def without_context_s(self, batch: int) -> float:
        tokens = padded(batch * self.tokens_to_verify, self.graph_sizes)
        forward = float(forward_s(self.ideal, self.constants, tokens=tokens, batch=batch))
        return forward + self.once_s + self.sample_token_s * batch * self.tokens_to_verify + self.draft_s(batch)

    def added_s(self, batch: int, prompt_tokens: float, apart_s: float) -> float:
        """Nearly nothing while reading the weights bounds the iteration; experts that only prompts touch are read."""
        tokens = padded(batch * self.tokens_to_verify, self.graph_sizes)
        added = added_prefill_s(self.ideal, self.constants, tokens=tokens, batch=batch, prompt_tokens=prompt_tokens)
        return min(float(added), apart_s)

    def context_slope_s(self, batch: int) -> float:
        return float(context_slope_s(self.ideal, self.constants, queries=self.tokens_to_verify))

    def draft_s(self, batch: int) -> float:
        if not self.passes:
            return 0.0
        pass_s = draft_level_s(self.ideal, self.constants, batch=batch, top_k=self.width, layers=self.layers)
        return self.passes * float(pass_s)
