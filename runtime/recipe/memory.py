"""What a recipe's processes hold on GPUs and hosts: one table of parts, each with its phases and its formula.

A run tells what it held by the same names (`tltlab.runtime.run.memory`), which a test holds against this.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Literal, get_args

from tltlab.drafters.specs import LearnedSpec, NgramSpec, SuffixSpec
from tltlab.drafters.suffix import TREE_BYTES_PER_TOKEN
from tltlab.errors import ConfigError
from tltlab.hardware import gpu as gpu_by_name
from tltlab.hardware import per_gpu_heads
from tltlab.runtime.engine.drafter_pool import DrafterPool
from tltlab.runtime.engine.graphs import plan_graphs

from .gpus import bundles_of, weights_way
from .graphs import drafters_of, engine_build
from .recipe import Recipe
from .shape import context_tokens, requests_per_engine, shape_of, vllm_batch

GRAPH_BYTES = 2 << 30
"""For CUDA graphs that are not planned, flat."""
LOGITS = 1 << 26
"""That lie in memory at once, as in `token_logprobs` and `drafter_loss`."""
CONTEXT_BYTES, TRAINER_BYTES = 1e9, 2e9
"""Of a process on a GPU that computes nothing: CUDA context, and a trainer's NCCL and cuBLAS buffers."""
BUCKET_BYTES, DEVICE_BUCKET_BYTES = 32 << 20, 256 << 20
"""Of new weights on their way, by the host and between devices (`engine.weights`, `vllm.transfer`)."""

Phase = Literal["rollout", "idle training", "training", "sync"]
"""Of an RL step: engines generate; those that are done lend their devices to drafter trainers; trainers have the
samples; new weights go to the engines."""
PHASES: tuple[Phase, ...] = get_args(Phase)
GENERATING, TRAINING, SYNC = PHASES[:2], PHASES[2:3], PHASES[3:]
Device = Literal["GPU", "host"]

WORKER, RANK, SPOT, DRIVER = "rollout worker", "trainer rank", "drafter trainer", "driver"
STORE, REWARDS, RAY = "Ray's object store", "reward process", "Ray"
PROCESSES = (WORKER, RANK, SPOT, DRIVER, STORE, RAY, REWARDS)

RUNTIME_BYTES = {WORKER: 0.85e9, RANK: 0.75e9, SPOT: 0.65e9, DRIVER: 0.75e9, REWARDS: 0.35e9, RAY: 0.6e9}
"""Resident bytes of a process before it holds anything: Python, torch, vLLM, and what glibc keeps of freed tensors."""

_VLLM_UTILIZATION, _CPU_KV_BYTES = 0.92, 256 << 20
"""vLLM's own, where the recipe has none: a share of a GPU, bytes on a CPU."""
_TREE_BYTES = {"suffix": TREE_BYTES_PER_TOKEN, "ngram": 500}
"""Of a running response's token, by kind of drafter."""
_TEXT_BYTES = 160
"""What vLLM and the ledger keep of a generated token: ids and log-probs in several lists of Python's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Something that takes memory, the process whose it is, and how its size was reckoned."""

    name: str
    num_bytes: float
    formula: str
    process: str


