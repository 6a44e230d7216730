"""Plan of a recipe: the memory of its processes by part, and what to know before it starts.

Memory is one table of parts, each with its phases and its formula. A run reports its memory by the same names
(`tltlab.runtime.run.memory`); a test compares the two.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import groupby
from math import ceil
from typing import Literal, get_args

from tltlab.console import table
from tltlab.drafters.specs import LearnedSpec, NgramSpec, SuffixSpec
from tltlab.drafters.suffix import TREE_BYTES_PER_TOKEN
from tltlab.errors import ConfigError
from tltlab.hardware import Gpu, ModelShape, per_gpu_heads
from tltlab.hardware import gpu as gpu_by_name
from tltlab.records import Fields, Json, frozen
from tltlab.runtime.engine.drafter_pool import DrafterPool
from tltlab.runtime.engine.graphs import plan_graphs

from .engines import context_tokens, drafters_of, engine_build, requests_per_engine, shape_of, vllm_batch
from .gpus import Bundles, bundles_of, nodes_of, weight_transport
from .planner import engine_gpus
from .recipe import Recipe, system_settings
from .rules import notes_of
from .sections import LoraConfig

MARGIN = 0.1
"""Share of reckoned memory to be left on a GPU, for blocks that torch's allocator keeps and what is not counted.

vLLM measures its own share when it starts, so that needs none.
"""
GRAPH_BYTES = 2 << 30
"""For CUDA graphs that are not planned: a constant."""
LOGITS = 1 << 26
"""Most logits in memory at once, as in `token_logprobs` and `drafter_loss`."""
CONTEXT_BYTES, TRAINER_BYTES = 1e9, 2e9
"""Bytes of an idle process on a GPU: CUDA context, and a trainer's NCCL and cuBLAS buffers."""
BUCKET_BYTES, DEVICE_BUCKET_BYTES = 32 << 20, 256 << 20
"""Bytes of weight transfers, by the host and between devices (`engine.weights`, `vllm.transfer`)."""

Phase = Literal["rollout", "idle training", "training", "sync"]
"""Phases of an RL step.

Engines generate; idle ones lend their devices to drafter trainers; trainers have the samples; new weights are sent to
the engines.
"""
PHASES: tuple[Phase, ...] = get_args(Phase)
GENERATING, TRAINING, SYNC = PHASES[:2], PHASES[2:3], PHASES[3:]
Device = Literal["GPU", "host"]

WORKER, RANK, SPOT, DRIVER = "rollout worker", "trainer rank", "drafter trainer", "driver"
STORE, REWARDS, RAY = "Ray's object store", "reward process", "Ray"
PROCESSES = (WORKER, RANK, SPOT, DRIVER, STORE, RAY, REWARDS)

RUNTIME_BYTES = {WORKER: 0.85e9, RANK: 0.75e9, SPOT: 0.65e9, DRIVER: 0.75e9, REWARDS: 0.35e9, RAY: 0.6e9}
"""Resident bytes of an idle process: Python, torch, vLLM, and memory that glibc keeps of freed tensors."""

_VLLM_UTILIZATION, _CPU_KV_BYTES = 0.92, 256 << 20
"""vLLM's defaults: a share of a GPU, bytes on a CPU."""
_TREE_BYTES = {"suffix": TREE_BYTES_PER_TOKEN, "ngram": 500}
"""Bytes per token of a running response, by kind of drafter."""
_TEXT_BYTES = 160
"""Bytes that vLLM and the tracker keep per generated token: ids and log-probs in several Python lists."""


@frozen
class MemoryPart:
    """A part of a process's memory, and the formula of its size."""

    name: str
    num_bytes: float
    formula: str
    process: str


