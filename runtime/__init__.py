"""GRPO training on Ray and vLLM. Import it as `tltlab.runtime`."""

if __name__ == "runtime":
    raise ImportError("import this package as tltlab.runtime")
