"""Arguments that make any vLLM engine run a policy: `vllm_options`, and environment variables `Variables`."""

from __future__ import annotations

import json
import os
from collections.abc import Container, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Literal, Self, get_args

import numpy as np
from pydantic import Field

from tltlab.config import FrozenModel, faults_in
from tltlab.drafters.specs import DEFAULT_DRAFTERS, DrafterSpec, LearnedSpec, check_sampled_drafts
from tltlab.errors import ConfigError, TltlabError
from tltlab.policies.policy import Policy, PolicySource, load_policy
from tltlab.records import Fields, Json
from tltlab.runtime.engine.control import Control
from tltlab.runtime.engine.drafter_pool import DrafterPool
from tltlab.runtime.engine.graphs import GraphPlan, parts_of, plan_graphs
from tltlab.runtime.engine.requests import RlStepEnd

from . import OPTIONS, POLICY, RECORD, VARIABLES, attached, missing

_HERE = __package__

SCHEDULER = f"{_HERE}.scheduler.policy_scheduler"
"""The scheduler's name, as vLLM takes it: that of a function which picks the one that fits."""

Program = Literal["vllm", "vllm serve", "verl", "nemo-rl", "skyrl", "prime-rl", "openrlhf", "trl"]
"""Programs that pass the arguments of `vllm_options` on to vLLM, each in its own form."""


Arguments = Json
"""Settings by name, such as arguments of vLLM."""