class MemoryPlan:
    """Parts by device and phase: of each process on a host, on each of its GPUs.

    `at_once` responses of full length fit into an engine's KV cache.
    """

    def __init__(self, device: Device):
        self.device = device
        self.at_once = 0
        self._rows: list[tuple[MemoryPart, Device, tuple[Phase, ...]]] = []

    def add(
        self,
        process: str,
        name: str,
        num_bytes: float,
        formula: str,
        phases: Iterable[Phase] = PHASES,
        device: Device | None = None,
    ) -> None:
        """Add a row, by default on the device where the process computes; none for a part of size 0."""
        if num_bytes > 0:
            part = MemoryPart(name=name, num_bytes=float(num_bytes), formula=formula, process=process)
            self._rows.append((part, device or self.device, tuple(phases)))

    def of(self, process: str, device: Device, phase: Phase) -> list[MemoryPart]:
        """Return the parts of a process on a device in a phase."""
        return [p for p, where, phases in self._rows if p.process == process and where == device and phase in phases]


class MemorySizes:
    """Sizes that parts depend on: a recipe's counts, its model and GPU, and the build of its engines.

    ConfigError where its GPUs do not add up, or the model's shape or the GPU is unknown.
    """

    def __init__(self, recipe: Recipe):
        rollout, drafter = recipe.rollout, recipe.drafter
        self.recipe, self.shape, self.bundles = recipe, shape_of(recipe.model), bundles_of(recipe)
        self.transport, shape = weight_transport(recipe), self.shape
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
        with suppress(ConfigError):  # a policy without a list of strategies by batch
            may_run = plan_graphs(policy, requests_per_engine(recipe), drafters=build.drafters).may_run
            self.drafted_rows = max(batch * (depth + 1) for batch, depth in may_run)
        self.learned = drafter is not None or any(isinstance(spec, LearnedSpec) for spec in self.drafters)
        # Bytes of a number in engines, trainers and drafter trainers.
        self.engine_value = _value_bytes(rollout.vllm.get("dtype"), on_gpu=self.on_gpu)
        self.trainer_value = _value_bytes(recipe.train.dtype, on_gpu=self.on_gpu)
        self.drafter_value = _value_bytes(None, on_gpu=self.on_gpu)
        self.shards = recipe.train.ranks > 1 or self.trainer_value == 2
        # Tokens of the longest prompt and response; responses of one rollout; running ones in an engine.
        self.tokens = context_tokens(recipe)
        self.responses = rollout.prompts_per_step * rollout.group_size
        self.max_num_seqs = int(rollout.vllm.get("max_num_seqs", vllm_batch(self.gpu)))
        self.running = min(requests_per_engine(recipe), self.max_num_seqs)
        # Parameters of embedding and LM head.
        self.shared_params = shape.stored_params - shape.layers * shape.layer_params
        # Parameters of an EAGLE head, or the recipe's: a decoder layer and the projection of its inputs, with norms. An
        # EAGLE-3 head's attention reads inputs twice as wide, and its projection three of the target's states.
        eagle3 = drafter is not None and drafter.loss.method == "eagle3"
        wider = (shape.heads + 2 * shape.kv_heads) * shape.head_dim * shape.hidden + shape.hidden**2 + 3 * shape.hidden
        self.head_params = shape.layer_params + 2 * shape.hidden**2 + shape.hidden + eagle3 * wider
        # Captured hidden states of one token.
        self.state_bytes = self.engine_value * shape.hidden * (4 if eagle3 else 1)
        # Parameters of adapters, and those that are trained.
        self.adapter_params = 0 if recipe.train.lora is None else _adapter_params(shape, recipe.train.lora)
        self.trained_params = self.adapter_params or shape.stored_params
        # Bound on the history of model-free drafters; no more than all responses take.
        bounds = [s.arguments()["history_mib"] for s in self.drafters if isinstance(s, NgramSpec | SuffixSpec)]
        most = float(recipe.train.steps * self.responses * self.tokens * (TREE_BYTES_PER_TOKEN + 4))
        self.history_bytes = sum(most if bound is None else min(bound * 2**20, most) for bound in bounds)


