"""Settings of a rehearsal; the module is apart so that `--help` does not wait for torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from tltlab.options import Option, check
from tltlab.records import frozen


@frozen
class RehearsalConfig:
    """Settings of a rehearsal, the options of `tltlab rehearse`."""

    policies: Annotated[
        str, Option("What to play: stock (vLLM alone), shipped names, files, module:Class, ngram:4.")
    ] = "stock,none,table,beg-mab,adaptive"
    acceptance: Annotated[
        str, Option("How drafts are kept: learned=0.8/0.6/0.5 by token, others by default; or all=0.7.")
    ] = "all=geometric:0.7"
    responses: Annotated[int | None, Option("Responses of each worker. [default: as in the trace]", min=1)] = None
    cap: Annotated[int | None, Option("Tokens of the longest. [default: as in the trace]", min=1)] = None
    rl_step: Annotated[int | None, Option("Whose lengths. [default: the first]")] = None
    workers: Annotated[int, Option("Engines, on a GPU each or one after another.", min=1)] = 1
    rounds: Annotated[int, Option("Rollouts of each policy.", min=1)] = 3
    gpus: Annotated[int | None, Option("GPUs to use. [default: all that there are]", min=0)] = None
    seed: Annotated[int, Option("Seed of prompts, orders and policies.", min=0)] = 0
    plain_batches: Sequence[int] = ()

    def __post_init__(self) -> None:
        check(self)
