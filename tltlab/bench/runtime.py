"""The result of `tltlab bench runtime` for people; what it measures is the experiment baseline's."""

from __future__ import annotations

from typing import Any

from tltlab.console import table

_HEADER = (
    "mode", "seconds", "tail", "plain", "tokens/s", "accept", "record", "policy", "drafting", "speed-up", "in the tail",
)  # fmt: skip


def text(found: dict[str, Any]) -> str:
    """A row per epoch and mode, then the goals."""
    ratios = {(s["mode"], s["epoch"], s["part"]): s for s in found["speedups"] if s["measure"] == found["judged_by"]}
    lines = []
    for epoch in sorted({row["epoch"] for row in found["modes"]}):
        rows = [
            (
                row["mode"], f"{row['seconds']:.2f}", f"{row['tail_seconds']:.2f}", f"{row['plain_s']:.2f}",
                f"{row['tokens_per_s']:.0f}",
                "-" if row["mean_accept_length"] is None else f"{row['mean_accept_length']:.2f}",
                *(f"{row[f'{part}_share']:.1%}" for part in ("recorder", "policy", "drafting")),
                *(_interval(ratios.get((row["mode"], epoch, part))) for part in ("rollout", "tail")),
            )
            for row in found["modes"] if row["epoch"] == epoch
        ]  # fmt: skip
        known = "drafters know earlier responses" if epoch > 1 else "drafters know nothing at first"
        lines += [f"epoch {epoch}, {known}", table(_HEADER, rows, indent=2)]
    if found["modes"]:
        rounds = found["modes"][0]["rollouts"]
        lines += [
            "",
            "record, policy, drafting: what of the seconds went into our book, our choices, drafters beside the "
            "scheduler",
            "plain: what plain decoding of the same responses would take, from the step times of stock vLLM's",
            f"rollouts; a speed-up is its ratio to the seconds, over that of stock vLLM, with 95 % intervals over "
            f"{rounds} rounds" + (", too narrow below ten" if rounds < 10 else ""),
        ]
    if found.get("off"):
        lines += ["", "engines built for drafts that draft nothing, against stock vLLM"]
        rows = [
            (
                f"{row['batch']}", row["drafters"], f"{row['stock_s']:.3f}", f"{row['off_s']:.3f}", _interval(row),
                f"{1e3 * row['stock_step_s']:.2f}", f"{1e3 * row['off_step_s']:.2f}",
            )
            for row in found["off"]
        ]  # fmt: skip
        header = ("batch", "drafters", "stock", "off", "speed", "ms an iteration", "off")
        lines.append(table(header, rows, indent=2))
    if found.get("record_only"):
        lines += ["", "stock vLLM that is only recorded, against the same engine unrecorded, tokens per second"]
        rows = [
            (f"{row['batch']}", f"{row['stock_tokens_per_s']:.0f}", f"{row['recorded_tokens_per_s']:.0f}",
             _interval(row, digits=3))
            for row in found["record_only"]
        ]  # fmt: skip
        lines.append(table(("batch", "stock", "recorded", "speed"), rows, indent=2))
    lines.append("")
    for goal in found["goals"]:
        lines.append(
            f"  {'met   ' if goal['met'] else 'MISSED'} {goal['mode']}, epoch {goal['epoch']}: {_interval(goal)} "
            f"{goal['goal']}, goal {goal['wanted']:g}"
        )
    return "\n".join(lines)


def _interval(found: dict[str, Any] | None, *, digits: int = 2) -> str:
    if found is None:
        return ""
    if found["ratio"] is None:
        return "unknown"
    low_high = "" if found["low"] is None else f" [{found['low']:.{digits}f}, {found['high']:.{digits}f}]"
    return f"{found['ratio']:.{digits}f}x{low_high}"
