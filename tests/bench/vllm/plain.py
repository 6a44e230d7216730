"""vLLM by itself, for benchmarks that compare with it."""


def keep_linear_weights() -> None:
    """Make vLLM multiply by torch's linear, its own fallback where the build has neither oneDNN nor AMX kernels.

    On CPU it otherwise packs weights after loading, and `load_weights`, by which TRL writes new ones, finds no
    parameter to write to.
    """
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils

    _custom_ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda *_: False
