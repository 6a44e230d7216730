"""`tltlab audit`: tests an engine's speculative decoding for losslessness."""

import typer

from tltlab.console import emit, progress
from tltlab.errors import ConfigError
from tltlab.options import command, option
from tltlab.records import Json

from .profile import vllm_setting


@command
def audit(
    fast: bool = option("Every value of every factor once, not every pair.", False),
    drafter: list[str] | None = option("Audit this drafter only: ngram, suffix, eagle, ... Repeatable."),
    policy: str | None = option("Audit the engine under this policy: a file or a name."),
    vllm: list[str] | None = option(
        "Engine setting under vLLM's own name, the value as JSON where it is JSON. Repeatable.", metavar="KEY=VALUE"
    ),
    samples: int = option("Responses per case; more find smaller faults.", 4096, min=512),
    false_alarm_rate: float = option(
        "Probability that a correct engine fails the whole audit.", 1e-3, min=1e-9, max=0.5
    ),
    seed: int = option("Seed of the engine's and the policy's random numbers.", 0, min=0),
) -> None:
    """Sample a real engine and compare the samples with the exact distribution of its model, case by case.

    The model is a random one of five tokens, made on the fly: only then can every outcome's probability be computed. A
    case is a drafter, a depth, a temperature, top-p and top-k, and a composition of the batch. Exit code 1 where a case
    fails, or drafts too little to be tested.

    Example: tltlab audit --fast --vllm max_num_seqs=64
    """
    # vLLM takes seconds to import: --help must not wait for it.
    from tltlab.runtime.audit.run import audit_text, run_audit

    report = run_audit(
        fast=fast,
        drafters=drafter or [],
        policy=policy,
        vllm_args=vllm_settings(vllm or []),
        num_samples=min(samples, 2048) if fast else samples,
        false_alarm_rate=false_alarm_rate,
        seed=seed,
        progress=progress,
    )
    emit(report, audit_text(report))
    if not report["passed"]:
        raise typer.Exit(1)


def vllm_settings(texts: list[str]) -> Json:
    """Parse settings given as KEY=VALUE; what is drafted is the audit's own."""
    settings = dict(map(vllm_setting, texts))
    if "speculative_config" in settings:
        raise ConfigError("--vllm speculative_config: the audit brings its drafters, of which --drafter picks some")
    return settings