def _engine(sizes: MemorySizes, table: MemoryPlan) -> None:
    """Add a rollout worker's parts. With a known GPU vLLM's KV cache is the rest of its share.

    ConfigError where tensor parallelism does not divide the heads, or no full response fits. Asleep (level 1) an engine
    keeps its weights on the host, pinned: torch never frees that memory.
    """
    recipe, shape, value, tokens, running = sizes.recipe, sizes.shape, sizes.engine_value, sizes.tokens, sizes.running
    rollout, tp, drafter = recipe.rollout, recipe.rollout.tensor_parallel_size, recipe.drafter
    add, on_host = partial(table.add, WORKER), partial(table.add, WORKER, device="host")
    try:
        _, kv_heads = per_gpu_heads(shape, tp)
    except ConfigError as error:
        raise ConfigError(f"rollout.tensor_parallel_size: {error}") from error
    loaded = tuple(phase for phase in PHASES if not (sizes.colocated and phase in TRAINING))
    # Colocated, weights within a device are transferred before the caches are allocated.
    generating = GENERATING if sizes.colocated and sizes.transport == "ipc" else loaded

    # vLLM pads the vocabulary to a multiple of 64; the CPU build stores embedding and LM head twice.
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
        # Sampling holds logits as bfloat16 and float32, their log-softmax and their softmax.
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
        formula = f"the rest of gpu_memory_utilization = {share:g}"
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
    on_host("engine asleep", (sizes.colocated or rollout.tail_shape is not None) * tp * (weights + head), formula)
    if sizes.on_gpu and rollout.tail_shape is not None:
        add("engine asleep", CONTEXT_BYTES + GRAPH_BYTES, "flat: context and graphs of an engine of the other shape")

    processes = 1 + tp if tp > 1 else 1
    on_host("rollout worker runtime", processes * RUNTIME_BYTES[WORKER], f"measured, x {processes} processes")
    growing = f"bytes x {running} running responses x {tokens} tokens"
    on_host("texts", _TEXT_BYTES * running * tokens, f"{_TEXT_BYTES} {growing}", GENERATING)
    on_host("drafter history", sizes.history_bytes, "history_mib of the drafters in use")
    trees = sum(_TREE_BYTES.get(spec.kind, 0) for spec in sizes.drafters)
    on_host("drafter trees", trees * running * tokens, f"{trees} {growing}", GENERATING)
    if drafter is not None:
        formula = f"hidden states of {running} running responses; at most a quarter of free memory"
        on_host("captured states", running * tokens * sizes.state_bytes, formula)
        moving = sizes.on_gpu * 2 * rollout.batched_tokens * (sizes.state_bytes + 8)
        formula = "2 x hidden states of max_num_batched_tokens, pinned"
        on_host("captured states, on their way", moving, formula)
        on_host("fed states", 2 * tokens * sizes.state_bytes, "a response's states, sent and received")
    _sent(sizes, table, WORKER)


def _adapter_params(shape: ModelShape, lora: LoraConfig) -> int:
    """Return the parameters of adapters of a dense decoder's matrices, by their usual names."""
    queries, keys, mlp = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.intermediate
    widths = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "o_proj": queries}
    widths |= {"gate_proj": mlp, "up_proj": mlp, "down_proj": mlp}
    chosen = [width for name, width in widths.items() if lora.targets == "all-linear" or name in lora.targets]
    return lora.rank * shape.layers * (len(chosen) * shape.hidden + sum(chosen))


