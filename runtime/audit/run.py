"""An audit from start to end: models are made, engines started one by one, every case judged, a report written."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from tltlab.console import table
from tltlab.drafters.specs import DrafterSpec
from tltlab.errors import ConfigError, RunError
from tltlab.policies.policy import Policy, load_policy
from tltlab.runtime.engine.engine import Engine
from tltlab.runtime.engine.vllm import on_cpu
from tltlab.runtime.engine.vllm.sampling import unfixed_sampling

from .cases import DRAFTERS, AuditCase, AuditedDrafter, cases, given_cases, policy_of, tiny_drafters
from .engine import AuditedEngine, settings
from .models import TinyModels, make_tiny_models
from .samples import Auditor, unsampled_row

MAX_DEPTH = 8
"""The deepest draft of the default cases, for which their engines are built."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """One engine to start and the cases to run on it."""

    cases: list[tuple[AuditCase, Policy]]
    drafters: Mapping[str, DrafterSpec]
    max_depth: int = MAX_DEPTH
    vllm_args: Mapping[str, Any] = field(default_factory=dict)


def run_audit(
    *,
    fast: bool,
    drafters: Sequence[str],
    policy: str | None,
    vllm_args: Mapping[str, Any],
    num_samples: int,
    false_alarm_rate: float,
    without_fix: bool,
    seed: int,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Run the audit and return the report; ConfigError for engines that cannot be audited.

    `drafters` restricts the default cases to some of them; a `policy`, or a speculative_config among `vllm_args`,
    replaces them.
    """
    started = time.perf_counter()
    if without_fix and not on_cpu():
        raise ConfigError("--without-fix: on CUDA tltlab repairs nothing in vLLM's sampler to undo")
    # Policies speculate on small batches; the shipped ones begin at 32.
    args = settings(vllm_args if policy is None else {"max_num_seqs": 32, **vllm_args})
    with tempfile.TemporaryDirectory() as folder:
        models = make_tiny_models(Path(folder))
        if drafters and (policy is not None or "speculative_config" in args):
            raise ConfigError("--drafter picks from the default cases, which --policy and speculative_config replace")
        if "speculative_config" in args:
            args["speculative_config"] = with_model(args["speculative_config"], models)
        if policy is not None:
            plans = [policy_plan(policy, models, args)]
        elif "speculative_config" in args:
            plans = [vllm_plan(args, models)]
        else:
            plans = default_plans(drafters, models, args, fast=fast)
        num_cases = sum(len(plan.cases) for plan in plans)
        auditor = Auditor(
            models,
            num_samples=num_samples,
            num_checks=2 * sum(case.composition != "greedy" for plan in plans for case, _ in plan.cases),
            false_alarm_rate=false_alarm_rate,
            seed=seed,
        )
        rows: list[dict[str, Any]] = []
        for plan in plans:
            engine = Engine(
                str(models.target),
                drafters=plan.drafters,
                max_draft_depth=plan.max_depth,
                seed=seed,
                vllm_args=plan.vllm_args,
            )
            with closing(engine), unfixed_sampling() if without_fix else nullcontext():
                audited = AuditedEngine(engine, plan.vllm_args["max_num_seqs"])
                for row in run_plan(plan, auditor, audited):
                    rows.append(row)
                    progress(f"{len(rows)}/{num_cases} {row['case']}: {row['verdict']}")
    return {
        "passed": all(row["passed"] for row in rows),
        "false_alarm_rate": false_alarm_rate,
        "seconds": time.perf_counter() - started,
        "cases": rows,
    }


def run_plan(plan: EnginePlan, auditor: Auditor, engine: AuditedEngine) -> Iterator[dict[str, Any]]:
    """Yield rows of the plan's cases. A case in which the engine fails has failed; later ones are not tested."""
    died = None
    for case, policy in plan.cases:
        try:
            yield auditor.run(case, engine, policy) if died is None else unsampled_row(case, "not tested", died)
        except RunError as error:
            died = f"the engine failed in {case}"
            yield unsampled_row(case, "failed", f"the engine failed: {error}")


