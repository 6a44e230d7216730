"""`tltlab make-model`."""

from pathlib import Path

from tltlab.console import emit, progress, table
from tltlab.options import command, option
from tltlab.records import Json


@command
def make_model(
    size: str = option(
        "tiny (half a minute on one core), small (two minutes), deep (five minutes: a target that is slow for "
        "its size) or draft (half a minute: a draft model for deep).",
        "small",
    ),
    task: str = option(
        "subset-sum (length is mostly random within a prompt's group), gcd (the prompt decides most of it), "
        "or calculator (sums, with a tool that the model calls).",
        "subset-sum",
    ),
    out: Path | None = option("Folder to write; default models/TASK-SIZE."),
    seed: int = option("The same seed gives the same weights on the same machine.", 0, min=0),
) -> None:
    """Train a small reasoning model from scratch, with prompts, a checkable answer and a long tail.

    The folder is a Hugging Face model that vLLM loads, with train.jsonl, heldout.jsonl and report.json next to it.

    Example: tltlab make-model --size tiny --task gcd --out models/gcd
    """
    # torch and transformers take seconds to import: --help must not wait for them.
    from tltlab.runtime.models.make import make_model as make

    out = out or Path("models") / f"{task}-{size}"
    report = make(out, size=size, task=task, seed=seed, progress=progress)
    emit({"out": str(out), **report}, _text(out, report))


def _text(out: Path, report: Json) -> str:
    s = report["sampled"]
    lengths = ", ".join(f"{name} {s[f'length_{name}']:.0f}" for name in ("p50", "p90", "p95", "p99", "max"))
    figures = [
        ("reward", f"{s['reward_mean']:.2f}"),
        ("length, tokens", f"{lengths} of {report['max_response_tokens']}; p95 / p50 = {s['length_p95_over_p50']:.1f}"),
        ("clipped", f"{s['clipped_share']:.1%} of responses"),
    ]  # fmt: skip
    return "\n".join(
        [
            f"{out}: {report['parameters']:,} parameters, {report['task']}, trained in {report['train_s']:.0f} s, "
            f"loss {report['final_loss']:.3f}",
            f"sampled {s['num_prompts']} held-out prompts x {s['samples_per_prompt']} in {s['seconds']:.0f} s:",
            table((), figures, left=2, indent=2),
            f"reward function: {report['reward']}",
        ]
    )