def _trainer(sizes: MemorySizes, table: MemoryPlan) -> None:
    """Add a rank's parts: those it keeps between updates, and those of an update and a sync.

    An update takes most where the last layer's gradient is computed: at the LM head, or just after it.

    Float32 master weights, gradients and Adam's two moments are the 16 bytes per parameter of ZeRO (arXiv 1910.02054,
    section 3.1), shared by all ranks (its stage 3, which is FSDP2). Activations are counted as in arXiv 2205.05198,
    section 4.1, for a gated MLP, RMSNorm in float32 and attention that keeps no scores. With checkpointing each layer
    keeps its input, and one layer at a time all of it. Ranks that share sequences have that share of their tokens.
    """
    shape, train = sizes.shape, sizes.recipe.train
    value, trained = sizes.trainer_value, sizes.trained_params / train.ranks
    share = (shape.stored_params + sizes.adapter_params) / train.ranks
    what = "parameters" if train.lora is None else "parameters of adapters"
    add, on_host = partial(table.add, RANK), partial(table.add, RANK, device="host")
    offloads = sizes.colocated and train.offload
    resident = (TRAINING + SYNC if sizes.transport == "ipc" else TRAINING) if offloads else PHASES
    # Pinned memory is kept for the next time.
    on_cpu = PHASES if offloads and sizes.on_gpu else [phase for phase in PHASES if phase not in resident]
    for name, num_bytes, formula in (
        ("master weights", 4 * share, "4 bytes x parameters / ranks (ZeRO 3)"),
        ("Adam moments", 8 * trained, f"8 bytes x {what} / ranks (ZeRO 3)"),
        ("reference model", 4 * share * bool(train.kl_coef and not train.lora), "4 bytes x parameters / ranks"),
    ):
        add(name, num_bytes, formula, resident)
        on_host(name, num_bytes, f"{formula}, offloaded", on_cpu)
    add("gradients", 4 * trained, f"4 bytes x {what} / ranks", TRAINING)
    if sizes.shards:
        gathered = value * (sizes.shared_params + 2 * shape.layer_params)
        formula = f"{value} bytes x (embedding, LM head, a layer and the next) (FSDP2)"
        add("gathered weights", gathered, formula, TRAINING)

    tokens = ceil(max(train.tokens_per_microbatch, sizes.tokens) / train.sequence_parallel)
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    # On a CPU attention runs sequence by sequence, and its outputs are joined.
    attended = 2 if sizes.on_gpu else 3
    layer = value * (4 * shape.hidden + attended * queries + 2 * keys + 4 * shape.intermediate) + 8 * shape.hidden
    activations = tokens * shape.layers * layer
    formula = f"tokens x layers x (4 hidden + {attended} queries + 2 keys + 4 MLP, norms in float32)"
    if train.activation_checkpointing:
        activations = tokens * (shape.layers * shape.hidden * value + layer)
        formula = "tokens x (layers x hidden + one layer's activations)"
    add("activations", activations, f"{formula}, {tokens} tokens", TRAINING)
    # Logits and one copy in float32, and a bfloat16 copy where that is the compute dtype. The LM head's gradient is
    # summed in float32, chunk by chunk, and FSDP2 reduces a layer's while the next one's is computed.
    each, trains_all = 8 if value == 4 else 10, train.lora is None
    head = each * min(tokens * shape.vocab, LOGITS) + trains_all * (4 + sizes.shards * value) * shape.head_params
    layers = value * shape.head_params + (4 + value) * shape.layer_params
    backward = trains_all * sizes.shards * layers + value * tokens * 2 * shape.intermediate
    formula = f"the larger of the LM head's ({each} bytes x a chunk's logits, its gradient) and a layer's, unreduced"
    add("logits and gradients", max(head, backward), formula, TRAINING)
    add("trainer runtime", sizes.on_gpu * TRAINER_BYTES, "flat: context, workspaces", TRAINING + SYNC)
    add("trainer runtime", sizes.on_gpu * CONTEXT_BYTES, "flat: context", GENERATING)
    on_host("trainer rank runtime", RUNTIME_BYTES[RANK], "measured")
    samples = 28 * sizes.responses * sizes.tokens / train.data_ranks
    on_host("samples", samples, "28 bytes x responses x tokens / ranks of other sequences", TRAINING)
    _sent(sizes, table, RANK)


