"""The plan of a rehearsal: lengths from a trace, a model's shape, policies and how their drafts are kept."""

import math
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from tltlab.acceptance.load import load_acceptance
from tltlab.acceptance.per_drafter import EVERY, PerDrafter, refuse_one_for_several
from tltlab.costs.profiles import find_model
from tltlab.drafters.specs import STANDARD, Drafters, HybridSpec
from tltlab.errors import ConfigError
from tltlab.files import read_json
from tltlab.hardware import GIB, RUNTIME_BYTES, ModelShape, available_memory
from tltlab.own import split
from tltlab.policies.policy import Policy
from tltlab.policies.specs import FixedSpec
from tltlab.records import Json
from tltlab.runtime.rollout.played import STOCK, RehearsalPlan
from tltlab.sim.verification.played import listed_policies
from tltlab.strategy import NO_SPECULATION, Strategy, drafters_of
from tltlab.traces.metrics import num_workers
from tltlab.traces.trace import Trace

from .settings import RehearsalConfig

_SHAPES = read_json(Path(__file__).with_name("shapes.json"))
"""Entries that do not depend on the shape in the config.json of a Qwen model, and "tiny"."""
TINY = ModelShape(**_SHAPES["tiny"])
_MEMORY_SHARE = 0.9
_LARGE_BATCH = 1 << 20
_FP32_OVER_BF16 = 2


def plan_of(trace: Trace, model: str, config: RehearsalConfig) -> RehearsalPlan:
    """Check everything and return what would be played.

    Plain steps are timed at `plain_batches` besides. Raises ConfigError; nothing has been started then.
    """
    # torch takes seconds to import: --help should not wait for it.
    from tltlab.runtime.engine import environment

    policies, gpus, found = config.policies, config.gpus, environment.gpus()
    names = split(policies)
    if gpus is not None and gpus > len(found):
        raise ConfigError(f"--gpus {gpus}: torch finds {len(found)} here")
    ours = listed_policies(",".join(name for name in names if name != STOCK), fewest=0 if STOCK in names else 1)
    if names.count(STOCK) > 1:
        raise ConfigError(f"--policies {policies}: {STOCK} is there twice")
    stock = {STOCK: Policy(selector=FixedSpec(strategy=NO_SPECULATION))} if STOCK in names else {}
    shape, described = shape_of(model)
    lengths, prompt_tokens, about = shares(trace, config)
    used = drafters_of(s for policy in ours.values() for s in policy.strategies)
    drafters = Drafters({name: spec for policy in ours.values() for name, spec in policy.drafters.items()})
    granted = acceptance_by_drafter(config.acceptance, used, drafters)
    rates = {name: rates_of(name, policy, granted) for name, policy in ours.items()}
    modules = sorted({part.module for policy in ours.values() for part in policy.own_parts})
    plan = RehearsalPlan(
        model=shape.name, config=described, kv_token_bytes=shape.kv_bytes_per_token, lengths=lengths,
        prompt_tokens=prompt_tokens, group_size=trace.manifest.group_size or 8, about=about, policies=stock | ours,
        modules=tuple(modules), rates={STOCK: ()} | rates,
        granted={name: granted.text(name) for name in used},
        plain_batches=tuple(sorted(config.plain_batches)), rounds=config.rounds, seed=config.seed,
        gpus=len(found) if gpus is None else gpus,
    )  # fmt: skip
    if len(plan.learned) > 1:
        raise ConfigError(f"{' and '.join(plan.learned)} are learned drafters: an engine has at most one")
    _check_memory(plan, shape, found)
    return plan


def shares(trace: Trace, config: RehearsalConfig) -> tuple[tuple[tuple[int, ...], ...], int, str]:
    """Return response lengths by worker, prompt tokens, and a sentence on both.

    Lengths are evenly spaced quantiles of an RL step's, times cap / the longest, dealt to workers at random: the shape
    of the tail stays. By default a worker has as many as in the trace, and the cap is the longest. Prompts have the
    median length, times the same factor where it is below 1. Raises ConfigError for an RL step that the trace lacks.
    """
    rl_step, workers = config.rl_step, config.workers
    if not trace.rl_steps or (rl_step is not None and rl_step not in trace.rl_steps):
        known = f"{trace.rl_steps[0]} to {trace.rl_steps[-1]}" if trace.rl_steps else "none"
        raise ConfigError(f"--rl-step {rl_step}: the RL steps of this trace are {known}")
    chosen = trace.rl_steps[0] if rl_step is None else rl_step
    step = trace.select([chosen])
    recorded = step.outcomes.groupby(["prompt_id", "sample"])["response_tokens"].sum().to_numpy()
    if recorded.max() < 1:
        raise ConfigError(f"no response of RL step {chosen} has a token: there is nothing to play")
    each = config.responses or max(1, math.ceil(len(recorded) / num_workers(trace)))
    quantiles = np.quantile(recorded, (np.arange(each * workers) + 0.5) / (each * workers))
    factor = float((config.cap or recorded.max()) / quantiles.max())
    lengths = np.maximum(1, np.rint(quantiles * factor).astype(int))
    dealt = np.random.default_rng(0).permutation(lengths).reshape(workers, each)
    prompt_tokens = max(8, round(float(step.workload["prompt_tokens"].median()) * min(1.0, factor)))
    about = (
        f"{each} responses{f' for each of {workers} workers' if workers > 1 else ''} at evenly spaced quantiles of the "
        f"{len(recorded)} lengths of RL step {chosen} times {factor:.3g}: the longest has {lengths.max()} tokens, the "
        f"median {np.median(lengths):.0f}, prompts {prompt_tokens}"
    )
    return tuple(tuple(sorted(map(int, share))) for share in dealt), prompt_tokens, about


