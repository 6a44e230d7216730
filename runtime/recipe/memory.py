"""What a recipe's processes hold on GPUs and hosts, part by part and phase by phase, each with its formula.

A run tells what it held by the same names (`tltlab.runtime.run.memory`), which a test holds against this.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Literal, get_args

from pydantic import ValidationError

from tltlab.drafters.specs import DrafterSpec, LearnedSpec, NgramSpec, SuffixSpec
from tltlab.drafters.suffix import TREE_BYTES_PER_TOKEN
from tltlab.errors import ConfigError
from tltlab.files import read_json
from tltlab.hardware import Gpu, ModelShape, per_gpu_heads
from tltlab.hardware import model as model_by_name

from .recipe import Recipe

PROMPT_TOKENS = 1024
"""Of a prompt, where `data.max_prompt_tokens` does not limit them."""
GRAPH_BYTES = 2 << 30
"""For CUDA graphs that are not planned, flat."""
LOGITS = 1 << 26
"""That lie in memory at once, as in `token_logprobs` and `drafter_loss`."""
CONTEXT_BYTES = 1e9
TRAINER_BYTES = 2e9
"""Of a process on a GPU that computes nothing: CUDA context, NCCL's and cuBLAS's buffers."""
BUCKET_BYTES = 32 << 20
DEVICE_BUCKET_BYTES = 256 << 20
"""Of new weights on their way, by the host and between devices (`engine.weights`, `vllm.transfer`)."""

Phase = Literal["rollout", "idle training", "training", "sync"]
"""Of an RL step: engines generate; those that are done lend their devices to drafter trainers; trainers have the
samples; new weights go to the engines."""
PHASES: tuple[Phase, ...] = get_args(Phase)
GENERATING: tuple[Phase, ...] = ("rollout", "idle training")
Device = Literal["GPU", "host"]
Way = Literal["host", "nccl", "ipc"]

WORKER, RANK, SPOT, DRIVER = "rollout worker", "trainer rank", "drafter trainer", "driver"
STORE, REWARDS, RAY = "Ray's object store", "reward process", "Ray"

HOST_RUNTIME = {WORKER: 0.85e9, RANK: 0.75e9, SPOT: 0.65e9, DRIVER: 0.75e9, REWARDS: 0.35e9, RAY: 0.6e9}
"""Resident bytes of a process before it holds anything: Python, torch, vLLM, and what glibc keeps of freed tensors."""

_VLLM_UTILIZATION, _CPU_KV_BYTES = 0.92, 256 << 20
"""vLLM's own, where the recipe has none: a share of a GPU, bytes on a CPU."""
_TREE_BYTES = {"suffix": TREE_BYTES_PER_TOKEN, "ngram": 500}
"""Of a running response's token, by kind of drafter."""
_VLLM_TEXT_BYTES = 160
"""What vLLM and the ledger keep of a generated token: ids and log-probs in several lists of Python's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Something that takes memory, the process whose it is, and how its size was reckoned."""

    name: str
    num_bytes: float
    formula: str
    process: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedPart:
    """A part, where it lies and in which phases; of each process on a host, on each of its GPUs."""

    part: Part
    device: Device
    phases: tuple[Phase, ...]