def _sent(sizes: MemorySizes, table: MemoryPlan, process: str) -> None:
    """Add parts of weight transfers (`engine.weights`): a process's buckets, and a sharded trainer's gathered tensor.

    By the host the buckets are shared memory of a machine, mapped permanently; between devices they exist during a
    sync.
    """
    value, shape = sizes.trainer_value, sizes.shape
    largest = max(shape.head_params, shape.hidden * shape.intermediate)
    if process == RANK and sizes.shards:
        # A rank's share is cast before; adapters are merged into float32 weights.
        each = value * (1 + 1 / sizes.recipe.train.ranks) + 8 * bool(sizes.adapter_params)
        table.add(process, "gathered tensor", each * largest, f"{each:.3g} bytes x the largest tensor's numbers", SYNC)
    if sizes.transport == "host":
        formula = "2 buckets of a tensor or more, in shared memory"
        table.add(process, "weights, shared", 2 * max(BUCKET_BYTES, value * largest), formula, device="host")
    else:
        table.add(process, "weights, in buckets", 2 * max(DEVICE_BUCKET_BYTES, value * largest), "2 buckets", SYNC)


def _drafter(sizes: MemorySizes, table: MemoryPlan) -> None:
    """Add the parts of the drafter trainer next to each engine; none without [drafter].

    Weights, gradients and moments stay on the device between periods, and so do earlier heads, for annotations, and
    embedding and LM head of the target. The backup state and the checkpoint's are copies.
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
    # Input states in float32; beyond a chunk logits are recomputed instead of kept.
    states = 4 * rows * (2 * shape.hidden + sizes.state_bytes / sizes.engine_value)
    logits = rows * shape.vocab
    kept_logits = 8 * steps * logits + 16 * logits if logits <= LOGITS else 24 * LOGITS
    # Unrolled steps keep their attention weights, computed 256 queries at a time.
    attended = 6 * (steps - 1) * shape.heads * rows * (min(rows, sizes.tokens) / 2 + 128)
    formula = f"{rows} tokens x {steps} steps: a layer's, logits' and unrolled attention's"
    add("drafter activations", rows * steps * layer + states + kept_logits + attended, formula, ("idle training",))
    add("drafter trainer runtime", sizes.on_gpu * CONTEXT_BYTES, "flat: context")
    on_host("drafter trainer process", RUNTIME_BYTES[SPOT], "measured")
    response = sizes.tokens * (sizes.state_bytes + 8)
    per_step = ceil(sizes.responses / sizes.recipe.rollout.num_workers) * response
    buffer = min(config.buffer.max_bytes, per_step * config.buffer.rl_steps)
    on_host("drafter buffer", buffer, "drafter.buffer.max_bytes, or all states of its RL steps")
    held_out = 2 * min(config.buffer.extra_bytes, per_step)
    on_host("drafter, held out", held_out, "held-out sequences and prompts: an 8th of the buffer each")
    on_host("drafter, annotated", min(config.annotate * response, per_step), f"{config.annotate} responses' states")
    on_host("drafter checkpoint", 12 * head, "12 bytes x the head's parameters, staged")


def _driver(sizes: MemorySizes, table: MemoryPlan) -> None:
    """Add the parts of the driver, Ray's object store, Ray and a reward process: all on hosts."""
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
    """Return the bytes of a number in a dtype; None and "auto" are bfloat16 on a GPU, else float32."""
    if dtype in (None, "auto"):
        return 2 if on_gpu else 4
    return 4 if dtype == "float32" else 2


@frozen
class Memory:
    """Memory of a GPU, a host or, without GPUs, one process, at its peak in a phase."""

    where: str
    device: Device
    phase: str
    parts: tuple[MemoryPart, ...]
    total_bytes: float