def acceptance_by_drafter(text: str, names: Collection[str], drafters: Drafters = STANDARD) -> PerDrafter:
    """Return the acceptance of each drafter, from `learned=geometric:0.7,ngram=0.42`; others keep their default.

    ConfigError for a model without a name where the drafters `names` are of different kinds.

    >>> acceptance_by_drafter("learned=0.8", ["ngram"]).text("ngram")
    'geometric:0.42 (default)'
    """
    model = load_acceptance(text)
    if isinstance(model, PerDrafter):
        return model
    refuse_one_for_several(model, text, names, drafters)
    return PerDrafter({}, model, {EVERY: text})


def rates_of(name: str, policy: Policy, granted: PerDrafter) -> tuple[float, ...]:
    """Return the chances that a policy's drafts are kept up to each of their tokens.

    ConfigError names the policy and the drafter: for trees and hybrids, for acceptance that is missing, too short, or
    differs by request, by what was generated or by batch size, and for drafters of which each has another one.
    """
    chains: dict[str, Strategy] = {}
    for strategy in sorted(policy.strategies, key=lambda strategy: strategy.draft_depth):
        if strategy.speculates:
            if strategy.tokens_to_verify != strategy.draft_depth + 1:
                raise ConfigError(f"policy {name} asks for {strategy}: engines verify whole chains")
            if isinstance(policy.drafters.get(strategy.drafter), HybridSpec):
                raise ConfigError(f"policy {name}: {strategy.drafter} joins two drafters, whose acceptance differs")
            chains[strategy.drafter] = strategy
    rates: tuple[float, ...] = ()
    for drafter, chain in chains.items():
        try:
            model = granted.of(drafter)
            settled = model.in_state({})
            cdf, at_most = (settled.at(batch).cdf(chain) for batch in (1, _LARGE_BATCH))
        except ConfigError as error:
            raise ConfigError(f"policy {name}, drafter {drafter}: {error}") from error
        if model.varies_by != "nothing" or cdf is None or at_most is None or not np.allclose(cdf, at_most):
            by = "batch size" if model.varies_by == "nothing" else model.varies_by
            raise ConfigError(
                f"policy {name}, drafter {drafter}: acceptance that differs by {by} cannot be played: give "
                "geometric:ALPHA"
            )
        rates = tuple(map(float, np.minimum.accumulate(np.clip(1.0 - cdf, 0.0, 1.0))))
    if len({granted.text(drafter) for drafter in chains}) > 1:
        raise ConfigError(f"policy {name}: an engine has one acceptance for {' and '.join(chains)}, not one each")
    return rates


def shape_of(model: str) -> tuple[ModelShape, Json]:
    """A model's shape and config.json, by a name of `tltlab.hardware`, "tiny-shape", a config.json or its folder."""
    path = Path(model) / "config.json" if Path(model).is_dir() else Path(model)
    if path.is_file():
        return find_model(model), read_json(path)
    shape = TINY if model == TINY.name else find_model(model)
    if shape.experts or shape.latent or shape.window_layers or shape.state_layers:
        raise ConfigError(f"--model {model}: give its config.json, since it is more than layers that are all alike")
    architecture, kind = ("Qwen3ForCausalLM", "qwen3") if shape.qk_norm else ("Qwen2ForCausalLM", "qwen2")
    return shape, _SHAPES["config"] | {
        "architectures": [architecture], "model_type": kind,
        "hidden_size": shape.hidden, "intermediate_size": shape.intermediate, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim,
        "vocab_size": shape.vocab, "tie_word_embeddings": shape.tied_embeddings,
    }  # fmt: skip


def _check_memory(plan: RehearsalPlan, shape: ModelShape, gpus: Sequence[tuple[str, int]]) -> None:
    """ConfigError, with what is missing, where weights and cache do not fit, before anything is started."""
    where, room = "free memory here", available_memory()
    need = _FP32_OVER_BF16 * shape.stored_bytes() + max(map(plan.kv_bytes, range(len(plan.lengths))))
    if plan.gpus:
        where, room = gpus[0]
        longest = max(map(max, plan.lengths)) + plan.prompt_tokens
        need = (shape.stored_bytes() + RUNTIME_BYTES + shape.kv_bytes_per_token * longest) / _MEMORY_SHARE
    if room is not None and need > room:
        raise ConfigError(
            f"{shape.name} needs {need / GIB:.1f} GiB, {(need - room) / GIB:.1f} GiB missing: {where} {room / GIB:.1f}"
        )
