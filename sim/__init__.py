"""Discrete-event simulation of rollouts. Import it as `tltlab.sim`."""

if __name__ == "sim":
    raise ImportError("import this package as tltlab.sim")

from .replay import SimResult, simulate

__all__ = ["SimResult", "simulate"]
