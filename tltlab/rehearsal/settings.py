"""Settings of a rehearsal; the module is apart so that `--help` does not wait for torch."""

from collections.abc import Sequence

from tltlab.options import check, option
from tltlab.records import frozen


@frozen
class RehearsalConfig:
    """Settings of a rehearsal, the options of `tltlab rehearse`."""

    policies: str = option(
        "What to play: stock (vLLM alone), shipped names, files, module:Class, ngram:4.",
        "stock,none,table,beg-mab,adaptive",
    )
    acceptance: str = option(
        "How drafts are kept: learned=0.8/0.6/0.5 by token, others by default; or all=0.7.", "all=geometric:0.7"
    )
    responses: int | None = option("Responses of each worker. [default: as in the trace]", min=1)
    cap: int | None = option("Tokens of the longest. [default: as in the trace]", min=1)
    rl_step: int | None = option("Whose lengths. [default: the first]")
    workers: int = option("Engines, on a GPU each or one after another.", 1, min=1)
    rounds: int = option("Rollouts of each policy.", 3, min=1)
    gpus: int | None = option("GPUs to use. [default: all that there are]", min=0)
    seed: int = option("Seed of prompts, orders and policies.", 0, min=0)
    plain_batches: Sequence[int] = ()

    def __post_init__(self) -> None:
        check(self)
