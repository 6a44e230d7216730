"""The one place that knows vLLM: its scheduler is hooked here, drafting timed, the CPU build mended, weights taken.

Everything else in tltlab calls `llm`'s functions here. Where vLLM offers something itself, this builds on it:
the depth of the next draft travels in its `SchedulerOutput`, requests carry their names in `SamplingParams.extra_args`,
the policy in `additional_config`, new weights through its weight-transfer sessions, and calls to an engine core in
another process through its utility messages. No vLLM source is copied or replaced.
"""

import os

TESTED_VLLM = "0.32"


def keep_quiet() -> None:
    """Have vLLM, before it is imported, log errors only, and to standard error: standard output is for results."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("TQDM_DISABLE", "1")


def on_cpu() -> bool:
    """Whether vLLM runs on the CPU here."""
    keep_quiet()
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def keep_linear_weights() -> None:
    """Let vLLM multiply by torch's linear, its own fallback where the build has no oneDNN.

    On CPU it otherwise packs weights away after loading, and who writes new ones through `load_weights`, as TRL does,
    finds nothing to write to.
    """
    from vllm import _custom_ops

    _custom_ops._supports_onednn = False


def installed_vllm() -> str:
    """The version of vLLM here. Its distribution has another name in the CPU build, so metadata does not tell."""
    keep_quiet()
    import vllm

    return str(vllm.__version__)