class Attachment(FrozenModel):
    """An engine's settings in `additional_config["tltlab"]`: the policy, its drafters, and the engine's identity.

    Without a policy vLLM drafts by its own settings, and `record` records that. Several engines may share that name:
    each takes the first of RECORD, RECORD-1, ... where nothing is yet. With `host_drafts` some drafts are made next to
    the scheduler.
    """

    policy: Policy | None = None
    drafters: dict[str, DrafterSpec] | None = None
    max_draft_depth: int = 0
    worker: int = 0
    seed: int = 0
    record: str | None = None
    rl_step_ends: RlStepEnd | None = None
    host_drafts: bool = False

    @classmethod
    def of_engine(cls, config) -> Attachment:
        """Return the settings in the configuration of one engine; empty where nothing is attached."""
        with faults_in("additional_config['tltlab']"):
            attachment = cls.model_validate(attached(config))
        parallel = config.parallel_config
        if parallel.distributed_executor_backend != "external_launcher":
            return attachment.of_replica(parallel.data_parallel_index)
        # Every rank has a scheduler, and only the launcher's variable identifies rank and engine.
        index, rank = divmod(int(os.environ["RANK"]), parallel.world_size // parallel.data_parallel_size)
        return attachment.model_copy(update={} if rank == 0 else {"record": None}).of_replica(index)

    def of_replica(self, index: int) -> Attachment:
        """Return the settings of one of several data-parallel engines, another worker."""
        return self.model_copy(update={"worker": self.worker + index})

    @property
    def specs(self) -> Mapping[str, DrafterSpec]:
        """The drafters by name, by default those of every engine."""
        return DEFAULT_DRAFTERS if self.drafters is None else self.drafters

    @property
    def learned(self) -> LearnedSpec | None:
        """The learned drafter that the policy may use, by itself or in a hybrid."""
        strategies = self.policy.strategies if self.policy is not None else ()
        names = [part for s in strategies if s.speculates for part in parts_of(self.specs, s.drafter)]
        return next((spec for spec in map(self.specs.get, names) if isinstance(spec, LearnedSpec)), None)

    def control(self, *, overlapped: bool, on_host: bool = True) -> Control:
        """Return a fresh `Control` that follows the policy; ConfigError for a policy that the engine cannot run."""
        pool = DrafterPool(self.drafters, self.max_draft_depth, on_host=on_host)
        control = Control(pool, worker=self.worker, overlapped=overlapped)
        if self.policy is not None:
            control.set_policy(self.policy, (self.seed, self.worker, 0))
        return control


class EngineOptions(FrozenModel):
    """Arguments of `vllm_options` beside policy and record: the fields of `TLTLAB_OPTIONS`, a JSON object.

    With `strict` an engine that cannot follow the variables does not start (ConfigError); otherwise it runs without
    them.
    """

    drafters: dict[str, DrafterSpec] | None = None
    max_draft_depth: int | None = Field(default=None, ge=0)
    max_batch: int | None = Field(default=None, ge=1)
    async_scheduling: bool | None = None
    worker: int = Field(default=0, ge=0)
    seed: int = Field(default=0, ge=0)
    rl_step_ends: RlStepEnd | None = None
    strict: bool = False


def vllm_options(
    policy: PolicySource | None,
    *,
    drafters: Mapping[str, DrafterSpec] | None = None,
    max_draft_depth: int | None = None,
    max_batch: int | None = None,
    async_scheduling: bool | None = None,
    worker: int = 0,
    seed: int = 0,
    record: str | Path | None = None,
    rl_step_ends: RlStepEnd | None = None,
    for_: Program = "vllm",
) -> Arguments:
    """Return keyword arguments for `vllm.LLM` or `AsyncEngineArgs` that run `policy`, or only `record` for None.

    `policy` is any source that `load_policy` takes; `drafters` add to, or replace, the policy's own. The engine is
    built for drafts up to `max_draft_depth`, by default the policy's deepest. With `max_batch` it runs at most so many
    requests at a time and captures the CUDA graphs of `graphs.plan_graphs`. Engines that share a run differ by
    `worker`, and each data-parallel replica has a policy, drafters and its own trace. With `record` the engine
    writes a trace there, in which an RL step of requests without keys ends with `rl_step_ends` (default: the first of a
    weight update, a call of an offline program and an idle gap that occurs, `recording.Grouping`). ConfigError for
    policies that vLLM cannot run.

    Without a policy the engine is only recorded, its own speculation included: vLLM treats the other arguments as usual
    (`scheduler.record_only`), and an error of the recording ends no engine.

    vLLM schedules asynchronously where it can (on a CPU it cannot), unless `async_scheduling` is given. The policy then
    chooses without the last iteration's tokens, and drafting times are in no trace.

    `for_` returns the form that the program passes on unchanged: NeMo-RL under `vllm_kwargs` and SkyRL under
    `engine_init_kwargs` as they are; prime-rl, whose TOML has no null, without nulls; verl under `engine_kwargs.vllm`,
    and `vllm serve` in a file for `--config`, as flags, none of them false. OpenRLHF and TRL take no arguments for
    their engines: for them the result is environment variables (`Variables`).

    >>> sorted(vllm_options("beg-mab"))
    ['additional_config', 'scheduler_cls', 'speculative_config']
    >>> vllm_options("beg-mab", for_="trl")
    {'TLTLAB_POLICY': 'beg-mab'}
    """
    if policy is None and record is None:
        raise ConfigError("nothing to do for the engine: give a policy, a folder to record to, or both")
    chosen = None if policy is None else load_policy(policy)
    pool_specs = {**DEFAULT_DRAFTERS, **({} if chosen is None else chosen.drafters), **(drafters or {})}
    strategies = () if chosen is None else chosen.strategies
    deepest = max((strategy.draft_depth for strategy in strategies), default=0)
    depth = deepest if max_draft_depth is None or chosen is None else max_draft_depth
    pool = DrafterPool(pool_specs, depth)
    pool.use(strategies)
    if for_ in ("openrlhf", "trl"):
        engine_options = EngineOptions(
            drafters=dict(drafters) if drafters else None,
            max_draft_depth=max_draft_depth,
            max_batch=max_batch,
            async_scheduling=async_scheduling,
            worker=worker,
            seed=seed,
            rl_step_ends=rl_step_ends,
        )
        variables: Arguments = {}
        if isinstance(policy, str | Path):
            variables[POLICY] = os.path.abspath(policy) if os.path.isfile(policy) else str(policy)
        elif chosen is not None:
            variables[POLICY] = chosen.model_dump_json(exclude_none=True)
        if record is not None:
            variables[RECORD] = os.path.abspath(record)
        if fields := engine_options.model_dump(mode="json", exclude_defaults=True):
            variables[OPTIONS] = json.dumps(fields)
        return variables
    attachment = Attachment(
        policy=chosen,
        drafters=None if chosen is None else pool_specs,
        max_draft_depth=depth,
        worker=worker,
        seed=seed,
        record=None if record is None else str(Path(record).absolute()),
        rl_step_ends=rl_step_ends,
        host_drafts=pool.feeds,
    )
    options: Arguments = {"additional_config": {"tltlab": attachment.model_dump(mode="json")}}
    if chosen is not None:
        options["scheduler_cls"] = SCHEDULER
        if record is not None:
            # Iterations report the kind of CUDA graph they ran in.
            options["cudagraph_metrics"] = True
    elif "tltlab" not in os.environ.get("VLLM_PLUGINS", "tltlab").split(","):
        raise ConfigError("VLLM_PLUGINS leaves out 'tltlab', which records: add it")
    if async_scheduling is not None:
        options["async_scheduling"] = async_scheduling
    plan = None
    if max_batch is not None:
        options["max_num_seqs"] = max_batch
        if chosen is not None:
            plan = plan_graphs(
                chosen, max_batch, drafters=pool_specs, runner="V1" if pool.feeds else "V2", any_lengths=True
            )
    options |= engine_settings(speculative_config(pool_specs, depth), plan)
    if for_ in ("vllm serve", "verl"):
        return {
            f"no-{name.replace('_', '-')}" if value is False else name: (
                True if value is False else json.dumps(value) if isinstance(value, dict) else value
            )
            for name, value in options.items()
        }
    return _without_null(options) if for_ == "prime-rl" else options


def _without_null(value):
    if isinstance(value, dict):
        return {name: _without_null(each) for name, each in value.items() if each is not None}
    return value


class Variables(FrozenModel):
    """Environment variables for every engine that a program starts.

    `TLTLAB_POLICY` is a policy's name, its file, package.module:Class, or a file's content; `TLTLAB_RECORD` the folder
    of a trace; `TLTLAB_OPTIONS` the rest as JSON.
    """

    policy: Policy | None = None
    named: str = ""
    record: str | None = None
    options: EngineOptions = EngineOptions()

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Self | None:
        """Read an environment; None where it requests nothing. ConfigError names the variable that is wrong."""
        policy, record, options = (environ.get(name, "").strip() for name in VARIABLES)
        if not policy and not record:
            if options:
                raise ConfigError(f"{OPTIONS} is set, but neither {POLICY} nor {RECORD}")
            return None
        return cls(
            policy=_policy(policy) if policy else None,
            named="of its own" if policy.startswith("{") else policy,
            record=os.path.abspath(record) if record else None,
            options=cls.read_options(options),
        )

    @classmethod
    def read_options(cls, text: str) -> EngineOptions:
        """Parse the value of `TLTLAB_OPTIONS`. ConfigError where it is no JSON object of known fields."""
        try:
            value = json.loads(text or "{}")
        except ValueError as error:
            raise ConfigError(f"{OPTIONS} must be a JSON object: {error}") from error
        with faults_in(OPTIONS):
            return EngineOptions.model_validate(value)

    def engine_options(self, async_scheduling: bool | None, speculative: Fields | None = None) -> Arguments:
        """Return `vllm_options` for an engine whose program sets `async_scheduling`, None where it does not.

        Where the program speculates by itself with a learned drafter (`speculative` is its speculative_config), that
        drafter becomes the policy's drafter with a network, as deep as the program has it. ConfigError where the policy
        names none.
        """
        arguments = {name: value for name, value in self.options if name != "strict"}
        if arguments["async_scheduling"] is None:
            arguments["async_scheduling"] = async_scheduling
        if speculative and self.policy is not None:
            head, drafters = _learned(speculative), self.policy.registry.joined(arguments["drafters"] or {})
            named = {s.drafter for s in self.policy.strategies if drafters.network_passes(s)}
            parts = {part for name in named for part in parts_of(drafters.specs, name)}
            networks = [name for name in sorted(parts) if drafters[name].made_by == "workers"]
            if head is None or len(networks) != 1:
                raise ConfigError(
                    "its program speculates by itself, which the policy can control only with one drafter with a "
                    f"network, such as 'learned', and the method is one of {', '.join(_LEARNED)} (it is "
                    f"{speculative.get('method')!r})"
                )
            arguments["drafters"] = {**(arguments["drafters"] or {}), networks[0]: head}
            arguments["max_draft_depth"] = int(speculative["num_speculative_tokens"])
        options = vllm_options(self.policy, record=self.record, **arguments)
        if speculative and self.policy is not None:
            options["speculative_config"] = dict(speculative)
        return options

    def __str__(self) -> str:
        parts = [f"follows the policy {self.named}"] if self.policy is not None else []
        if self.record is not None:
            parts.append(f"records to {self.record} (-1, -2, ... where that is taken)")
        return " and ".join(parts)


_LEARNED = get_args(LearnedSpec.model_fields["method"].annotation)


def _learned(speculative: Fields) -> LearnedSpec | None:
    """Return the learned drafter of vLLM's speculative_config, None where it is of another kind."""
    if speculative.get("method") not in _LEARNED or "num_speculative_tokens" not in speculative:
        return None
    return LearnedSpec(method=speculative["method"], model=str(speculative.get("model") or ""))


def _policy(text: str) -> Policy:
    try:
        if text.startswith("{"):
            return load_policy(json.loads(text))
        return load_policy(text)
    except (TltlabError, ValueError) as error:
        folder = "" if os.path.isabs(text) or "/" not in text else f" (from {os.getcwd()})"
        raise ConfigError(f"{POLICY}: {error}{folder}") from error


def engine_settings(speculative: Fields | None, graphs: GraphPlan | None) -> Arguments:
    """Return vLLM's arguments for drafting and, where they are planned, for CUDA graphs."""
    if graphs is not None:
        return graphs.engine_settings(speculative)
    return {} if speculative is None else {"speculative_config": dict(speculative)}


def speculative_config(drafters: Fields, depth: int) -> Arguments | None:
    """Return vLLM's speculative_config for the learned drafter among `drafters`, or for model-free ones alone."""
    if not depth:
        return None
    learned = next((spec for spec in drafters.values() if isinstance(spec, LearnedSpec)), None)
    if learned is None:
        return {"method": "custom_class", "model": f"{_HERE}.scheduler.NoProposer", "num_speculative_tokens": depth}
    return learned.speculative_config | {"num_speculative_tokens": depth}


_BESIDE: Mapping[str, Container[object]] = {
    "model_config.enable_trace_replay": (True,),
    "structured_outputs_config.backend": ("lm-format-enforcer",),
    "parallel_config.enable_elastic_ep": (True,),
    "parallel_config.prefill_context_parallel_size": range(2, 1 << 16),
    "kv_transfer_config.kv_connector": ("MoRIIOConnector",),
}
"""Settings and values that vLLM 0.26 to 0.33 refuses together with speculation, at start or later."""

_ONE_DEPTH = ("suffix", "medusa", "extract_hidden_states")
"""Methods of vLLM 0.32 that assert a draft depth of `num_speculative_tokens` and no less (`v1.spec_decode`)."""


def check_engine(config, attachment: Attachment, *, plugged_in: bool, sound: bool) -> None:
    """Raise ConfigError where an engine of vLLM's configuration `config` cannot run its attachment.

    It is `plugged_in` where vLLM loaded tltlab's plugin in its process, and `sound` where drafts are verified correctly
    there.
    """
    complaint = ""
    if not plugged_in:
        complaint = f"vLLM has not loaded tltlab's plugin here: {missing_plugin()}"
    elif config.speculative_config is not None and not sound:
        complaint = (
            "vLLM's rejection sampler is not repaired here and, at temperature > 0, samples drafts wrongly on a CPU: "
            "leave speculative_config out"
        )
    elif attachment.policy is not None:
        complaint = _unfit_policy(config, attachment, attachment.policy)
    if complaint:
        raise ConfigError(complaint)


def missing_plugin() -> str:
    """Return why vLLM did not load tltlab's plugin, and the setting to change."""
    named = os.environ.get("VLLM_PLUGINS")
    if named is None:
        return "install tltlab into the environment that vLLM runs in"
    return f"VLLM_PLUGINS={named} leaves it out; pass VLLM_PLUGINS={','.join(filter(None, (named, 'tltlab')))}"


def _unfit_policy(config, attachment: Attachment, policy: Policy) -> str:
    """Return the fault of the policy in this engine, "" for none."""
    parallel, speculative, model = config.parallel_config, config.speculative_config, config.model_config
    learned = attachment.learned
    kind = "diffusion" if getattr(model, "is_diffusion", False) else model.runner_type
    if kind in ("diffusion", "pooling"):
        return f"a {kind} model has no drafts that a policy could choose: leave the policy out (record= works)"
    if parallel.pipeline_parallel_size > 1:
        return (
            f"pipeline_parallel_size={parallel.pipeline_parallel_size}: a policy cannot follow several batches that "
            "are under way at once: pass pipeline_parallel_size=1, and tensor_parallel_size"
        )
    if attachment.max_draft_depth > config.num_speculative_tokens:
        return (
            f"the policy may draft {attachment.max_draft_depth} tokens and this engine is built for drafts of "
            f"{config.num_speculative_tokens}: pass the speculative_config of vllm_options, with "
            f"num_speculative_tokens={attachment.max_draft_depth}"
        )
    if speculative is None:
        return ""
    if config.use_v2_model_runner and (without := missing("depths in the V2 runner")):
        return without
    check_sampled_drafts(attachment.specs, vars(speculative))
    if speculative.method == "ngram_gpu" and not config.use_v2_model_runner:
        return (
            "vLLM's n-grams on the device (ngram_gpu) take a depth per iteration in the V2 model runner alone, which "
            "needs Triton and no drafter of the host beside it: name 'ngram', or set VLLM_USE_V2_MODEL_RUNNER=1"
        )
    if speculative.method in _ONE_DEPTH:
        return (
            f"vLLM's {speculative.method} drafts at one depth only and ends an engine that asks for another: pass the "
            "speculative_config of vllm_options, or leave the policy out"
        )
    if refused := _refused_beside_drafts(config):
        return f"vLLM does not speculate together with {refused}: leave the policy out, or that"
    if getattr(speculative, "enable_adaptive_verification", False):
        return "enable_adaptive_verification decides what a policy decides: pass enable_adaptive_verification=False"
    if learned is not None and drafts_nothing(speculative):
        return (
            f"the policy asks for a learned drafter and this engine has none: pass speculative_config="
            f"{learned.speculative_config | {'num_speculative_tokens': attachment.max_draft_depth}}"
        )
    if parallel.data_parallel_size > 1 and not drafts_nothing(speculative):
        # vLLM takes its own tables of depths away there.
        return (
            f"data_parallel_size={parallel.data_parallel_size}: the replicas of a mixture of experts run in step, and "
            "would wait for each other forever once a policy lets one draft deeper than another: pass "
            "data_parallel_size=1 and start several engines, or take a policy that names model-free drafters only"
        )
    together = parallel.world_size // parallel.data_parallel_size
    launched = parallel.distributed_executor_backend == "external_launcher" and together > 1
    if launched and not policy.selector.build(np.random.default_rng(0)).memoryless:
        return (
            f"distributed_executor_backend='external_launcher' has a scheduler in each of {together} ranks, and a "
            f"policy that learns ({policy.selector.kind}) would soon make different choices in each: pass "
            "distributed_executor_backend='mp', or a policy of kind none, fixed or table"
        )
    return ""


def _refused_beside_drafts(config) -> str:
    """Return a setting of the program that vLLM does not run in an engine that speculates, "" for none."""
    for path, values in _BESIDE.items():
        value = config
        for name in path.split("."):
            value = getattr(value, name, None)
        if value in values:
            return f"{path}={value!r}"
    if config.use_v2_model_runner:
        return ""
    # There vLLM silently omits processors of installed packages.
    found = [*(config.model_config.logits_processors or ()), *entry_points(group="vllm.logits_processors")]
    if found:
        return f"custom logits processors ({getattr(found[0], 'value', found[0])})"
    graphs, tokens = config.compilation_config, 1 + config.num_speculative_tokens
    if graphs.cudagraph_mode.decode_mode().name == "FULL" and 0 < (graphs.max_cudagraph_capture_size or 0) < tokens:
        return f"CUDA graphs of {graphs.max_cudagraph_capture_size} tokens at most, where a draft verifies {tokens}"
    return ""


def drafts_nothing(speculative) -> bool:
    """Return True if an engine of this SpeculativeConfig, or None, gets all drafts from beside its scheduler."""
    return speculative is not None and str(speculative.model).endswith("NoProposer")