@frozen
class RunPlan:
    """A recipe's plan.

    `fits`: each GPU has `MARGIN` to spare in each phase; None where no GPU is named to compare memory with. `tight` is
    the place that has room, but less than that to spare. `system` is None, or the settings that execute the recipe's
    system.
    """

    model: str
    num_params: int
    system: Json | None
    placement: str
    num_nodes: int
    gpus_per_node: int
    gpu: str | None
    gpu_bytes: float | None
    responses_per_step: int
    tokens_per_response: int
    memory: tuple[Memory, ...]
    fits: bool | None
    tight: str | None
    notes: tuple[str, ...]

    def text(self) -> str:
        """Return the plan as text."""
        gpus = f" x {self.gpus_per_node} {self.gpu or 'GPUs'}" if self.gpus_per_node else ""
        run = [
            ("model", f"{self.model}, {self.num_params / 1e9:.3g} B parameters"),
            ("cluster", f"{self.num_nodes} node{'s' * (self.num_nodes > 1)}{gpus}, {self.placement}"),
            ("RL step", f"{self.responses_per_step} responses of up to {self.tokens_per_response} tokens, "
                        "prompt included"),
        ]  # fmt: skip
        if self.system is not None:
            settings = [f"{name} = {value}" for name, value in self.system["settings"].items()]
            drafts = ", ".join(self.system["strategies"])
            run.append(("system", ", ".join([f"{self.system['title']}: drafts {drafts}", *settings])))
        lines = [table((), run, left=2), "memory, GB by phase", *_memory_tables(self.memory, self.gpu_bytes)]
        margin = f"{MARGIN:.0%} of what is reckoned"
        if self.tight is not None:
            lines.append(f"WARNING: it may not fit: {self.tight}, without {margin} to spare")
        elif self.fits is not None:
            said = f"fits, with {margin} to spare" if self.fits else "DOES NOT FIT"
            lines.append(f"on the recipe's GPUs ({self.num_nodes}{gpus}), whatever this machine has, it {said}")
        return "\n".join(lines + [f"note: {note}" for note in self.notes])


def plan_of(recipe: Recipe) -> RunPlan:
    """Return a recipe's plan; needs neither GPUs nor Ray nor the model's weights.

    ConfigError where its GPUs do not add up, tensor parallelism does not divide the model, or the model's shape or the
    GPU is unknown. A plan that does not fit is no error: see `fits`.
    """
    sizes = MemorySizes(recipe)
    shape, bundles, gpu, build = sizes.shape, sizes.bundles, sizes.gpu, sizes.build
    table = MemoryPlan("GPU" if sizes.on_gpu else "host")
    for rows_of in (_engine, _trainer, _drafter, _driver):
        rows_of(sizes, table)
    memory = tuple(_memory(table, bundles, _on_first_node(recipe, bundles)))
    # Places without a margin, and among them those without room.
    short = [] if gpu is None else list(_short(bundles, memory, gpu, recipe.rollout.vllm))
    tight = short[0][0] if short and not any(lacks for _, lacks in short) else None
    system, notes = system_settings(recipe)
    if table.at_once < sizes.running:
        notes.append(
            f"an engine's KV cache holds {table.at_once} responses of full length, up to {sizes.running} run at a "
            "time: if all grow long, vLLM preempts some"
        )
    if recipe.train.sampling_rounds > 1:
        notes.append(
            f"train.sampling_rounds = {recipe.train.sampling_rounds}: an RL step rolls out up to as many times, for "
            "groups that cannot train"
        )
    notes += notes_of(recipe)
    if sizes.on_gpu:
        notes.append(
            "when trainers start, rank 0 reads the whole model in float32 on its host: "
            f"{4e-9 * shape.stored_params:.1f} GB beside what is counted"
        )
    if build.graphs is not None:
        notes += [f"CUDA graphs: {note}" for note in build.graphs.notes()]
    if recipe.data.max_prompt_tokens is None and "max_model_len" not in recipe.rollout.vllm:
        notes.append("data.max_prompt_tokens is not set: prompts are taken to have up to 1024 tokens")
    return RunPlan(
        model=shape.name,
        num_params=shape.stored_params,
        system=system,
        placement=recipe.cluster.placement,
        num_nodes=recipe.cluster.num_nodes,
        gpus_per_node=recipe.cluster.gpus_per_node,
        gpu=gpu.name if gpu else None,
        gpu_bytes=gpu.memory_bytes if gpu else None,
        responses_per_step=sizes.responses,
        tokens_per_response=sizes.tokens,
        memory=memory,
        fits=None if gpu is None else not short,
        tight=tight,
        notes=tuple(notes),
    )


