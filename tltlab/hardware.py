"""GPUs and models as step times need them: bandwidth, FLOPs, memory, and shapes of weights; and the memory that this
machine has left.

Named ones are in hardware.json: dense figures of vendors' data sheets, and published model configurations, in bf16
unless stated.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from .config import FrozenModel, entries
from .errors import ConfigError, did_you_mean
from .files import read_json

BYTES_PER_VALUE = 2
GIB = float(1 << 30)
RUNTIME_BYTES = 0.65 * GIB
"""Per GPU, of what an engine may use: its context, communication, captured graphs and what fragments. Read off vLLM
0.19 with Llama-3.1-8B on an RTX 4090, whose cache had 2,588 blocks of 16 tokens."""
MEMORY_FRACTION = 0.9
"""Share of a GPU's memory that an engine takes by default (`gpu_memory_utilization`)."""
KV_BLOCK_TOKENS = 16
LARGE_BYTES = 70 * GIB
"""GPUs from here on have an engine admit more tokens and requests to an iteration: see `activation_bytes`."""

Dtype = Literal["bf16", "fp8", "int8", "fp4", "int4"]
"""How weights or keys and values lie in memory. `int4` and `int8` weights are multiplied in bf16 and int8."""
DTYPE_BYTES: dict[Dtype, float] = {"bf16": 2, "fp8": 1, "int8": 1, "fp4": 0.5625, "int4": 0.53}
"""Bytes per value; those of four bits with a scale of one byte per 16 (NVFP4), or of two per 128 and zeros (AWQ)."""

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Named = TypeVar("_Named", "Gpu", "ModelShape")


class Gpu(FrozenModel):
    """One GPU: HBM bytes per second, dense bf16 FLOP per second, bytes of memory, link bytes per second one way.

    The memory is what a program finds there: a card sold as 80 GB has about 79 GiB of it. A file may state it as
    `memory_gib`.
    `fp8_flops` and `fp4_flops` are None where the GPU has no such units: those weights are then multiplied in bf16.
    """

    name: str
    hbm_bytes_per_s: Positive
    peak_flops: Positive
    memory_bytes: Positive
    link_bytes_per_s: Positive
    fp8_flops: Positive | None = None
    fp4_flops: Positive | None = None

    @model_validator(mode="before")
    @classmethod
    def _in_gib(cls, fields: Any) -> Any:
        match fields:
            case {"memory_gib": int() | float() as gib, **rest}:
                return {**rest, "memory_bytes": gib * GIB}
        return fields

    def flops(self, weights: Dtype) -> float:
        """Dense FLOP per second of products with weights of this type."""
        fp8 = self.fp8_flops or self.peak_flops
        return {"fp8": fp8, "int8": fp8, "fp4": self.fp4_flops or self.peak_flops}.get(weights, self.peak_flops)