class MemoryTable:
    """Parts by device and phase; of each process on a host, on each of its GPUs.

    `at_once` responses of full length fit into an engine's KV cache.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.at_once = 0
        self._rows: list[tuple[Part, Device, tuple[Phase, ...]]] = []

    def add(
        self,
        process: str,
        name: str,
        num_bytes: float,
        formula: str,
        phases: Iterable[Phase] = PHASES,
        device: Device | None = None,
    ) -> None:
        """Add a row, by default where the process computes; none for a part that takes nothing."""
        if num_bytes > 0:
            part = Part(name=name, num_bytes=float(num_bytes), formula=formula, process=process)
            self._rows.append((part, device or self.device, tuple(phases)))

    def of(self, process: str, device: Device, phase: Phase) -> list[Part]:
        """What a process holds there and then."""
        return [p for p, where, phases in self._rows if p.process == process and where == device and phase in phases]


class Sizes:
    """What parts are reckoned from: a recipe's counts, its model and GPU, and what its engines are built for.

    ConfigError where its GPUs do not add up, or the model's shape or the GPU is not known.
    """

    def __init__(self, recipe: Recipe) -> None:
        rollout, drafter = recipe.rollout, recipe.drafter
        self.recipe, self.shape, self.bundles = recipe, shape_of(recipe.model), bundles_of(recipe)
        self.way, shape = weights_way(recipe), self.shape
        self.on_gpu, self.colocated = bool(self.bundles.all), self.bundles.colocated
        self.gpu = None if recipe.cluster.gpu is None else gpu_by_name(recipe.cluster.gpu)
        if self.gpu is not None and not self.on_gpu:
            raise ConfigError(f"cluster.gpu = {self.gpu.name!r}, but nothing takes a GPU: set cluster.gpus_per_node")
        policy = recipe.read_policy()
        self.build = build = engine_build(recipe, policy, drafters_of(recipe, policy))
        in_use = DrafterPool(build.drafters, build.max_draft_depth).needed(policy.strategies)
        self.drafters = [spec for name, spec in build.drafters.items() if name in in_use]
        # Most tokens that an iteration verifies.
        self.drafted_rows = requests_per_engine(recipe) * (1 + build.max_draft_depth)
        with suppress(ConfigError):  # of a policy that does not say what it may choose at which batch
            may_run = plan_graphs(policy, requests_per_engine(recipe), drafters=build.drafters).may_run
            self.drafted_rows = max(batch * (depth + 1) for batch, depth in may_run)
        self.learned = drafter is not None or any(isinstance(spec, LearnedSpec) for spec in self.drafters)
        # Bytes of a number in engines, trainers and drafter trainers.
        self.engine_value = _value_bytes(rollout.vllm.get("dtype"), on_gpu=self.on_gpu)
        self.trainer_value = _value_bytes(recipe.train.dtype, on_gpu=self.on_gpu)
        self.drafter_value = _value_bytes(None, on_gpu=self.on_gpu)
        # Of the longest prompt and response; of one rollout; at a time in an engine.
        self.tokens = context_tokens(recipe)
        self.responses = rollout.prompts_per_step * rollout.group_size
        self.max_num_seqs = int(rollout.vllm.get("max_num_seqs", vllm_batch(self.gpu)))
        self.running = min(requests_per_engine(recipe), self.max_num_seqs)
        # Of embedding and LM head.
        self.shared_params = shape.stored_params - shape.layers * shape.layer_params
        # Of an EAGLE head, or the recipe's: a decoder layer and what joins its inputs, norms included. An EAGLE-3
        # head's attention reads inputs twice as wide, and three of the target's states come in.
        eagle3 = drafter is not None and drafter.loss.method == "eagle3"
        wider = (shape.heads + 2 * shape.kv_heads) * shape.head_dim * shape.hidden + shape.hidden**2 + 3 * shape.hidden
        self.head_params = shape.layer_params + 2 * shape.hidden**2 + shape.hidden + eagle3 * wider
        # Hidden states of one token, as they are captured.
        self.state_bytes = self.engine_value * shape.hidden * (4 if eagle3 else 1)
        # Most that model-free drafters remember of finished responses; no more than all of them take.
        bounds = [s.arguments()["history_mib"] for s in self.drafters if isinstance(s, NgramSpec | SuffixSpec)]
        most = float(recipe.train.steps * self.responses * self.tokens * (TREE_BYTES_PER_TOKEN + 4))
        self.history_bytes = sum(most if bound is None else min(bound * 2**20, most) for bound in bounds)


def memory_table(sizes: Sizes) -> MemoryTable:
    """All parts. ConfigError where tensor parallelism does not divide the heads, or no response of full length fits."""
    table = MemoryTable("GPU" if sizes.on_gpu else "host")
    for rows_of in (_engine, _trainer, _drafter, _driver):
        rows_of(sizes, table)
    return table


def _engine(sizes: Sizes, table: MemoryTable) -> None:
    """A rollout worker's. With a known GPU vLLM's KV cache is the rest of its share.

    Asleep (level 1) an engine keeps its weights on the host, pinned: torch keeps that memory for good once it was used.
    """
    recipe, shape, value, tokens, running = sizes.recipe, sizes.shape, sizes.engine_value, sizes.tokens, sizes.running
    rollout, tp, drafter = recipe.rollout, recipe.rollout.tensor_parallel_size, recipe.drafter
    add, on_host = partial(table.add, WORKER), partial(table.add, WORKER, device="host")
    try:
        _, kv_heads = per_gpu_heads(shape, tp)
    except ConfigError as error:
        raise ConfigError(f"rollout.tensor_parallel_size: {error}") from error
    loaded = tuple(phase for phase in PHASES if not (sizes.colocated and phase in TRAINING))
    # Colocated, weights within a device come before the caches do.
    generating = GENERATING if sizes.colocated and sizes.way == "ipc" else loaded

    # vLLM pads the vocabulary to a multiple of 64; the CPU build has embedding and LM head a second time.
    padding = -shape.vocab % 64 * shape.hidden * (1 if shape.tied_embeddings else 2)
    weights = (shape.stored_params + padding + (0 if sizes.on_gpu else sizes.shared_params + padding)) * value / tp
    packed = "" if sizes.on_gpu else "; the CPU build has embedding and LM head packed too"
    add("engine weights", weights, f"{value} bytes x parameters / TP{packed}", loaded)
    head = sizes.learned * sizes.head_params * value
    formula = f"{value} bytes x parameters of its head; embedding and LM head are the target's"
    add("drafter, serving", head, formula, loaded)
    if sizes.on_gpu:
        add("engine runtime", CONTEXT_BYTES, "flat: context, communication")
        batched, rows = rollout.batched_tokens, max(sizes.max_num_seqs, sizes.drafted_rows)
        layer = value * batched * (3 * shape.intermediate / tp + 4 * shape.hidden)
        # Sampling has logits as bfloat16 and float32, their log-softmax and their softmax.
        formula = f"the larger of a layer ({batched} tokens) and 14 bytes x {rows} rows x vocabulary"
        add("engine activations", max(layer, 14 * rows * shape.vocab), formula, generating)
        if not rollout.vllm.get("enforce_eager", False):
            planned = "flat" if sizes.build.graph_bytes is None else "planned: graphs x layers x 1 MB, and buffers"
            add("CUDA graphs", GRAPH_BYTES if sizes.build.graph_bytes is None else sizes.build.graph_bytes, planned)

    layers = shape.layers + sizes.learned
    full_length = tokens * 2 * layers * kv_heads * shape.head_dim * value
    kv_bytes = rollout.vllm.get("kv_cache_memory_bytes", None if sizes.on_gpu else _CPU_KV_BYTES)
    if kv_bytes is not None:
        kv, formula = float(kv_bytes), "kv_cache_memory_bytes"
    elif sizes.gpu is None:
        kv, formula = float(running * full_length), "2 x layers x KV heads x head size x tokens x requests"
    else:
        share = rollout.vllm.get("gpu_memory_utilization", _VLLM_UTILIZATION)
        kv = sizes.gpu.memory_bytes * share - sum(part.num_bytes for part in table.of(WORKER, "GPU", "rollout"))
        formula = f"what gpu_memory_utilization = {share:g} leaves"
    if kv < full_length:
        raise ConfigError(
            f"an engine's KV cache has room for {max(0.0, kv) / 1e9:.2f} GB per GPU, one response of full length "
            f"({tokens} tokens) takes {full_length / 1e9:.2f} GB: raise rollout.tensor_parallel_size or "
            "rollout.vllm.gpu_memory_utilization, or lower rollout.max_response_tokens"
        )
    table.at_once = int(kv // full_length)
    add("KV cache", kv * shape.layers / layers, formula, generating)
    add("KV cache, drafter", sizes.learned * kv / layers, f"{formula}; one layer of {layers}", generating)
    formula = "weights and the drafter's, kept for it while it sleeps, pinned"
    on_host("engine asleep", sizes.colocated * tp * (weights + head), formula)

    processes = 1 + tp if tp > 1 else 1
    on_host("rollout worker runtime", processes * RUNTIME_BYTES[WORKER], f"measured, x {processes} processes")
    growing = f"bytes x {running} running responses x {tokens} tokens"
    on_host("texts", _TEXT_BYTES * running * tokens, f"{_TEXT_BYTES} {growing}", GENERATING)
    on_host("drafter history", sizes.history_bytes, "history_mib of the drafters in use")
    trees = sum(_TREE_BYTES.get(spec.kind, 0) for spec in sizes.drafters)
    on_host("drafter trees", trees * running * tokens, f"{trees} {growing}", GENERATING)
    if drafter is not None:
        captured = min(drafter.capture_bytes or math.inf, running * tokens * sizes.state_bytes)
        formula = f"hidden states of {running} running responses; at most drafter.capture_bytes"
        on_host("captured states", captured, formula)
        moving = sizes.on_gpu * 2 * rollout.batched_tokens * (sizes.state_bytes + 8)
        formula = "2 x hidden states of max_num_batched_tokens, pinned"
        on_host("captured states, on their way", moving, formula)
        on_host("fed states", 2 * tokens * sizes.state_bytes, "a response's states, sent and received")
    _sent(sizes, table, WORKER)


def _trainer(sizes: Sizes, table: MemoryTable) -> None:
    """A rank's: what it keeps between updates, and what an update and a sync add.

    Float32 master weights, gradients and Adam's two moments are the 16 bytes per parameter of ZeRO (arXiv 1910.02054,
    section 3.1), shared by all ranks (its stage 3, which is FSDP2). Activations are counted as in arXiv 2205.05198,
    section 4.1, for a gated MLP, RMSNorm in float32 and attention that keeps no scores; with checkpointing each layer
    keeps its input, and one at a time all of it. Ranks that share sequences have that share of their tokens.
    """
    shape, train = sizes.shape, sizes.recipe.train
    value, share = sizes.trainer_value, shape.stored_params / train.ranks
    add, on_host = partial(table.add, RANK), partial(table.add, RANK, device="host")
    offloads = sizes.colocated and train.offload
    resident = (TRAINING + SYNC if sizes.way == "ipc" else TRAINING) if offloads else PHASES
    elsewhere = [phase for phase in PHASES if phase not in resident]
    for name, num_bytes, formula in (
        ("master weights", 4 * share, "4 bytes x parameters / ranks (ZeRO 3)"),
        ("Adam moments", 8 * share, "8 bytes x parameters / ranks (ZeRO 3)"),
        ("reference model", 4 * share * bool(train.kl_coef), "4 bytes x parameters / ranks"),
    ):
        add(name, num_bytes, formula, resident)
        on_host(name, num_bytes, f"{formula}, offloaded", elsewhere)
    add("gradients", 4 * share, "4 bytes x parameters / ranks", TRAINING)
    if train.ranks > 1 or value == 2:
        gathered = value * (sizes.shared_params + 2 * shape.layer_params)
        add(
            "gathered weights",
            gathered,
            f"{value} bytes x (embedding, LM head, a layer and the next) (FSDP2)",
            TRAINING,
        )

    tokens = ceil(max(train.tokens_per_microbatch, sizes.tokens) / train.sequence_parallel)
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    # On a CPU attention goes sequence by sequence, and what it gave is joined.
    attended = 2 if sizes.on_gpu else 3
    layer = value * (4 * shape.hidden + attended * queries + 2 * keys + 4 * shape.intermediate) + 8 * shape.hidden
    activations = tokens * shape.layers * layer
    formula = f"tokens x layers x (4 hidden + {attended} queries + 2 keys + 4 MLP, norms in float32)"
    if train.activation_checkpointing:
        activations = tokens * (shape.layers * shape.hidden * value + layer)
        formula = "tokens x (layers x hidden + one layer's activations)"
    add("activations", activations, f"{formula}, {tokens} tokens", TRAINING)
    # The logits and one copy in float32, beside them the same in bfloat16 where that is what is computed in.
    each = 8 if value == 4 else 10
    logits = each * min(tokens * shape.vocab, LOGITS) + 4 * shape.head_params
    add("logits", logits, f"{each} bytes x a chunk's, and the LM head's gradient", TRAINING)
    add("trainer runtime", sizes.on_gpu * TRAINER_BYTES, "flat: context, workspaces", TRAINING + SYNC)
    add("trainer runtime", sizes.on_gpu * CONTEXT_BYTES, "flat: context", GENERATING)
    on_host("trainer rank runtime", RUNTIME_BYTES[RANK], "measured")
    samples = 28 * sizes.responses * sizes.tokens / train.data_ranks
    on_host("samples", samples, "28 bytes x responses x tokens / ranks of other sequences", TRAINING)
    _sent(sizes, table, RANK)


def _sent(sizes: Sizes, table: MemoryTable, process: str) -> None:
    """New weights on their way (`engine.weights`): a process's buckets, and on a trainer's GPU what is gathered.

    By the host the buckets are memory that processes of a machine share, mapped for good; between devices they are
    there for a sync alone.
    """
    value, shape = sizes.trainer_value, sizes.shape
    largest = max(shape.head_params, shape.hidden * shape.intermediate)
    if sizes.on_gpu and process == RANK:
        table.add(process, "gathered tensor", (4 + value) * largest, "the largest tensor in float32, and cast", SYNC)
    if sizes.way == "host":
        formula = "2 buckets of a tensor or more, in shared memory"
        table.add(process, "weights, shared", 2 * max(BUCKET_BYTES, value * largest), formula, device="host")
    else:
        table.add(process, "weights, in buckets", 2 * max(DEVICE_BUCKET_BYTES, value * largest), "2 buckets", SYNC)


def _drafter(sizes: Sizes, table: MemoryTable) -> None:
    """Of what trains the drafter beside each engine, whoever has its GPU; nothing without [drafter].

    Weights, gradients and moments stay on the device between periods; so do the heads that served before, for
    annotations, and embedding and LM head of the target. The state to go back to and the checkpoint's are copies.
    """
    config, shape, head = sizes.recipe.drafter, sizes.shape, sizes.head_params
    if config is None:
        return
    add, on_host = partial(table.add, SPOT), partial(table.add, SPOT, device="host")
    value = sizes.drafter_value
    add("drafter, training", 16 * head, "16 bytes x the head's parameters (ZeRO 3.1)")
    add("drafter, kept state", 12 * head, "12 bytes x the head's parameters")
    add("drafter, heads served", 4 * head * (config.ages + 1), f"4 bytes x the head's x {config.ages + 1}")
    add("drafter's target", value * sizes.shared_params, f"{value} bytes x embedding and LM head")
    rows, steps = config.tokens_per_update, config.loss.num_unrolled
    layer = value * (8 * shape.hidden + 4 * shape.heads * shape.head_dim + 4 * shape.intermediate) + 8 * shape.hidden
    # States that come in, in float32; beyond a chunk logits are computed twice instead of kept.
    states = 4 * rows * (2 * shape.hidden + sizes.state_bytes / sizes.engine_value)
    logits = rows * shape.vocab
    kept_logits = 8 * steps * logits + 16 * logits if logits <= LOGITS else 24 * LOGITS
    # Unrolled steps keep the weights of their attention, which goes 256 queries at a time.
    attended = 6 * (steps - 1) * shape.heads * rows * (min(rows, sizes.tokens) / 2 + 128)
    formula = f"{rows} tokens x {steps} steps: a layer's, logits' and unrolled attention's"
    add("drafter activations", rows * steps * layer + states + kept_logits + attended, formula, ("idle training",))
    add("drafter trainer runtime", sizes.on_gpu * CONTEXT_BYTES, "flat: context")
    on_host("drafter trainer process", RUNTIME_BYTES[SPOT], "measured")
    response = sizes.tokens * (sizes.state_bytes + 8)
    per_step = ceil(sizes.responses / sizes.recipe.rollout.num_workers) * response
    buffer = min(config.buffer.max_bytes, per_step * config.buffer.rl_steps)
    on_host("drafter buffer", buffer, "drafter.buffer.max_bytes, or all states of its RL steps")
    held_out = 2 * min(config.buffer.beside_bytes, per_step)
    on_host("drafter, held out", held_out, "held-out sequences and prompts: an 8th of the buffer each")
    on_host("drafter, annotated", min(config.annotate * response, per_step), f"{config.annotate} responses' states")
    on_host("drafter checkpoint", 12 * head, "12 bytes x the head's parameters, staged")


def _driver(sizes: Sizes, table: MemoryTable) -> None:
    """The driver's, Ray's object store's, Ray's and a reward process's: all on hosts."""
    recipe, head, texts = sizes.recipe, sizes.head_params, sizes.responses * sizes.tokens
    trains, value = recipe.drafter is not None, sizes.trainer_value
    driver, store = partial(table.add, DRIVER, device="host"), partial(table.add, STORE, device="host")
    driver("driver runtime", RUNTIME_BYTES[DRIVER], "measured")
    driver("rollout, collected", 40 * texts, "40 bytes x responses x tokens: texts, log-probs, rows")
    driver("drafter served, driver", trains * 4 * head, "4 bytes x the head's parameters")
    store("rollout, returned", 8 * texts, "8 bytes x responses x tokens", GENERATING + TRAINING)
    store("samples, sent", 12 * texts, "12 bytes x responses x tokens", TRAINING + SYNC)
    remembered = min(sizes.history_bytes, 4.0 * recipe.train.steps * texts)
    store("history", remembered, "4 bytes x tokens of responses that drafters draft from, at most history_mib")
    store("drafter served", trains * 16 * head, "weights and training state: 16 bytes x the head's")
    store("drafter's target, sent", trains * value * sizes.shared_params, f"{value} bytes x embedding and LM head")
    table.add(RAY, "Ray runtime", RUNTIME_BYTES[RAY], "measured: raylet, GCS, agents", device="host")
    table.add(REWARDS, "reward process runtime", RUNTIME_BYTES[REWARDS], "measured", device="host")


def _value_bytes(dtype: str | None, *, on_gpu: bool) -> int:
    """Bytes of a number in a dtype; None and "auto" are bfloat16 on a GPU, else float32."""
    if dtype in (None, "auto"):
        return 2 if on_gpu else 4
    return 4 if dtype == "float32" else 2