def _on_first_node(recipe: Recipe, bundles: Bundles) -> Counter[str]:
    """Return the number of processes by kind on the driver's node, the first: ranks and workers fill nodes in order."""
    nodes = iter(nodes_of(bundles, recipe.cluster.gpus_per_node))
    engines = [next(nodes) if gpus else 0 for gpus in bundles.workers]
    # Those of a tail shape have a process each too.
    workers = engines * (len(engine_gpus(recipe)) // len(engines))
    if bundles.colocated:
        ranks = [engines[bundles.place_of(rank)[0]] for rank in range(recipe.train.ranks)]
    else:
        ranks = [next(nodes) if gpus else 0 for gpus in bundles.ranks]
    spots = workers.count(0) if recipe.drafter is not None else 0
    counts = {WORKER: workers.count(0), RANK: ranks.count(0), SPOT: spots, REWARDS: recipe.reward_pool.processes}
    return Counter({**counts, DRIVER: 1, STORE: 1, RAY: 1})


def _memory(table: MemoryPlan, bundles: Bundles, counts: Counter[str]) -> Iterator[Memory]:
    """Yield memory by place and phase: a GPU or process of each kind, then the fullest host."""
    if bundles.colocated:
        places = {"a GPU": [WORKER, RANK, SPOT]}
    elif bundles.all:
        places = {"a rollout worker's GPU": [WORKER, SPOT], "a trainer rank's GPU": [RANK]}
    else:
        places = {f"a {process}'s process": [process] for process in (WORKER, RANK, SPOT)}
    devices = [(place, table.device, Counter(processes)) for place, processes in places.items()]
    for place, device, num_of in (*devices, ("the driver's host", "host", counts)):
        for phase in PHASES:
            parts = [
                replace(part, num_bytes=num * part.num_bytes, formula=f"{num} x ({part.formula})") if num > 1 else part
                for process in PROCESSES
                if (num := num_of[process])
                for part in table.of(process, device, phase)
            ]
            if parts:
                total = sum(part.num_bytes for part in parts)
                yield Memory(where=place, device=device, phase=phase, parts=tuple(parts), total_bytes=total)


def _memory_tables(memory: Sequence[Memory], gpu_bytes: float | None) -> Iterator[str]:
    """Yield a table for each place: a row for each part, a column for each phase."""
    for place, group in groupby(memory, key=lambda entry: entry.where):
        phases = list(group)
        parts = {(part.process, part.name): part for entry in phases for part in entry.parts}
        sizes = [{(part.process, part.name): part.num_bytes for part in entry.parts} for entry in phases]
        rows = [
            (*name, *(f"{size[name] / 1e9:.3f}" if name in size else "-" for size in sizes), part.formula)
            for name, part in parts.items()
        ]
        limit = f"of {gpu_bytes / 1e9:.0f} GB" if gpu_bytes and phases[0].device == "GPU" else ""
        rows.append(("", "total", *(f"{entry.total_bytes / 1e9:.3f}" for entry in phases), limit))
        yield table((place, "", *(entry.phase for entry in phases), ""), rows, left=2, words=True, indent=2)


def _short(bundles: Bundles, memory: Sequence[Memory], gpu: Gpu, vllm: Fields) -> Iterator[tuple[str, bool]]:
    """Yield each place and phase without a margin, and whether it lacks room: actors share a GPU, or a share of it."""
    share_of = {
        "a rollout worker's GPU": min(bundles.workers[0] or 1, 1.0),
        "a trainer rank's GPU": min((*bundles.ranks, 1.0)[0] or 1, 1.0),
    }
    measured = () if "kv_cache_memory_bytes" in vllm else (WORKER,)
    for entry in memory:
        limit, total = gpu.memory_bytes * share_of.get(entry.where, 1.0) + 1e-3, entry.total_bytes
        reckoned = sum(part.num_bytes for part in entry.parts if part.process not in measured)
        if entry.device == "GPU" and total + MARGIN * reckoned > limit:
            yield f"{total / 1e9:.1f} of {limit / 1e9:.1f} GB on {entry.where} in {entry.phase}", total > limit
