"""Engines of a recipe: its model's shape, context and requests, and their build: drafters, depths and CUDA graphs."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from math import ceil
from pathlib import Path

from tltlab.costs.profiles import find_model
from tltlab.drafters.specs import DEFAULT_DRAFTERS, DrafterSpec, LearnedSpec
from tltlab.errors import ConfigError
from tltlab.files import read_object
from tltlab.hardware import Gpu, ModelShape
from tltlab.hardware import gpu as gpu_by_name
from tltlab.policies.policy import Policy
from tltlab.records import Json, frozen
from tltlab.runtime.engine.drafter_pool import DrafterPool
from tltlab.runtime.engine.graphs import (
    GIB,
    CapturedGraphs,
    GraphPlan,
    fitting_plan,
    memory_bytes,
    plan_graphs,
)

from .gpus import bundles_of
from .recipe import Recipe

PROMPT_TOKENS = 1024
"""Tokens of a prompt, where `data.max_prompt_tokens` does not limit them."""


def shape_of(model: str) -> ModelShape:
    """Return the shape of a dense decoder, a folder or a name of `tltlab.hardware`; ConfigError for any other model."""
    try:
        shape = find_model(model)
    except (ConfigError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(f"unknown shape of model {model!r}: {error}; download it first") from error
    if shape.experts:
        raise ConfigError(f"{model} is a mixture of experts, and estimates are for dense models")
    return shape


def start_timeout_s(recipe: Recipe) -> float:
    """Return the time limit of a start that loads the recipe's model, of 0 parameters where its shape is unknown."""
    with suppress(ConfigError):
        return recipe.faults.start_s(shape_of(recipe.model).stored_params)
    return recipe.faults.start_s()


def context_tokens(recipe: Recipe) -> int:
    """Return the tokens of the longest prompt and response."""
    tokens = (recipe.data.max_prompt_tokens or PROMPT_TOKENS) + recipe.rollout.max_response_tokens
    return min(tokens, int(recipe.rollout.vllm.get("max_model_len") or tokens))


def engine_context(recipe: Recipe) -> int | None:
    """Return an engine's limit of tokens in a prompt and its response, or a bound above; None where unknown."""
    return int(recipe.rollout.vllm.get("max_model_len") or 0) or model_context(recipe.model)


def model_context(model: str) -> int | None:
    """Return the tokens of the longest context, as vLLM reads it from the model's files; None where unknown.

    Releases of vLLM differ in scaled rotary embeddings: the result is the longest context of any of them.
    """
    config = config_of(model)
    config |= config.get("text_config") or {}
    positions, rope = config.get("max_position_embeddings"), config.get("rope_parameters") or config.get("rope_scaling")
    if type(positions) is not int:
        return None
    most = config_of(model, "tokenizer_config.json").get("model_max_length")
    factor = rope.get("factor") if isinstance(rope, dict) else None
    return ceil(min(positions, most if isinstance(most, int) else positions) * max(float(factor or 1), 1.0))


def config_of(model: str, name: str = "config.json") -> Json:
    """Read a JSON object of a model's folder, or of a model in the Hugging Face cache; empty where there is none."""
    return read_object(model_file(model, name))


def model_file(model: str, name: str) -> Path:
    """Return the path of a file in a model's folder, or of a model in the Hugging Face cache; it need not exist."""
    if not Path(model).is_dir():
        # Imported here: slow, and most models are folders.
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        with suppress(HFValidationError):  # a path
            if isinstance(cached := try_to_load_from_cache(model, name), str):
                return Path(cached)
    return Path(model) / name


def vllm_batch(gpu: Gpu | None) -> int:
    """Return vLLM 0.32's default max_num_seqs (`arg_utils`): more on GPUs of 70 GiB and up, the A100 excepted."""
    return 1024 if gpu is not None and gpu.memory_bytes >= 70 * 2**30 and gpu.name != "A100" else 256


def requests_per_engine(recipe: Recipe) -> int:
    """Return the number of responses of one rollout that an engine has to generate."""
    rollout = recipe.rollout
    prompts, samples, partial = rollout.prompts_per_step, rollout.group_size, rollout.partial
    if partial is not None:
        prompts, samples = ceil(partial.issue * prompts), ceil(partial.samples * samples)
    total = prompts * samples if partial is None or partial.concurrency is None else partial.concurrency
    return ceil(total / rollout.num_workers)


_HOPPER = ("H100", "H200")
"""GPUs on which vLLM uses FlashAttention 3."""

_COARSE = 1.5
"""Least ratio of neighbouring batch sizes where memory cannot be predicted."""

_OWN_SETTINGS = ("speculative_config", "compilation_config")
"""Arguments of vLLM in `rollout.vllm` that rule out planned graphs."""


