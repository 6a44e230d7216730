"""What papers claim of their systems, to be put beside what a comparison finds.

Baselines, models and workloads differ from paper to paper: a claim is set beside a figure of the same kind, not ranked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Of = Literal["RL step", "rollout", "tokens per second"]
"""Whose speed-up: the whole RL step's, the rollout's time, or the tokens that it generates per second."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """Times as fast, from `least` to `most` over a paper's settings, against `baseline`.

    `responses_per_worker` and `cap` (tokens) are those of its workload, None where the paper does not say.
    """

    system: str
    of: Of
    least: float
    most: float
    baseline: str
    setting: str
    source: str
    responses_per_worker: int | None = None
    cap: int | None = None

    def against(self, speed_up: float, low: float, high: float) -> str:
        """In a word where a speed-up with its interval lies: below, within or above the claim, or open.

        >>> CLAIMS["tlt"].against(1.2, 1.1, 1.3), CLAIMS["tlt"].against(1.6, 1.4, 1.8)
        ('below', 'open')
        """
        if self.least <= speed_up <= self.most:
            return "within"
        if low != low:
            return "below" if speed_up < self.least else "above"
        if high < self.least:
            return "below"
        return "above" if low > self.most else "open"


CLAIMS: dict[str, Claim] = {
    claim.system: claim
    for claim in (
        Claim(
            system="tlt", of="RL step", least=1.7, most=2.1, baseline="VeRL", responses_per_worker=256, cap=32_768,
            setting="Qwen2.5-7B and 32B, R1-Distill-7B, Llama-3.3-70B on up to 64 H100 or A100; its launch scripts "
            "have 512 responses for 2 workers (7B) and 2,048 for 8 (32B)",
            source="arXiv 2511.16665, abstract; mit-han-lab/fastrl",
        ),
        Claim(
            system="das", of="rollout", least=1.33, most=2.0, baseline="VeRL with vLLM, no speculation", cap=16_384,
            setting="R1-Distill-Qwen-7B on 8 H100 (-50 % of the time), Qwen3-8B on code (-25 %)",
            source="arXiv 2511.13841; its MLSys text says more than -30 %",
        ),
        Claim(
            system="seer", of="tokens per second", least=1.44, most=2.04, baseline="VeRL",
            setting="Moonlight on 32, Qwen2-VL-72B on 128, Kimi-K2 on 256 H800; caps of 40K to 98K",
            source="arXiv 2511.14617v3 (v1 said 1.74 to 1.97)",
        ),
        Claim(
            system="spec-rl", of="rollout", least=1.94, most=2.88, baseline="VeRL 0.5", cap=4096,
            setting="Qwen3-1.7B and 8B, Llama-3.2-1B; GRPO, PPO and DAPO on 8 H100, from the second epoch on",
            source="arXiv 2509.23232v3",
        ),
        Claim(
            system="spec-rl-exact", of="rollout", least=1.22, most=1.22, baseline="VeRL 0.5", cap=4096,
            setting="as SPEC-RL at l = 1", source="arXiv 2509.23232v3",
        ),
        Claim(
            system="rhymerl", of="RL step", least=1.9, most=2.61, baseline="VeRL 0.4.1",
            setting="mathematics with 32B on 128 GPUs; 1.9 at a cap of 8K, 2.3 at 16K",
            source="arXiv 2508.18588",
        ),
        Claim(
            system="histospec", of="rollout", least=1.8, most=2.1, baseline="VeRL", cap=8192,
            setting="Qwen3-14B-Base, DAPO on 32 H100 (2.1); 1.80 to 1.86 at large batches in the paper",
            source="arXiv 2508.18588; verl-recipe specRL",
        ),
        Claim(
            system="copris", of="RL step", least=1.58, most=1.94, baseline="synchronous VeRL", cap=15_360,
            setting="R1-Distill-Qwen-1.5B and 7B, Qwen3-8B on DeepScaleR", source="arXiv 2511.05589",
        ),
        Claim(
            system="streamrl", of="RL step", least=1.12, most=2.12, baseline="VeRL",
            setting="Qwen2.5-7B to 72B on 128 H800", source="arXiv 2504.15930",
        ),
        Claim(
            system="streamrl-async", of="RL step", least=1.30, most=2.66, baseline="VeRL",
            setting="Qwen2.5-7B to 72B on 128 H800", source="arXiv 2504.15930",
        ),
        Claim(
            system="rollpacker", of="RL step", least=2.03, most=2.56, baseline="VeRL",
            setting="Qwen2.5-7B, 14B and 32B at 8K, 16K and 32K on 128 H800; with streamed training",
            source="arXiv 2509.21009",
        ),
        Claim(
            system="april", of="tokens per second", least=1.225, most=1.495, baseline="slime",
            setting="several; the mean and the most", source="arXiv 2509.18521",
        ),
        Claim(
            system="areal", of="RL step", least=1.49, most=2.27, baseline="synchronous systems",
            setting="1.5B to 32B on up to 512 GPUs; most 2.77", source="arXiv 2505.24298",
        ),
        Claim(
            system="rlhfuse", of="RL step", least=1.0, most=3.7, baseline="RLHF systems",
            setting="RLHF with reward and critic models, both fusions: at most 3.7", source="arXiv 2409.13221",
        ),
        Claim(
            system="vllm-static", of="rollout", least=1.54, most=1.77, baseline="NeMo-RL without speculation",
            setting="EAGLE-3 at k = 3, Qwen3-8B on 32 GB200", source="NVIDIA 2604.26779",
        ),
        Claim(
            system="dvi", of="rollout", least=2.16, most=2.16, baseline="plain decoding at batch 1",
            setting="Spec-Bench, serving", source="arXiv 2510.05421", responses_per_worker=1,
        ),
        Claim(
            system="diffuspec", of="rollout", least=1.0, most=3.0, baseline="plain decoding at batch 1",
            setting="serving, at most 3", source="arXiv 2510.02358", responses_per_worker=1,
        ),
        Claim(
            system="brorl", of="tokens per second", least=2.0, most=2.0, baseline="ProRL's setting",
            setting="up to 512 samples of a prompt", source="arXiv 2510.01180",
        ),
    )
}  # fmt: skip
"""By the name of the row in `tltlab.planning.systems.SYSTEMS`; systems that claim no speed-up have none."""


def difference(
    claim: Claim, speed_up: float, low: float, high: float, *, responses_per_worker: float, cap: int, of_same: bool
) -> str:
    """In a sentence how what is found differs from a claim, and what of the workload differs.

    `of_same`: whether the same kind of figure was found; without stage costs there is no RL step.

    >>> difference(CLAIMS["tlt"], 1.2, 1.1, 1.3, responses_per_worker=64, cap=32768, of_same=True)
    'below the claim of 1.7 to 2.1 x VeRL (RL step); 64 responses to a worker here, 256 there'
    """
    relation = {"within": "within", "below": "below", "above": "above", "open": "not told apart from"}
    verdict = relation[claim.against(speed_up, low, high)]
    span = f"{claim.least:g}" if claim.least == claim.most else f"{claim.least:g} to {claim.most:g}"
    parts = [f"{verdict} the claim of {span} x {claim.baseline} ({claim.of})"]
    if not of_same:
        parts.append(f"here the rollout's, as stage costs were not given: no {claim.of} is known")
    if claim.responses_per_worker is not None and abs(responses_per_worker / claim.responses_per_worker - 1.0) > 0.1:
        parts.append(f"{responses_per_worker:.0f} responses to a worker here, {claim.responses_per_worker} there")
    if claim.cap is not None and claim.cap != cap:
        parts.append(f"a cap of {cap} tokens here, {claim.cap} there")
    return "; ".join(parts)