class Holdings(list[PlacedPart]):
    """What one kind of process holds; `device` is where it computes."""

    def __init__(self, process: str, device: Device) -> None:
        super().__init__()
        self.process, self.device = process, device

    def add(
        self, name: str, num_bytes: float, formula: str, phases: Iterable[Phase] = PHASES, device: Device | None = None
    ) -> None:
        """Nothing where it takes nothing."""
        if num_bytes > 0:
            part = Part(name=name, num_bytes=float(num_bytes), formula=formula, process=self.process)
            self.append(PlacedPart(part=part, device=device or self.device, phases=tuple(phases)))

    def of(self, device: Device, phase: Phase) -> list[Part]:
        """The parts there and then."""
        return [item.part for item in self if item.device == device and phase in item.phases]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryInputs:
    """What sizes follow from: the recipe, its model, its GPU if one is named, and what its policy drafts with.

    `drafters` are those that the policy may end up with, `drafted_rows` the most tokens that an iteration verifies,
    `way` that of new weights, `graph_bytes` those of planned CUDA graphs, None where none are planned.
    """

    recipe: Recipe
    shape: ModelShape
    gpu: Gpu | None
    on_gpu: bool
    colocated: bool  # on GPUs: without, nobody sleeps
    drafters: Mapping[str, DrafterSpec]
    drafted_rows: int
    way: Way
    graph_bytes: float | None = None

    @property
    def device(self) -> Device:
        return "GPU" if self.on_gpu else "host"

    @property
    def tokens(self) -> int:
        """Of the longest prompt and response."""
        return context_tokens(self.recipe)

    @property
    def engine_value(self) -> int:
        return value_bytes(self.recipe.rollout.vllm.get("dtype"), on_gpu=self.on_gpu)

    @property
    def max_num_seqs(self) -> int:
        return int(self.recipe.rollout.vllm.get("max_num_seqs", vllm_batch(self.gpu)))

    @property
    def running(self) -> int:
        """Requests that an engine runs at a time."""
        return min(requests_per_engine(self.recipe), self.max_num_seqs)

    @property
    def responses(self) -> int:
        """Of one rollout."""
        return self.recipe.rollout.prompts_per_step * self.recipe.rollout.group_size

    @property
    def learned(self) -> bool:
        """Whether engines have a learned drafter."""
        return any(isinstance(spec, LearnedSpec) for spec in self.drafters.values()) or self.recipe.drafter is not None

    @property
    def head_params(self) -> int:
        """Of an EAGLE head, or the recipe's: a decoder layer and what joins its inputs, norms included.

        An EAGLE-3 head's attention reads inputs twice as wide, and three of the target's states come in.
        """
        shape = self.shape
        params = shape.layer_params + 2 * shape.hidden**2 + shape.hidden
        if self.recipe.drafter is None or self.recipe.drafter.loss.method != "eagle3":
            return params
        wider = (shape.heads + 2 * shape.kv_heads) * shape.head_dim * shape.hidden
        return params + wider + shape.hidden**2 + 3 * shape.hidden

    @property
    def row_bytes(self) -> int:
        """Hidden states of one token, as they are captured: with EAGLE-3 those of three more layers."""
        method = self.recipe.drafter.loss.method if self.recipe.drafter is not None else "eagle"
        return self.engine_value * self.shape.hidden * (4 if method == "eagle3" else 1)

    @property
    def shared_params(self) -> int:
        """Of embedding and LM head."""
        return self.shape.stored_params - self.shape.layers * self.shape.layer_params

    @property
    def loaded(self) -> tuple[Phase, ...]:
        """The phases in which engines have their weights on their device; colocated they sleep while trainers train."""
        return tuple(phase for phase in PHASES if not (self.colocated and phase == "training"))

    @property
    def generating(self) -> tuple[Phase, ...]:
        """Those in which they have their caches there; colocated, weights within a device come before these do."""
        return GENERATING if self.colocated and self.way == "ipc" else self.loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """What a rollout worker holds. `at_once` responses of full length fit into its KV cache, of `running`."""

    parts: Holdings
    at_once: int
    running: int


def shape_of(model: str) -> ModelShape:
    """Read MODEL/config.json where that is a folder, else look the last part of the id up in `tltlab.hardware`.

    ConfigError for a model of neither kind, and for one that is no dense decoder.
    """
    path = Path(model) / "config.json"
    if not path.is_file():
        try:
            return model_by_name(model)
        except ConfigError as error:
            raise ConfigError(
                f"cannot tell the shape of model {model!r}: there is no {path}, and it is an {error}; download it first"
            ) from error
    config = read_json(path)
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is no model configuration: expected an object")
    if config.get("num_experts") or config.get("num_local_experts"):
        raise ConfigError(f"{path} is of a mixture of experts, and estimates are for dense models")
    try:
        heads = config["num_attention_heads"]
        return ModelShape(
            name=Path(model).resolve().name,
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab=config["vocab_size"],
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        )
    except (KeyError, TypeError, ValidationError, ZeroDivisionError) as error:
        raise ConfigError(f"{path} is not of a dense decoder: {type(error).__name__}: {error}") from error


