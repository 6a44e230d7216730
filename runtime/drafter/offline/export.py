"""Export of a drafter's head as a checkpoint for stock vLLM, with a check of its acceptance there.

A head here shares the target's embedding and LM head. The exported checkpoint has its own: `embed_tokens.weight` and,
for an EAGLE-3 head, `lm_head.weight`. vLLM's EAGLE class has no LM head of its own and refuses a checkpoint with one,
so an EAGLE head uses the target's. vLLM compares both with the target's and shares equal ones. EAGLE-3 heads are
written in the format of speculators.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from tltlab.config import counted
from tltlab.console import marked_folder
from tltlab.errors import ConfigError, RunError
from tltlab.files import read_json, write_json
from tltlab.records import Json, frozen
from tltlab.runtime.drafter.heads.head import DrafterHead, Eagle3Head
from tltlab.runtime.drafter.heads.layouts import load_head, verifier_of
from tltlab.runtime.drafter.heads.target import WEIGHTS_FILE, FrozenTarget, local_folder, read_config
from tltlab.runtime.engine.vllm.stock import StockEngine, StockRun
from tltlab.runtime.recipe.drafter import ExportConfig, TextConfig

from .chains import chances, kept_along, walk
from .data import along, load_target, load_tokenizer, read_texts
from .warm_up import MARKER as TRAINED

MARKER = "export.json"
ROUNDING = 0.05
"""Tolerated relative loss of accept length from rounding; the comparison has no sampling error."""


@frozen
class ExportSource:
    """Source of an export: a head's folder, its target's, and prompts for the check, in a file's column or in a trace.

    With `chat` prompts go through the target's chat template.
    """

    head: Path
    target: Path
    prompts: Path
    prompt_column: str = "prompt"
    chat: bool = False


@frozen
class ExportCheck:
    """Stock vLLM's acceptance of a drafter beside the expected one of its head on the same responses.

    Accept lengths are response tokens per pass that verified a draft, the first token of each response left out.
    `positions[i]`: the acceptance rate of token i, given those before it. `first_kept`: the share of drafts with an
    accepted token. `commonest`: the share of the responses' commonest token, which a constant draft of it would have.
    """

    temperature: float
    expected_accept_length: float
    measured_accept_length: float
    expected_positions: list[float | None]
    measured_positions: list[float | None]
    passes: int
    first_kept: float
    commonest: float

    @property
    def fault(self) -> str:
        """Reason for not exporting the checkpoint, in a sentence; empty where there is none."""
        at = f"at temperature {self.temperature:g}"
        expected, measured = self.expected_accept_length, self.measured_accept_length
        if measured < (1 - ROUNDING) * expected:
            return f"stock vLLM accepts {measured:.2f} tokens per pass {at}, the head should have had {expected:.2f}"
        if self.first_kept < self.commonest:
            return (
                f"{at} {self.first_kept:.1%} of its drafts were kept, and always drafting the commonest token would "
                f"have had {self.commonest:.1%}: this drafter has learned nothing of these responses"
            )
        return ""

    def to_json(self) -> Json:
        return {
            "temperature": self.temperature,
            "accept_length": {"expected": self.expected_accept_length, "measured": self.measured_accept_length},
            "positions": {"expected": self.expected_positions, "measured": self.measured_positions},
            "passes": self.passes,
            "commonest_token": self.commonest,
        }


def export_drafter(
    source: ExportSource, out: str | Path, config: ExportConfig, progress: Callable[[str], None]
) -> Json:
    """Write a head with its embedding and LM head to `out`, atomically, once stock vLLM accepts its drafts.

    Return the contents of `export.json`. InputError for wrong input; RunError, and no folder left, where stock vLLM
    does not load the checkpoint or its acceptance falls short.
    """
    out = Path(out)
    began = time.perf_counter()
    with marked_folder(out, MARKER, SafetensorError) as folder:
        head = load_head(source.head, target=source.target)
        if head.method == "mtp":
            raise ConfigError(
                f"{source.head} is an MTP layer, which vLLM reads with its model: put the weights of its "
                "model.safetensors in place of those that the model's own files have by these names"
            )
        frozen = FrozenTarget.from_folder(source.target)
        write_checkpoint(head, frozen, source.target, folder, config.depth)
        prompts = _prompts(source, config)
        progress(f"written; starting stock vLLM on {source.target} to compare {counted(len(prompts), 'prompt')}")
        comparisons = compare(folder, head, source.target, prompts, config)
        for comparison in comparisons:
            progress(
                f"temperature {comparison.temperature:g}: {comparison.measured_accept_length:.3f} tokens per pass in "
                f"vLLM, {comparison.expected_accept_length:.3f} expected"
            )
        if fault := next((c.fault for c in comparisons if c.fault), ""):
            raise RunError(f"{source.head} is not exported: {fault}")
        trained = source.head / TRAINED
        report = {
            "head": str(source.head.resolve()),
            "model": str(source.target.resolve()),
            "method": head.method,
            "depth": config.depth,
            "prompts": len(prompts),
            "speculative_config": {
                "method": head.method,
                "model": str(out.resolve()),
                "num_speculative_tokens": config.depth,
            },
            "greedy": comparisons[0].to_json(),
            "sampled": comparisons[1].to_json(),
            "trained": read_json(trained)["after"] if trained.is_file() else None,
            "seconds": round(time.perf_counter() - began, 2),
        }
        write_json(folder / MARKER, report)
    return {"out": str(out), **report}


def find_source(
    path: str | Path,
    model: str | Path | None = None,
    prompts: str | Path | None = None,
    *,
    prompt_column: str | None = None,
    chat: bool | None = None,
) -> ExportSource:
    """Return the head, target and prompts of a run's folder or a head's; arguments override the folder's.

    ConfigError where one of them cannot be found.
    """
    path = Path(path)
    paths: Json = {}
    data: Json = {}
    from_folders: Sequence[str] = ()
    if (path / "run.json").is_file():
        recipe = read_json(path / "run.json").get("recipe", {})
        final = (path / "checkpoints" / "final").resolve()
        data, from_folders = recipe.get("data", {}), recipe.get("code") or ()
        heldout = data.get("heldout")
        # The first of several held-out sets.
        heldout = next(iter(heldout.values()), None) if isinstance(heldout, dict) else heldout
        paths = {
            "model": final if final.is_dir() else recipe.get("model"),
            "prompts": heldout or data.get("train"),
        }
        path = path / "drafter" / "final"
        if not path.is_dir():
            raise ConfigError(f"{path} does not exist: this run trained no drafter, or has not ended")
    elif (path / TRAINED).is_file():
        paths = {"model": read_json(path / TRAINED).get("model")}
    else:
        path = local_folder(path)
    paths = {
        name: _resolved(value, path, from_folders)
        for name, value in {**paths, "model": paths.get("model") or verifier_of(path)}.items()
        if value is not None
    }
    if model is None and "model" not in paths:
        raise ConfigError(f"{path} has no record of the model that it drafts for: give --model")
    target = Path(model or paths["model"])
    if not target.is_dir():
        raise ConfigError(f"{target}: no such folder; the target's weights must be in a folder here, give --model")
    beside = [target / "heldout.jsonl", target / "train.jsonl"]
    prompt_file = prompts or paths.get("prompts") or next((file for file in beside if file.is_file()), None)
    if prompt_file is None:
        raise ConfigError("no prompts to compare acceptance on: give --prompts, a JSONL or Parquet file or a trace")
    return ExportSource(
        head=path,
        target=target,
        prompts=Path(prompt_file),
        prompt_column=prompt_column or data.get("prompt_column", "prompt"),
        chat=data.get("chat", False) if chat is None else chat,
    )


def _resolved(path: str | Path, source: Path, from_folders: Sequence[str]) -> Path:
    """Resolve a path in a run's or a head's file, from any current folder.

    The path is tried relative to the folders above the source, to one that a run names, then to the current one.
    """
    folders = [*source.resolve().parents, *map(Path, from_folders)]
    return next((folder / path for folder in folders if (folder / path).exists()), Path(path))


def write_checkpoint(head: DrafterHead, frozen: FrozenTarget, target: Path, folder: Path, depth: int = 5) -> None:
    """Write the head, in the target's dtype, with the parts that it shared.

    An EAGLE-3 head's config names its verifier and drafts of `depth` tokens, so that the
    checkpoint can be served by its folder alone (`vllm serve FOLDER`); vLLM supports no such config of an EAGLE head.
    """
    if isinstance(head, Eagle3Head):
        head.verifier, head.depth = str(target.resolve()), depth
        head.verifier_architectures = tuple(read_config(target).architectures or ())
    head.to(frozen.embedding.dtype).save(folder)
    weights = load_file(folder / WEIGHTS_FILE) | {"embed_tokens.weight": frozen.embedding.contiguous()}
    if head.method == "eagle3":
        weights.setdefault("lm_head.weight", frozen.lm_head.clone())
    save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})


def compare(
    folder: Path, head: DrafterHead, target: Path, prompts: Sequence[Sequence[int]], config: ExportConfig
) -> list[ExportCheck]:
    """Run the prompts in stock vLLM with the checkpoint in `folder`, greedily and at the temperature.

    The expected acceptance is that of `head` on the same responses.
    """
    positions = read_config(target).max_position_embeddings
    # vLLM stops drafting where the draft after the current one would exceed its context.
    beside = max(map(len, prompts)) + 2 * config.depth
    most = min(config.max_response_tokens, positions - beside)
    if most < 2:
        raise ConfigError(f"the prompts leave no room in the model's context of {positions} tokens")
    # vLLM needs KV memory for its whole context, which many models do not leave.
    engine = StockEngine(
        target, folder, method=head.method, depth=config.depth, max_model_len=beside + most, seed=config.seed
    )
    with closing(engine):
        runs = {
            temperature: engine.generate(prompts, temperature=temperature, max_tokens=most)
            for temperature in (0.0, config.temperature)
        }
    model, frozen = load_target(target)
    head = head.to(frozen.embedding.device, torch.float32).eval()
    checks = []
    for temperature, run in runs.items():
        texts = (along(model, head.aux_layers, *text) for text in zip(prompts, run.token_ids, strict=True))
        kept = [kept_along(head, frozen, text, config.depth).tolist() for text in texts]
        checks.append(_check(temperature, run, kept, config.depth))
    return checks


def _check(temperature: float, run: StockRun, kept: Sequence[Sequence[int]], depth: int) -> ExportCheck:
    """Compare a run with `kept`, the head's accepted tokens at each position of each response."""
    if not run.num_drafts:
        raise RunError("the model's responses are too short for a single draft: give other --prompts")
    kept_at, passes, tokens = np.zeros(depth, np.int64), 0, 0
    for of_response in kept:
        places = walk(of_response)
        kept_at += (np.array([of_response[i] for i in places], np.int64)[:, None] > np.arange(depth)).sum(0)
        passes, tokens = passes + len(places), tokens + len(of_response) - 1
    responses = np.concatenate([np.array(response[1:], np.int64) for response in run.token_ids])
    return ExportCheck(
        temperature=temperature,
        expected_accept_length=tokens / passes,
        measured_accept_length=tokens / run.num_drafts,
        expected_positions=chances(passes, kept_at.tolist()),
        measured_positions=chances(run.num_drafts, run.accepted),
        passes=run.num_drafts,
        first_kept=run.accepted[0] / run.num_drafts,
        commonest=float(np.bincount(responses).max() / len(responses)),
    )


def _prompts(source: ExportSource, config: ExportConfig) -> list[list[int]]:
    texts = read_texts(
        source.prompts,
        TextConfig(responses=config.num_prompts, prompt_column=source.prompt_column, chat=source.chat),
        load_tokenizer(source.target),
        np.random.default_rng(config.seed),
    )
    prompts = [text.prompt_token_ids for text in texts if text.prompt_token_ids]
    vocabulary = read_config(source.target).vocab_size
    if not prompts or max(max(prompt) for prompt in prompts) >= vocabulary:
        raise ConfigError(f"{source.prompts}: no prompts, or prompts of another model than {source.target}")
    return prompts