def default_plans(
    drafters: Sequence[str], models: TinyModels, args: Mapping[str, Any], *, fast: bool
) -> list[EnginePlan]:
    """Return a plan for each engine that the default cases need."""
    unknown = [name for name in drafters if name not in DRAFTERS]
    if unknown:
        raise ConfigError(f"no drafter named {unknown[0]!r} to audit; there are: {', '.join(DRAFTERS)}")
    chosen = cases(list(drafters) or list(DRAFTERS), fast=fast)
    sampled_drafts = {
        "method": "draft_model",
        "model": str(models.draft_model),
        "num_speculative_tokens": MAX_DEPTH,
        "draft_sample_method": "probabilistic",
    }
    plans = []
    for _, same_engine in groupby(chosen, key=lambda case: replace(DRAFTERS[case.drafter], name="")):
        group = [(case, policy_of(case, DRAFTERS[case.drafter], args["max_num_seqs"])) for case in same_engine]
        drafting = DRAFTERS[group[0][0].drafter]
        more = {"speculative_config": sampled_drafts} if drafting.probabilistic else {}
        plans.append(EnginePlan(cases=group, drafters=drafting.specs(models), vllm_args={**args, **more}))
    return plans


def policy_plan(source: str, models: TinyModels, args: Mapping[str, Any]) -> EnginePlan:
    """Return the plan of an engine under a policy, which chooses drafter and depth itself."""
    policy = load_policy(source)
    depth = max((strategy.draft_depth for strategy in policy.strategies), default=0) or MAX_DEPTH
    pairs = [(case, policy) for case in given_cases(Path(source).stem, None)]
    return EnginePlan(cases=pairs, drafters=tiny_drafters(policy, models), max_depth=depth, vllm_args=args)


def vllm_plan(args: Mapping[str, Any], models: TinyModels) -> EnginePlan:
    """Return the plan of an engine with a speculative_config of the user's own, whose method drafts in each case."""
    method, depth = (args["speculative_config"][name] for name in ("method", "num_speculative_tokens"))
    drafting = AuditedDrafter(name="learned", method="draft_model")
    pairs = [(case, policy_of(case, drafting, args["max_num_seqs"])) for case in given_cases(f"vllm {method}", depth)]
    return EnginePlan(cases=pairs, drafters=drafting.specs(models), max_depth=depth, vllm_args=args)


def with_model(config: Mapping[str, Any], models: TinyModels) -> dict[str, Any]:
    """Return a speculative_config with a model that drafts for the audit's target, where its method needs one."""
    method, depth = config.get("method"), config.get("num_speculative_tokens")
    if not isinstance(method, str) or type(depth) is not int or depth < 1:
        raise ConfigError(f"--vllm speculative_config needs method and num_speculative_tokens, got {dict(config)}")
    if "model" in config:
        raise ConfigError(
            f"--vllm speculative_config names the model {config['model']!r}, but the audit's target has five tokens "
            "and no other model drafts for it: leave model out, and eagle, eagle3 and draft_model get the audit's own"
        )
    if method not in ("eagle", "eagle3", "draft_model"):
        return dict(config)
    return {**config, "model": str(getattr(models, method))}


def text(report: Mapping[str, Any]) -> str:
    """Return the report as a table."""
    rows = report["cases"]
    lines = [
        table(
            ("case", "samples", "drafted", "kept", "p joint", "p ranks", "finds TV"),
            (
                (
                    row["case"],
                    f"{row['sample_size']:,d}",
                    f"{row['num_drafted']:,d}",
                    f"{row['num_accepted'] / max(row['num_drafted'], 1):.0%}",
                    *(
                        "" if value is None else f"{value:.2g}"
                        for value in (row["p_value"], (row["ranks"] or {}).get("p_value"), row["detectable_tv"])
                    ),
                )
                for row in rows
            ),
        )
    ]
    bad = [row for row in rows if not row["passed"]]
    lines += [f"{row['verdict'].upper()}: {row['case']}: {row['reason']}" for row in bad]
    verdict = "no loss detected" if report["passed"] else f"{len(bad)} of {len(rows)} cases did not pass"
    lines.append(
        f"{verdict}; a sound engine fails at a rate of {report['false_alarm_rate']:g}; {report['seconds']:.0f} s"
    )
    return "\n".join(lines)
