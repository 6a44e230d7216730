"""What a checkpoint of another way to roll out holds that this one cannot go on with: said, as it is lost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def left_behind(state: Mapping[str, Any], *, own: str = "") -> list[str]:
    """A sentence for each kind of responses in `Rollouts.state_dict`'s `state`, but for those under the key `own`.

    >>> left_behind({"earlier": [["p0", 0, False], ["p0", 1, True]]})
    ['2 responses of the checkpoint are not used again: the run goes on without rollout.reuse']
    """
    said = []
    if own != "pending" and state.get("pending"):
        groups = state["pending"]
        whole = sum(sample["finish_reason"] is not None for group in groups for sample in group["samples"])
        said.append(
            f"{len(groups)} groups that were under way in the checkpoint are dropped, {whole} whole responses with "
            "them: the run goes on without rollout.partial"
        )
    if own != "earlier" and state.get("earlier"):
        said.append(
            f"{len(state['earlier'])} responses of the checkpoint are not used again: the run goes on without "
            "rollout.reuse"
        )
    return said
