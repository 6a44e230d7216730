"""The table of systems from the literature, one row each: compositions of the core's parts.

What a row leaves out is plain: nothing. What a paper does not say is in `assumptions`.
"""

from __future__ import annotations

from collections.abc import Sequence

from tltlab.coordination.progress import SpotTraining
from tltlab.drafters.specs import SYSTEM_DRAFTERS
from tltlab.errors import ConfigError, did_you_mean
from tltlab.policies.policy import Activation

from .composition import Rung, System, batch_size_table, beg_mab, length_aware, one_strategy

_TLT_LADDER = (
    Rung(min_batch=1, trees=((8, 4, 48), (4, 4, 48)), chains=(8, 4)),
    Rung(min_batch=2, trees=((8, 4, 32), (4, 4, 32)), chains=(6, 3)),
    Rung(min_batch=5, trees=((8, 4, 16), (4, 4, 16)), chains=(4, 2)),
    Rung(min_batch=21, trees=((8, 4, 8), (4, 4, 8)), chains=(2, 1)),
)
_TLT_ACTIVATION = Activation(max_requests=32, count="running", hold_iterations=10)
_TLT_ARMS = (
    "two strategies a bucket: the released configuration has one, depth 8 and top-k 4, with which its bandit has "
    "nothing to choose; half that depth is added",
    "chains for a drafter without trees: depths 8, 6, 4, 2 and half of them from 1, 2, 5 and 21 requests on",
)

SYSTEMS: dict[str, System] = {
    system.name: system
    for system in (
        System(
            name="verl",
            title="VeRL",
            source="HybridFlow (arXiv 2409.19256), the baseline of arXiv 2511.16665",
            assumptions=("a static split: request i of N runs on worker i * W // N until it is done",),
        ),
        System(
            name="open-r1",
            title="Open-R1",
            source="TRL with vLLM on GPUs of its own, a baseline of arXiv 2511.16665",
            topology="separate",
            generating_share=0.5,
            assumptions=(
                "half of the GPUs generate and half train, as many in all as the other systems have: the paper does "
                "not say how they were split",
                "synchronous: generation waits for the new weights",
                "log-probs and training take inversely as long on fewer GPUs, where the stage costs count GPUs at all",
            ),
        ),
        System(
            name="tlt",
            title="TLT",
            source="arXiv 2511.16665, section 3; settings of its released code (mit-han-lab/fastrl)",
            drafters=("learned", "ngram"),
            ladder=_TLT_LADDER,
            selector=beg_mab,
            activation=_TLT_ACTIVATION,
            specs=(("ngram", SYSTEM_DRAFTERS["tlt-base"]),),
            idle_use=SpotTraining(),
            assumptions=(
                *_TLT_ARMS,
                "buckets from 1, 2, 5 and 21 requests, epsilon 0.1, window 300 and 10 iterations below the threshold "
                "of 32 before speculation begins: the released code's, the paper gives no values",
            ),
        ),
        System(
            name="tlt-base",
            title="TLT-Base",
            source="arXiv 2511.16665, section 5: the model-free drafter alone",
            drafters=("ngram",),
            ladder=_TLT_LADDER,
            selector=beg_mab,
            activation=_TLT_ACTIVATION,
            specs=(("ngram", SYSTEM_DRAFTERS["tlt-base"]),),
            assumptions=(
                "activation, buckets and bandit as in TLT",
                *_TLT_ARMS[1:],
                "linear drafts, matches of 2 to 5 tokens in the group: not published",
            ),
        ),
        System(
            name="das",
            title="DAS",
            source="arXiv 2511.13841",
            drafters=("suffix",),
            ladder=(Rung(min_batch=1, chains=(8,)),),
            selector=one_strategy,
            budget=length_aware,
            specs=(("suffix", SYSTEM_DRAFTERS["das"]),),
            assumptions=(
                "length classes are terciles and budgets the corrected optimum of its equations 7 to 9: neither class "
                "borders nor the budgets of the classes are published",
                "at most 8 tokens a draft, a window of 16 responses per problem",
                "c_base and c_tok fitted to the cost model",
            ),
        ),
        System(
            name="vllm-dynamic",
            title="vLLM dynamic SD",
            source="vLLM's num_speculative_tokens_per_batch_size",
            drafters=("learned",),
            ladder=(
                Rung(min_batch=1, chains=(8,)),
                Rung(min_batch=5, chains=(4,)),
                Rung(min_batch=17, chains=(2,)),
                Rung(min_batch=33),
            ),
            selector=batch_size_table,
            assumptions=(
                "the table is the user's to write: 8 tokens up to 4 requests, 4 up to 16, 2 up to 32, then none",
                "a static drafter: nobody trains it during the run",
            ),
        ),
    )
}
"""The rows, by name."""


def find_systems(names: str | Sequence[str | System] = "all") -> tuple[System, ...]:
    """The systems of "all", of names with commas between, or of a sequence; ConfigError for an unknown or double name.

    >>> [system.title for system in find_systems("verl,tlt")]
    ['VeRL', 'TLT']
    """
    if isinstance(names, str):
        names = list(SYSTEMS) if names.strip() == "all" else [name.strip() for name in names.split(",") if name.strip()]
    systems = tuple(name if isinstance(name, System) else _row(name) for name in names)
    given = [system.name for system in systems]
    if not given:
        raise ConfigError(f"no system given; there are {', '.join(SYSTEMS)}, or all")
    if len(set(given)) < len(given):
        raise ConfigError(f"a system is given twice: {', '.join(given)}")
    return systems


def _row(name: str) -> System:
    if name not in SYSTEMS:
        raise ConfigError(
            f"no system named {name!r}{did_you_mean(name, SYSTEMS)}; there are {', '.join(SYSTEMS)}, or all"
        )
    return SYSTEMS[name]
