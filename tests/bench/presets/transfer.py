"""Carries a roofline's constants over to a GPU that was not measured end to end, by kernels measured on both."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.presets.kernels import Kernels
from tltlab.costs.base import CalibratedRange
from tltlab.costs.evidence import Evidence
from tltlab.costs.roofline import Constants, Ideal, RooflineCosts
from tltlab.hardware import gpu, kv_capacity_tokens, model

SHAPES = (("Qwen2.5-7B", 1), ("Qwen2.5-32B", 4), ("Llama-3.3-70B", 4))
"""Models, and the number of GPUs each runs on, that presets are made for."""
MOST_EFFICIENT = 0.95
MEMORY_FRACTION = 0.9
SWITCH_S = 1.4
SWITCH_NOTE = "switch_s lies between 0.95 and 1.8 s, measured apart"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Shares of the data sheet's rates that measured kernels reach, the median over `SHAPES`; one all-reduce in s."""

    memory: float
    compute: float
    kv: float
    link: float
    allreduce_s: float


def shares(data: Path, gpu_name: str) -> Shares:
    """What the kernels of one GPU reach: 16 tokens for weights, 1,024 to 4,096 for FLOPs, 4 Ki to 16 Ki of context."""
    kernels, device = Kernels.read(data, gpu_name), gpu(gpu_name)
    ratios = []
    for name, tp in SHAPES:
        shape = model(name)
        ideal = Ideal.of(device, shape, tp)
        reduces = [2 * shape.layers * float(kernels.all_reduce_s(tp, m * shape.hidden)) for m in (16, 1024, 4096)]
        few, many, more = kernels.forward_s(shape, tp, [16, 1024, 4096]) - reduces
        short, long = (kernels.attention_s(shape, tp, 32, past) for past in (4096, 16384))
        ratios.append(
            (
                float(ideal.weights_s) / few,
                float(ideal.token_s) * 3072 / (more - many),
                float(ideal.context_s) * 32 * 12288 / (long - short),
                float(ideal.link_token_s) * 3072 / (reduces[2] - reduces[1]) if tp > 1 else np.nan,
            )
        )
    memory, compute, kv, link = np.nanmedian(ratios, axis=0).tolist()
    smallest = float(kernels.all_reduce_s(4, 4096))
    return Shares(memory=memory, compute=compute, kv=kv, link=link, allreduce_s=smallest)


def transfer(constants: Constants, measured_on: Shares, to: Shares) -> Constants:
    """Constants fitted on one GPU for another: each efficiency in proportion to what kernels reach, at most 95 %.

    Times of the engine's own, of launches and of drafting overhead stay in seconds: the host is taken to be as fast.
    """
    return constants.model_copy(
        update={
            "memory_efficiency": min(constants.memory_efficiency * to.memory / measured_on.memory, MOST_EFFICIENT),
            "compute_efficiency": min(constants.compute_efficiency * to.compute / measured_on.compute, MOST_EFFICIENT),
            "kv_efficiency": min(constants.kv_efficiency * to.kv / measured_on.kv, MOST_EFFICIENT),
            "link_efficiency": min(constants.link_efficiency * to.link / measured_on.link, 1.0),
            "allreduce_s": constants.allreduce_s * to.allreduce_s / measured_on.allreduce_s,
        }
    )


def preset(
    constants: Constants,
    gpu_name: str,
    model_name: str,
    tp: int,
    calibrated: CalibratedRange | None,
    notes: tuple[str, ...],
    evidence: Evidence,
) -> RooflineCosts:
    """A cost model for one GPU, model and tp, its numbers rounded to three digits; speculation off costs nothing."""
    rounded = {name: None if value is None else float(f"{value:.3g}") for name, value in constants.model_dump().items()}
    return RooflineCosts(
        gpu=gpu_name,
        model=model_name,
        tp=tp,
        constants=Constants.model_validate(rounded | {"sd_idle_s": 0.0}),
        switch_s=SWITCH_S,
        kv_capacity_tokens=kv_capacity_tokens(gpu(gpu_name), model(model_name), tp, MEMORY_FRACTION),
        calibrated=calibrated,
        notes=notes,
        evidence=evidence,
    )
