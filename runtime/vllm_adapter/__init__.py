"""The one place that knows vLLM: its scheduler is hooked here, drafting timed, the CPU build mended, weights taken.

Everything else in tltlab calls `llm`'s functions here. Where vLLM offers something itself, this builds on it:
the depth of the next draft travels in its `SchedulerOutput`, requests carry their names in `SamplingParams.extra_args`,
the policy in `additional_config`, new weights through its weight-transfer sessions, and calls to an engine core in
another process through its utility messages. No vLLM source is copied or replaced.
"""

TESTED_VLLM = "0.32"


def on_cpu() -> bool:
    """Whether vLLM runs on the CPU here."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def installed_vllm() -> str:
    """The version of vLLM here. Its distribution has another name in the CPU build, so metadata does not tell."""
    import vllm

    return str(vllm.__version__)
