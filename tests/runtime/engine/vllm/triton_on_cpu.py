"""Triton's interpreter in place of a GPU, so that vLLM's V2 runner starts on a CPU. Very slow; import it first."""

import os

os.environ["TRITON_INTERPRET"] = "1"
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"

import numpy as np
import triton.backends
from triton.runtime.interpreter import InterpreterBuilder


class _NoDriver:
    """vLLM asks for a CPU backend of Triton, whose driver is never active."""

    @staticmethod
    def is_active():
        return False


def _with_boolean_masks(name, index):
    """NumPy refuses the integer masks that the interpreter hands to its masked loads and stores."""
    stock = getattr(InterpreterBuilder, name)

    def call(self, *args, **kwargs):
        mask = kwargs.get("mask", args[index] if len(args) > index else None)
        if mask is not None and mask.data.dtype != np.bool_:
            mask.data = mask.data.astype(np.bool_)
        return stock(self, *args, **kwargs)

    setattr(InterpreterBuilder, name, call)


triton.backends.backends.setdefault("cpu", type("CpuBackend", (), {"driver": _NoDriver, "compiler": None})())
_with_boolean_masks("create_masked_load", 1)
_with_boolean_masks("create_masked_store", 2)
