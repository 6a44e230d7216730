"""What GPUs and models are, as far as step times need to know: bandwidth, FLOPs, memory, and shapes of weights; and the
memory that this machine has left.

Dense figures of vendors' data sheets and of published model configurations, bf16 throughout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import Field, model_validator

from .config import FrozenModel
from .errors import ConfigError

BYTES_PER_VALUE = 2
RESERVED_BYTES = 2e9
"""Per GPU, for activations and the runtime itself, out of what an engine may use."""

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(gt=0)]
_Named = TypeVar("_Named", "Gpu", "ModelShape")


class Gpu(FrozenModel):
    """One GPU: HBM bytes per second, dense bf16 FLOP per second, bytes of memory, link bytes per second one way."""

    name: str
    hbm_bytes_per_s: Positive
    peak_flops: Positive
    memory_bytes: Positive
    link_bytes_per_s: Positive


class ModelShape(FrozenModel):
    """A dense decoder: sizes of its layers, heads and vocabulary. Gated MLP of three matrices, attention of four."""

    name: str
    hidden: Count
    intermediate: Count
    layers: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    vocab: Count
    tied_embeddings: bool = False

    @model_validator(mode="after")
    def _grouped(self) -> ModelShape:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        return self

    @property
    def layer_params(self) -> int:
        """Weights of one decoder layer: queries and output, keys and values, and the MLP."""
        attention = 2 * self.heads * self.head_dim + 2 * self.kv_heads * self.head_dim
        return self.hidden * (attention + 3 * self.intermediate)

    @property
    def head_params(self) -> int:
        return self.hidden * self.vocab

    @property
    def weight_params(self) -> int:
        """Weights that one forward pass reads: the LM head is in, the input embedding is not.

        >>> [f"{model(name).weight_params / 1e9:.2f}" for name in ("Qwen2.5-7B", "Qwen2.5-32B", "Llama-3.3-70B")]
        ['7.07', '31.98', '69.50']
        """
        return self.layers * self.layer_params + self.head_params

    @property
    def stored_params(self) -> int:
        """Weights that lie in memory: the input embedding too, unless it is the LM head."""
        return self.weight_params + (0 if self.tied_embeddings else self.head_params)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values that one token keeps, over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * BYTES_PER_VALUE


_GPUS = (
    Gpu(name="H100", hbm_bytes_per_s=3.35e12, peak_flops=989e12, memory_bytes=80e9, link_bytes_per_s=450e9),
    Gpu(name="H200", hbm_bytes_per_s=4.8e12, peak_flops=989e12, memory_bytes=141e9, link_bytes_per_s=450e9),
    Gpu(name="A100", hbm_bytes_per_s=2.039e12, peak_flops=312e12, memory_bytes=80e9, link_bytes_per_s=300e9),
)


_FIELDS = ("name", "hidden", "intermediate", "layers", "heads", "kv_heads", "head_dim", "vocab", "tied_embeddings")
_MODELS = tuple(
    ModelShape.model_validate(dict(zip(_FIELDS, row, strict=True)))
    for row in (
        ("Qwen2.5-0.5B", 896, 4864, 24, 14, 2, 64, 151936, True),
        ("Qwen2.5-1.5B", 1536, 8960, 28, 12, 2, 128, 151936, True),
        ("Qwen2.5-7B", 3584, 18944, 28, 28, 4, 128, 152064, False),
        ("Qwen2.5-32B", 5120, 27648, 64, 40, 8, 128, 152064, False),
        ("Qwen3-32B", 5120, 25600, 64, 64, 8, 128, 151936, False),
        ("Llama-3-8B", 4096, 14336, 32, 32, 8, 128, 128256, False),
        ("Llama-3.1-8B", 4096, 14336, 32, 32, 8, 128, 128256, False),
        ("Llama-3.3-70B", 8192, 28672, 80, 64, 8, 128, 128256, False),
    )
)


def gpu(name: str) -> Gpu:
    """The GPU of that name (SXM, 80 GB where there are several); ConfigError names those that are known."""
    return _find(name, {g.name: g for g in _GPUS}, "GPU", "hbm_bytes_per_s, peak_flops and so on")


def model(name: str) -> ModelShape:
    """The model of that name; an organisation before it and an -Instruct after it do not matter.

    >>> model("meta-llama/Llama-3.3-70B-Instruct").kv_bytes_per_token
    327680
    """
    bare = name.split("/")[-1]
    return _find(bare.removesuffix("-Instruct"), {m.name: m for m in _MODELS}, "model", "hidden, layers and so on")


def kv_capacity_tokens(gpu: Gpu, model: ModelShape, tp: int, memory_fraction: float = 0.9) -> int:
    """Tokens of context that `tp` GPUs hold beside the weights, an engine taking `memory_fraction` of their memory.

    Raises ConfigError where the weights alone do not fit.
    """
    if tp < 1 or not 0 < memory_fraction <= 1:
        raise ConfigError(f"tp {tp}, memory_fraction {memory_fraction}: tp is at least 1, the fraction in (0, 1]")
    usable = tp * (gpu.memory_bytes * memory_fraction - RESERVED_BYTES)
    weights = model.stored_params * BYTES_PER_VALUE
    tokens = int((usable - weights) // model.kv_bytes_per_token)
    if tokens < 1:
        raise ConfigError(
            f"{model.name} needs {weights / 1e9:.0f} GB for its weights, {tp} x {gpu.name} give {usable / 1e9:.0f} GB: "
            f"raise tp or memory_fraction"
        )
    return tokens


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
    """Bytes of this machine's memory that programs can still get; None where nothing says it.

    That is what the kernel says, or less where a container's limit is nearer.
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


def _find(name: str, known: dict[str, _Named], what: str, fields: str) -> _Named:
    folded = {n.lower(): value for n, value in known.items()}
    if name.lower() not in folded:
        raise ConfigError(f"unknown {what} {name!r}: known are {', '.join(known)}; or describe it by {fields}")
    return folded[name.lower()]
