"""Adaptive rollouts and GRPO training on Ray and vLLM. Import it as `tltlab.runtime`."""

if __name__ == "runtime":
    raise ImportError("import this package as tltlab.runtime")

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine.vllm.options import vllm_options

__all__ = ["vllm_options"]


def __getattr__(name: str) -> Any:
    # vLLM's processes import this package for its plugin: policies are imported only where one is active.
    if name in __all__:
        from .engine.vllm import options

        return getattr(options, name)
    raise AttributeError(f"module 'tltlab.runtime' has no attribute {name!r}")