class ModelShape(FrozenModel):
    """A decoder: sizes of its layers, heads and vocabulary. Gated MLP of three matrices, attention of four.

    With `experts` the layers after the first `dense_layers` have that many MLPs of `expert_intermediate`, of which a
    token goes through `experts_per_token`, and one of `shared_intermediate` for every token. `latent` (MLA) is the
    values that a token keeps per layer in place of keys and values, `latent_queries` the rank of the queries' own
    projection (0: none), `value_dim` the width of a head's values. `window_layers` layers see only the last `window`
    tokens; `state_layers` (linear attention) keep nothing per token. With `qk_norm` queries and keys are normalised,
    two more small kernels. `weights` is how a checkpoint's matrices lie in memory, embeddings and LM head apart. A
    request has at most `max_context` tokens (0: not known).
    """

    name: str
    hidden: PositiveInt
    intermediate: NonNegativeInt
    layers: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    vocab: PositiveInt
    tied_embeddings: bool = False
    experts: NonNegativeInt = 0
    experts_per_token: NonNegativeInt = 0
    expert_intermediate: NonNegativeInt = 0
    shared_intermediate: NonNegativeInt = 0
    dense_layers: NonNegativeInt = 0
    latent: NonNegativeInt = 0
    latent_queries: NonNegativeInt = 0
    value_dim: NonNegativeInt = 0
    window: NonNegativeInt = 0
    window_layers: NonNegativeInt = 0
    state_layers: NonNegativeInt = 0
    qk_norm: bool = False
    weights: Dtype = "bf16"
    max_context: NonNegativeInt = 0

    @model_validator(mode="after")
    def _grouped(self) -> ModelShape:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if not 0 <= self.experts_per_token <= self.experts or bool(self.experts) != bool(self.experts_per_token):
            raise ValueError(f"experts_per_token ({self.experts_per_token}) of {self.experts} experts")
        if not self.experts and not self.intermediate:
            raise ValueError("intermediate is 0 and there are no experts: a layer has an MLP or experts")
        if self.window_layers + self.state_layers > self.layers or bool(self.window) != bool(self.window_layers):
            raise ValueError(
                f"{self.window_layers} layers of a window of {self.window} tokens and {self.state_layers} of linear "
                f"attention, of {self.layers}"
            )
        return self

    @property
    def attention_params(self) -> int:
        """Weights of one layer's attention: queries and output, keys and values."""
        if not self.latent:
            return self.hidden * (2 * self.heads * self.head_dim + 2 * self.kv_heads * self.head_dim)
        # Keys and values come out of the latent, which one matrix reads off the hidden state.
        width, values = self.heads * self.head_dim, self.heads * (self.value_dim or self.head_dim)
        rank = self.latent_queries
        queries = self.hidden * rank + rank * width if rank else self.hidden * width
        return queries + self.latent * (self.hidden + width + values) + values * self.hidden

    @property
    def layer_params(self) -> int:
        """Weights of one dense decoder layer: queries and output, keys and values, and the MLP."""
        return self.attention_params + 3 * self.hidden * self.intermediate

    @property
    def head_params(self) -> int:
        return self.hidden * self.vocab

    @property
    def expert_layers(self) -> int:
        """Layers that have experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def expert_params(self) -> int:
        """Weights of all experts of all layers."""
        return self.expert_layers * self.experts * 3 * self.hidden * self.expert_intermediate

    @property
    def body_params(self) -> int:
        """Weights of the layers that every forward pass reads: experts and LM head are not in."""
        mlp = (self.layers - self.expert_layers) * self.intermediate + self.expert_layers * self.shared_intermediate
        return self.layers * self.attention_params + 3 * self.hidden * mlp

    @property
    def active_params(self) -> int:
        """Weights that one token is multiplied by: its experts and the LM head are in.

        >>> round(model("Qwen3-235B-A22B").active_params / 1e9, 1)
        21.5
        """
        chosen = self.expert_params * self.experts_per_token // self.experts if self.experts else 0
        return self.body_params + chosen + self.head_params

    @property
    def weight_params(self) -> int:
        """Weights that a forward pass of many tokens reads: the LM head is in, the input embedding is not.

        >>> [f"{model(name).weight_params / 1e9:.2f}" for name in ("Qwen2.5-7B", "Qwen2.5-32B", "Llama-3.3-70B")]
        ['7.07', '31.98', '69.50']
        """
        return self.body_params + self.expert_params + self.head_params

    @property
    def stored_params(self) -> int:
        """Weights that lie in memory: the input embedding too, unless it is the LM head."""
        return self.weight_params + (0 if self.tied_embeddings else self.head_params)

    def stored_bytes(self, weights: Dtype | None = None) -> float:
        """Bytes of `stored_params`: layers in `weights` (default: the checkpoint's type), embeddings in bf16."""
        layers = self.body_params + self.expert_params
        return layers * DTYPE_BYTES[weights or self.weights] + (self.stored_params - layers) * BYTES_PER_VALUE

    @property
    def full_layers(self) -> int:
        """Layers that attend to the whole context."""
        return self.layers - self.window_layers - self.state_layers

    @property
    def layer_kv_values(self) -> int:
        """Values that one layer keeps of one token."""
        return self.latent or 2 * self.kv_heads * self.head_dim

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values, in bf16, that one token keeps over the layers that see the whole context."""
        return self.full_layers * self.layer_kv_values * BYTES_PER_VALUE


_TABLE = Path(__file__).with_name("hardware.json")
_KNOWN = read_json(_TABLE)
GPUS = entries(Gpu, _KNOWN["gpus"], _TABLE)
MODELS = entries(ModelShape, _KNOWN["models"], _TABLE)
_SUFFIXES = ("-FP8", "-2507", "-Instruct", "-Thinking")


def gpu(name: str | Gpu) -> Gpu:
    """Return the GPU of that name (SXM, 80 GB where there are several), or `name` itself. Raises ConfigError.

    >>> gpu("a100-sxm4-80gb").name
    'A100'
    """
    if isinstance(name, Gpu):
        return name
    bare = re.sub(r"(?i)-(?:sxm\d?|80gb)\b", "", name)
    return _find(bare, {g.name: g for g in GPUS}, "GPU", "hbm_bytes_per_s, peak_flops and so on")


def model(name: str | ModelShape) -> ModelShape:
    """The model of that name, or itself; an organisation before it and an -Instruct or -FP8 after it do not matter.

    >>> model("meta-llama/Llama-3.3-70B-Instruct").kv_bytes_per_token
    327680
    """
    if isinstance(name, ModelShape):
        return name
    bare = name.split("/")[-1]
    for suffix in _SUFFIXES:
        bare = bare.removesuffix(suffix)
    return _find(bare, {m.name: m for m in MODELS}, "model", "hidden, layers and so on")


def activation_bytes(gpu: Gpu, model: ModelShape, tp: int) -> float:
    """Bytes of an engine's largest iteration in addition to weights and cache, on each of `tp` GPUs.

    The residual stream, the MLP's two inputs and its product, in bf16, for the tokens of an iteration; and the logits
    of its requests, in bf16 and twice in fp32. vLLM V1 serves 8,192 tokens and 1,024 requests where a GPU has
    `LARGE_BYTES` (an A100 apart), else 2,048 and 256, by its defaults.
    """
    large = gpu.memory_bytes >= LARGE_BYTES and gpu.name != "A100"
    tokens, requests = (8192, 1024) if large else (2048, 256)
    routed = model.experts_per_token * model.expert_intermediate + model.shared_intermediate
    widest = max(model.intermediate, routed)
    return tokens * BYTES_PER_VALUE * (4 * model.hidden + 3 * widest / tp) + requests * model.vocab * 10.0


def kv_capacity_tokens(
    gpu: Gpu,
    model: ModelShape,
    tp: int,
    memory_fraction: float = MEMORY_FRACTION,
    *,
    weights: Dtype | None = None,
    kv: Dtype = "bf16",
) -> int:
    """Tokens of context that `tp` GPUs hold, as vLLM counts them: whole blocks of `KV_BLOCK_TOKENS`.

    An engine takes `memory_fraction` of a GPU's memory (`gpu_memory_utilization`). Its share of the weights goes off
    that, `activation_bytes` and `RUNTIME_BYTES`; the rest is blocks. KV heads are shared out over the GPUs, but each
    has at least one, and MLA's latent is on all of them. `weights` (default: the checkpoint's) and `kv` are how both
    lie in memory. Raises ConfigError where nothing is left for a block.

    >>> kv_capacity_tokens(gpu("RTX4090"), model("Llama-3.1-8B"), 1)  # as an engine had
    41408
    """
    if tp < 1 or not 0 < memory_fraction <= 1:
        raise ConfigError(f"tp {tp}, memory_fraction {memory_fraction}: tp is at least 1, the fraction in (0, 1]")
    usable = gpu.memory_bytes * memory_fraction - activation_bytes(gpu, model, tp) - RUNTIME_BYTES
    stored = model.stored_bytes(weights)
    values = model.latent or 2 * max(1.0, model.kv_heads / tp) * model.head_dim
    token_bytes = model.full_layers * values * DTYPE_BYTES[kv]
    blocks = int((usable - stored / tp) // (token_bytes * KV_BLOCK_TOKENS))
    if blocks < 1:
        raise ConfigError(
            f"{model.name} needs {stored / GIB:.0f} GiB for its weights, {tp} x {gpu.name} give "
            f"{max(0.0, tp * usable) / GIB:.0f} GiB: raise tp or memory_fraction"
        )
    return blocks * KV_BLOCK_TOKENS


def per_gpu_heads(model: ModelShape, tp: int) -> tuple[int, int]:
    """Query and KV heads on each of `tp` GPUs; with more GPUs than KV heads each has one, and several the same.

    Raises ConfigError where the heads, or the KV heads, cannot be shared out alike.

    >>> per_gpu_heads(model("Qwen2.5-32B"), 4)
    (10, 2)
    """
    if tp < 1 or model.heads % tp:
        raise ConfigError(f"tp {tp} does not divide the {model.heads} heads of {model.name}")
    if model.kv_heads % tp and tp % model.kv_heads:
        raise ConfigError(
            f"tp {tp} is neither a divisor nor a multiple of the {model.kv_heads} KV heads of {model.name}"
        )
    return model.heads // tp, max(1, model.kv_heads // tp)


def available_memory() -> int | None:
    """Bytes of this machine's memory that programs can still get; None where the kernel does not report it.

    The figure is the kernel's, or less where a container's limit is nearer.
    """
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line)
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return free if limit == "max" else min(free, max(int(limit) - int(used), 0))
    except (OSError, ValueError):
        return free


def _find(name: str, values: dict[str, _Named], kind: str, fields: str) -> _Named:
    folded = {n.lower(): value for n, value in values.items()}
    if name.lower() not in folded:
        nearest = did_you_mean(name, values)
        raise ConfigError(
            f"unknown {kind} {name!r}{nearest}: known are {', '.join(values)}; or describe it by {fields}"
        )
    return folded[name.lower()]