def engine_memory(sizes: MemoryInputs) -> EngineMemory:
    """Weights, KV cache, graphs, drafters, captured states. With a known GPU vLLM's KV cache is the rest of its share.

    Asleep (level 1) an engine keeps its weights on the host, pinned: torch keeps that memory for good once it was
    used. ConfigError where tensor parallelism does not divide the heads, or no response of full length fits.
    """
    recipe, shape = sizes.recipe, sizes.shape
    rollout, tp = recipe.rollout, recipe.rollout.tensor_parallel_size
    try:
        _, kv_heads = per_gpu_heads(shape, tp)
    except ConfigError as error:
        raise ConfigError(f"rollout.tensor_parallel_size: {error}") from error
    value, tokens, loaded, generating = sizes.engine_value, sizes.tokens, sizes.loaded, sizes.generating
    parts = Holdings(WORKER, sizes.device)
    # vLLM pads the vocabulary to a multiple of 64.
    padding = -shape.vocab % 64 * shape.hidden * (1 if shape.tied_embeddings else 2)
    weights = (shape.stored_params + padding) * value / tp
    formula = f"{value} bytes x parameters / TP"
    if not sizes.on_gpu:
        weights += (sizes.shared_params + padding) * value / tp
        formula += "; the CPU build has embedding and LM head packed too"
    parts.add("engine weights", weights, formula, loaded)
    if sizes.learned:
        formula = "its head; embedding and LM head are the target's"
        parts.add("drafter, serving", sizes.head_params * value, f"{value} bytes x parameters of {formula}", loaded)
    if sizes.on_gpu:
        parts.add("engine runtime", CONTEXT_BYTES, "flat: context, communication")
        batched = recipe.rollout.batched_tokens
        layer = value * batched * (3 * shape.intermediate / tp + 4 * shape.hidden)
        rows = max(sizes.max_num_seqs, sizes.drafted_rows)
        # bfloat16, float32, its log-softmax and its softmax.
        sampling = 14 * rows * shape.vocab
        formula = f"the larger of a layer ({batched} tokens) and 14 bytes x {rows} rows x vocabulary"
        parts.add("engine activations", max(layer, sampling), formula, generating)
        if not rollout.vllm.get("enforce_eager", False):
            planned = "planned: graphs x layers x 1 MB, and buffers"
            graphs = (GRAPH_BYTES, "flat") if sizes.graph_bytes is None else (sizes.graph_bytes, planned)
            parts.add("CUDA graphs", *graphs)
    layers = shape.layers + sizes.learned
    per_token = 2 * layers * kv_heads * shape.head_dim * value
    kv_bytes = rollout.vllm.get("kv_cache_memory_bytes", None if sizes.on_gpu else _CPU_KV_BYTES)
    if kv_bytes is not None:
        kv, formula = float(kv_bytes), "kv_cache_memory_bytes"
    elif sizes.gpu is None:
        kv, formula = float(sizes.running * tokens * per_token), "2 x layers x KV heads x head size x tokens x requests"
    else:
        share = rollout.vllm.get("gpu_memory_utilization", _VLLM_UTILIZATION)
        kv = sizes.gpu.memory_bytes * share - sum(part.num_bytes for part in parts.of("GPU", "rollout"))
        formula = f"what gpu_memory_utilization = {share:g} leaves"
    if kv < tokens * per_token:
        raise ConfigError(
            f"an engine's KV cache has room for {max(0.0, kv) / 1e9:.2f} GB per GPU, one response of full length "
            f"({tokens} tokens) takes {tokens * per_token / 1e9:.2f} GB: raise rollout.tensor_parallel_size or "
            "rollout.vllm.gpu_memory_utilization, or lower rollout.max_response_tokens"
        )
    parts.add("KV cache", kv * shape.layers / layers, formula, generating)
    if sizes.learned:
        parts.add("KV cache, drafter", kv / layers, f"{formula}; one layer of {layers}", generating)
    if sizes.colocated:
        formula = "weights and the drafter's, kept for it while it sleeps, pinned"
        asleep = tp * (weights + sizes.learned * sizes.head_params * value)
        parts.add("engine asleep", asleep, formula, device="host")
    _engine_host(sizes, parts)
    sent_memory(sizes, parts)
    return EngineMemory(parts=parts, at_once=int(kv // (tokens * per_token)), running=sizes.running)


def _engine_host(sizes: MemoryInputs, parts: Holdings) -> None:
    """What a rollout worker holds on the host whatever it computes on."""
    recipe, tokens, running = sizes.recipe, sizes.tokens, sizes.running
    tp = recipe.rollout.tensor_parallel_size
    processes = 1 + tp if tp > 1 else 1
    formula = f"measured, x {processes} processes"
    parts.add("rollout worker runtime", processes * HOST_RUNTIME[WORKER], formula, device="host")
    text = _VLLM_TEXT_BYTES * running * tokens
    formula = f"{_VLLM_TEXT_BYTES} bytes x {running} running responses x {tokens} tokens"
    parts.add("texts", text, formula, GENERATING, device="host")
    parts.add("drafter history", history_bytes(sizes), "history_mib of the drafters in use", device="host")
    growing = sum(_TREE_BYTES.get(spec.kind, 0) for spec in sizes.drafters.values())
    formula = f"{growing} bytes x {running} running responses x {tokens} tokens"
    parts.add("drafter trees", growing * running * tokens, formula, GENERATING, device="host")
    if recipe.drafter is None:
        return
    captured = min(recipe.drafter.capture_bytes or math.inf, running * tokens * sizes.row_bytes)
    formula = f"hidden states of {running} running responses; at most drafter.capture_bytes"
    parts.add("captured states", captured, formula, device="host")
    if sizes.on_gpu:
        formula = "2 x hidden states of max_num_batched_tokens, pinned"
        moving = 2 * recipe.rollout.batched_tokens * (sizes.row_bytes + 8)
        parts.add("captured states, on their way", moving, formula, device="host")
    parts.add("fed states", 2 * tokens * sizes.row_bytes, "a response's states, sent and received", device="host")


def history_bytes(sizes: MemoryInputs) -> float:
    """Most that the model-free drafters in use remember of finished responses; no more than all of them take."""
    model_free = [spec for spec in sizes.drafters.values() if isinstance(spec, NgramSpec | SuffixSpec)]
    bounds = [spec.arguments()["history_mib"] for spec in model_free]
    most = float(sizes.recipe.train.steps * sizes.responses * sizes.tokens * (TREE_BYTES_PER_TOKEN + 4))
    return sum(most if bound is None else min(bound * 2**20, most) for bound in bounds)


def trainer_memory(sizes: MemoryInputs) -> Holdings:
    """What a rank keeps between updates, and what an update and a sync add.

    Float32 master weights, gradients and Adam's two moments are the 16 bytes per parameter of ZeRO (arXiv 1910.02054,
    section 3.1), shared by all ranks (its stage 3, which is FSDP2). Activations are counted as in arXiv 2205.05198,
    section 4.1, for a gated MLP, RMSNorm in float32 and attention that keeps no scores; with checkpointing each layer
    keeps its input, and one at a time all of it. Ranks that share sequences have that share of their tokens.
    """
    shape, train = sizes.shape, sizes.recipe.train
    value = value_bytes(train.dtype, on_gpu=sizes.on_gpu)
    parts = Holdings(RANK, sizes.device)
    share = shape.stored_params / train.ranks
    states = [
        ("master weights", 4 * share, "4 bytes x parameters / ranks (ZeRO 3)"),
        ("Adam moments", 8 * share, "8 bytes x parameters / ranks (ZeRO 3)"),
        ("reference model", 4 * share * bool(train.kl_coef), "4 bytes x parameters / ranks"),
    ]
    offloads = sizes.colocated and train.offload
    together: tuple[Phase, ...] = ("training", "sync") if sizes.way == "ipc" else ("training",)
    resident = together if offloads else PHASES
    for name, num_bytes, formula in states:
        parts.add(name, num_bytes, formula, resident)
        if offloads:
            parts.add(name, num_bytes, f"{formula}, offloaded", (p for p in PHASES if p not in resident), device="host")
    training: tuple[Phase, ...] = ("training",)
    parts.add("gradients", 4 * share, "4 bytes x parameters / ranks", training)
    if train.ranks > 1 or value == 2:
        gathered = sizes.shared_params + 2 * shape.layer_params
        formula = f"{value} bytes x (embedding, LM head, a layer and the next) (FSDP2)"
        parts.add("gathered weights", value * gathered, formula, training)
    tokens = ceil(max(train.tokens_per_microbatch, sizes.tokens) / train.sequence_parallel)
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    # On a CPU attention goes sequence by sequence, and what it gave is joined.
    attended = 2 if sizes.on_gpu else 3
    width = 4 * shape.hidden + attended * queries + 2 * keys + 4 * shape.intermediate
    layer = value * width + 4 * 2 * shape.hidden
    if train.activation_checkpointing:
        activations = tokens * (shape.layers * shape.hidden * value + layer)
        formula = "tokens x (layers x hidden + one layer's activations)"
    else:
        activations = tokens * shape.layers * layer
        formula = f"tokens x layers x (4 hidden + {attended} queries + 2 keys + 4 MLP, norms in float32)"
    parts.add("activations", activations, f"{formula}, {tokens} tokens", training)
    logits = min(tokens * shape.vocab, LOGITS)
    # The logits and one copy in float32, beside them the same in bfloat16 where that is what is computed in.
    chunk = (8 if value == 4 else 10) * logits + 4 * shape.head_params
    parts.add("logits", chunk, f"{8 if value == 4 else 10} bytes x a chunk's, and the LM head's gradient", training)
    if sizes.on_gpu:
        parts.add("trainer runtime", TRAINER_BYTES, "flat: context, workspaces", ("training", "sync"))
        parts.add("trainer runtime", CONTEXT_BYTES, "flat: context", GENERATING)
    parts.add("trainer rank runtime", HOST_RUNTIME[RANK], "measured", device="host")
    samples = 28 * sizes.responses * sizes.tokens / train.data_ranks
    parts.add("samples", samples, "28 bytes x responses x tokens / ranks of other sequences", training, device="host")
    sent_memory(sizes, parts)
    return parts


def sent_memory(sizes: MemoryInputs, parts: Holdings) -> None:
    """New weights on their way (`engine.weights`): a process's buckets, and on a trainer's GPU what is gathered.

    By the host the buckets are memory that processes of a machine share, mapped for good; between devices they are
    there for a sync alone.
    """
    value, shape = value_bytes(sizes.recipe.train.dtype, on_gpu=sizes.on_gpu), sizes.shape
    largest = max(shape.head_params, shape.hidden * shape.intermediate)
    if parts.device == "GPU" and parts.process == RANK:
        formula = "the largest tensor in float32, and cast"
        parts.add("gathered tensor", (4 + value) * largest, formula, ("sync",))
    if sizes.way == "host":
        buckets = 2 * max(BUCKET_BYTES, value * largest)
        parts.add("weights, shared", buckets, "2 buckets of a tensor or more, in shared memory", device="host")
    else:
        parts.add("weights, in buckets", 2 * max(DEVICE_BUCKET_BYTES, value * largest), "2 buckets", ("sync",))


def drafter_memory(sizes: MemoryInputs) -> Holdings:
    """What trains the drafter beside each engine, whoever has its GPU; nothing without [drafter].

    Weights, gradients and moments stay on the device between periods; so do the heads that served before, for
    annotations, and embedding and LM head of the target. The state to go back to and the checkpoint's are copies.
    """
    recipe, shape = sizes.recipe, sizes.shape
    parts = Holdings(SPOT, sizes.device)
    if recipe.drafter is None:
        return parts
    config, head = recipe.drafter, sizes.head_params
    value = value_bytes(None, on_gpu=sizes.on_gpu)
    parts.add("drafter, training", 16 * head, "16 bytes x the head's parameters (ZeRO 3.1)")
    parts.add("drafter, kept state", 12 * head, "12 bytes x the head's parameters")
    parts.add("drafter, heads served", 4 * head * (config.ages + 1), f"4 bytes x the head's x {config.ages + 1}")
    parts.add("drafter's target", value * sizes.shared_params, f"{value} bytes x embedding and LM head")
    rows, steps = config.tokens_per_update, config.loss.num_unrolled
    layer = value * (8 * shape.hidden + 4 * shape.heads * shape.head_dim + 4 * shape.intermediate) + 8 * shape.hidden
    # States that come in, in float32; beyond a chunk logits are computed twice instead of kept.
    states = 4 * rows * (2 * shape.hidden + sizes.row_bytes / sizes.engine_value)
    logits = rows * shape.vocab
    kept_logits = 8 * steps * logits + 16 * logits if logits <= LOGITS else 24 * LOGITS
    # Unrolled steps keep the weights of their attention, which goes 256 queries at a time.
    keys = min(rows, sizes.tokens) / 2 + 128
    attended = 6 * (steps - 1) * shape.heads * rows * keys
    activations = rows * steps * layer + states + kept_logits + attended
    formula = f"{rows} tokens x {steps} steps: a layer's, logits' and unrolled attention's"
    parts.add("drafter activations", activations, formula, ("idle training",))
    if sizes.on_gpu:
        parts.add("drafter trainer runtime", CONTEXT_BYTES, "flat: context")
    parts.add("drafter trainer process", HOST_RUNTIME[SPOT], "measured", device="host")
    per_step = ceil(sizes.responses / recipe.rollout.num_workers) * sizes.tokens * (sizes.row_bytes + 8)
    buffer = min(config.buffer.max_bytes, per_step * config.buffer.rl_steps)
    parts.add("drafter buffer", buffer, "drafter.buffer.max_bytes, or all states of its RL steps", device="host")
    held_out = 2 * min(config.buffer.beside_bytes, per_step)
    formula = "held-out sequences and prompts: an 8th of the buffer each"
    parts.add("drafter, held out", held_out, formula, device="host")
    sampled = config.annotate * sizes.tokens * (sizes.row_bytes + 8)
    parts.add("drafter, annotated", min(sampled, per_step), f"{config.annotate} responses' states", device="host")
    parts.add("drafter checkpoint", 12 * head, "12 bytes x the head's parameters, staged", device="host")
    return parts


def driver_memory(sizes: MemoryInputs) -> list[Holdings]:
    """What the driver holds, Ray's object store, Ray itself and a reward process: all on hosts."""
    recipe, texts = sizes.recipe, sizes.responses * sizes.tokens
    driver, store, ray, rewards = (Holdings(process, "host") for process in (DRIVER, STORE, RAY, REWARDS))
    driver.add("driver runtime", HOST_RUNTIME[DRIVER], "measured")
    driver.add("rollout, collected", 40 * texts, "40 bytes x responses x tokens: texts, log-probs, rows")
    store.add("rollout, returned", 8 * texts, "8 bytes x responses x tokens", (*GENERATING, "training"))
    store.add("samples, sent", 12 * texts, "12 bytes x responses x tokens", ("training", "sync"))
    remembered = min(history_bytes(sizes), 4.0 * recipe.train.steps * texts)
    store.add("history", remembered, "4 bytes x tokens of responses that drafters draft from, at most history_mib")
    if recipe.drafter is not None:
        value = value_bytes(recipe.train.dtype, on_gpu=sizes.on_gpu)
        store.add("drafter served", 16 * sizes.head_params, "weights and training state: 16 bytes x the head's")
        store.add("drafter's target, sent", value * sizes.shared_params, f"{value} bytes x embedding and LM head")
        driver.add("drafter served, driver", 4 * sizes.head_params, "4 bytes x the head's parameters")
    ray.add("Ray runtime", HOST_RUNTIME[RAY], "measured: raylet, GCS, agents")
    rewards.add("reward process runtime", HOST_RUNTIME[REWARDS], "measured")
    return [driver, store, ray, rewards]


def times(part: Part, count: float) -> Part:
    """The same of so many processes."""
    if count == 1:
        return part
    return replace(part, num_bytes=count * part.num_bytes, formula=f"{count:g} x ({part.formula})")


def context_tokens(recipe: Recipe) -> int:
    """Tokens of the longest prompt and response."""
    tokens = (recipe.data.max_prompt_tokens or PROMPT_TOKENS) + recipe.rollout.max_response_tokens
    return min(tokens, int(recipe.rollout.vllm.get("max_model_len") or tokens))


def value_bytes(dtype: str | None, *, on_gpu: bool) -> int:
    """Bytes of a number in a dtype; None and "auto" are bfloat16 on a GPU, else float32."""
    if dtype in (None, "auto"):
        return 2 if on_gpu else 4
    return 4 if dtype == "float32" else 2


def vllm_batch(gpu: Gpu | None) -> int:
    """vLLM 0.32's own max_num_seqs (`arg_utils`): more on GPUs of 70 GiB and up, the A100 excepted."""
    return 1024 if gpu is not None and gpu.memory_bytes >= 70 * 2**30 and gpu.name != "A100" else 256


def requests_per_engine(recipe: Recipe) -> int:
    """Responses of one rollout that an engine has to generate."""
    rollout = recipe.rollout
    if rollout.partial is not None:
        return ceil(rollout.partial.concurrency / rollout.num_workers)
    return ceil(rollout.prompts_per_step * rollout.group_size / rollout.num_workers)
