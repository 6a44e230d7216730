"""Adaptive rollouts and GRPO training on Ray and vLLM. Import it as `tltlab.runtime`."""

if __name__ == "runtime":
    raise ImportError("import this package as tltlab.runtime")

from .engine.vllm.options import serve_arguments, vllm_options

__all__ = ["serve_arguments", "vllm_options"]