@frozen
class EngineBuild:
    """Build of an engine. Without `graphs` vLLM captures its default graphs, if any.

    `graph_bytes` is their predicted memory on each GPU, None where unknown.
    """

    drafters: dict[str, DrafterSpec]
    max_draft_depth: int
    graphs: GraphPlan | None = None
    graph_bytes: float | None = None

    def sentences(self, captured: CapturedGraphs) -> Iterator[str]:
        """Yield sentences on the graphs that an engine has captured, and on differences from the plan."""
        if captured.mode == "NONE":
            return
        memory = "" if captured.num_bytes is None else f" in {captured.num_bytes / GIB:.2f} GiB"
        yield (
            f"an engine has {len(captured.full)} full and {len(captured.piecewise)} piecewise CUDA graphs{memory} "
            f"({captured.runner} runner, {captured.mode})"
        )
        if self.graphs is not None and self.graphs.any_lengths and captured.mode != "FULL":
            yield f"no full graphs of any lengths: all but drafts of {self.graphs.deepest} tokens run in piecewise ones"

    def as_json(self, captured: Iterable[CapturedGraphs]) -> Json:
        """Return the contents of a run's graphs.json: the plan, if any, and each engine's captured graphs."""
        planned = None
        if (plan := self.graphs) is not None:
            planned = {
                "runner": plan.runner,
                "depths": list(plan.depths),
                "full": [list(graph) for graph in plan.full_graphs()],
                "piecewise": list(plan.piecewise_graphs()),
                "predicted_bytes": self.graph_bytes,
                "notes": list(plan.notes()),
            }
        return {"planned": planned, "captured": [asdict(graphs) for graphs in captured]}


def drafters_of(recipe: Recipe, policy: Policy, head: str | Path = "") -> dict[str, DrafterSpec]:
    """Return all drafters of a recipe by name, the one that it trains included, whose weights are in `head`."""
    specs: dict[str, DrafterSpec] = DEFAULT_DRAFTERS | policy.drafters | recipe.rollout.drafters
    if (trained := recipe.drafter) is not None:
        # Engines find MTP layers in the target's folder.
        model = "" if trained.loss.method == "mtp" else str(head) or trained.checkpoint or "its own"
        specs[trained.name] = LearnedSpec(
            method=trained.loss.method, model=model, trained=trained.pretrained, fallback=trained.fallback
        )
    return specs


def engines_of(recipe: Recipe) -> EngineBuild:
    """Return the build of a recipe's engines after loading its policy; see `engine_build`."""
    policy = recipe.read_policy()
    return engine_build(recipe, policy, drafters_of(recipe, policy))


def engine_build(recipe: Recipe, policy: Policy, drafters: Mapping[str, DrafterSpec]) -> EngineBuild:
    """Return the build of the engines of a recipe with GPUs; `drafters` are all drafters, by name.

    `rollout.graphs` = "planned" builds engines for the depths of `policy` and for the drafters that it may use. With a
    learned drafter alone vLLM takes its V2 runner, which has full graphs of every depth. Depths that the policy never
    chooses are left out, since V1's full graphs are for the deepest one. Settings of speculation and compilation in
    `rollout.vllm` are left unchanged, and so are graphs of engines that apply adapters. ConfigError where the graphs
    take more than `rollout.graph_gib`; not checked for a model of unknown shape.
    """
    rollout = recipe.rollout
    stock = EngineBuild(drafters=dict(drafters), max_draft_depth=rollout.max_draft_depth)
    preset = any(name in rollout.vllm for name in _OWN_SETTINGS) or rollout.vllm.get("enforce_eager")
    preset = preset or recipe.train.served_adapter
    # A policy without a list of strategies could choose anything.
    if rollout.graphs == "stock" or not bundles_of(recipe).all or preset or not policy.strategies:
        return stock
    names = DrafterPool(drafters, rollout.max_draft_depth).needed(policy.strategies)
    needed = {name: spec for name, spec in drafters.items() if name in names}
    learned = [spec for spec in needed.values() if isinstance(spec, LearnedSpec)]
    depth = max((s.draft_depth for s in policy.strategies), default=0)
    # Kept where the policy never drafts with it: it is trained in any case.
    depth = max(depth, 1) if learned else depth
    gpu = None if recipe.cluster.gpu is None else gpu_by_name(recipe.cluster.gpu)
    largest = int(rollout.vllm.get("max_num_seqs") or vllm_batch(gpu))
    evaluated = ceil(recipe.eval.num_prompts * recipe.eval.samples / rollout.num_workers)
    batch = min(
        largest, max(requests_per_engine(recipe), evaluated, len({s.draft_depth for s in policy.strategies}) + 1)
    )
    make = partial(
        plan_graphs,
        policy.model_copy(update={"drafters": {**policy.drafters, **needed}}),
        batch,
        plain=True,
        deepest=depth,
        runner="V2" if len(learned) == len(needed) else "V1",
        # A draft model of many layers loses more by drafting without graphs than the target wins.
        any_lengths=(gpu is None or gpu.name in _HOPPER) and all(spec.method != "draft_model" for spec in learned),
        max_tokens=recipe.rollout.batched_tokens,
    )
    try:
        shape = shape_of(recipe.model)
    except ConfigError:
        return EngineBuild(drafters=needed, max_draft_depth=depth, graphs=make(spacing=_COARSE))
    try:
        plan = fitting_plan(make, shape.layers, shape.vocab, rollout.graph_gib * GIB)
    except ConfigError as error:
        raise ConfigError(f"rollout.graphs = planned: {error}; rollout.graph_gib is their limit") from error
    num_bytes = memory_bytes(plan, shape.layers, shape.vocab)
    return EngineBuild(drafters=needed, max_draft_depth=depth, graphs=plan, graph_bytes=num_bytes)
