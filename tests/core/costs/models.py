"""One cost model of each kind, which tests of costs and of calibration share."""

from tltlab.costs.linear import LinearCosts
from tltlab.costs.roofline import Constants, RooflineCosts
from tltlab.costs.table import TableCosts
from tltlab.strategy import Strategy

CHAIN = Strategy.chain("learned", 4)
LINEAR = LinearCosts(
    base_s=4e-3, per_request_s=1e-4, per_token_s=2e-5, per_context_s=1e-8, sd_base_s=1e-3, sd_idle_s=5e-4,
    draft_level_s=3e-4, draft_level_per_request_s=1e-5, prefill_per_token_s=1e-5,
)  # fmt: skip
TABLE = {
    "kind": "table",
    "forward": [{"tokens": m, "seconds": s} for m, s in ((2, 4e-3), (8, 5e-3), (32, 6e-3), (64, 9e-3))],
    "attention": [
        {"batch": 2, "fixed_s": 1e-3, "per_context_s": 2e-8},
        {"batch": 8, "fixed_s": 2e-3, "per_context_s": 1e-8},
    ],
    "base_s": 1e-4, "per_request_s": 1e-5, "prefill_per_token_s": 1e-5, "sd_base_s": 1e-3, "sd_idle_s": 2e-4,
    "draft_level_s": 3e-4, "draft_level_per_request_s": 1e-6,
}  # fmt: skip
SHAPED = {**TABLE, "roofline": {"gpu": "H100", "model": "Qwen2.5-7B", "tp": 1}}
TABLED = TableCosts.model_validate(TABLE)
CONSTANTS = Constants(
    memory_efficiency=0.8, compute_efficiency=0.7, kv_efficiency=0.75, link_efficiency=0.6, knee=2.5, step_s=1.5e-3,
    layer_s=2e-5, allreduce_s=6e-6, per_request_s=4e-5, sd_base_s=3e-3, sd_idle_s=1e-4, draft_level_s=3e-4,
    draft_level_per_request_s=2e-5,
)  # fmt: skip
ROOFLINE = RooflineCosts(gpu="H100", model="Qwen2.5-32B", tp=4, constants=CONSTANTS)
