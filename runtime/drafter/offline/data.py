"""Data for the warm-up of a drafter: responses of its target, and the target's hidden states along them.

Responses come from a trace, from a file, or from the target itself, which answers a file's prompts in an engine. Hidden
states come from one pass of the target over each text, alone and unpadded; they are kept while they fit.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from tltlab import console
from tltlab.config import whole_text
from tltlab.drafters.base import Key
from tltlab.errors import ConfigError, one_line
from tltlab.records import frozen
from tltlab.runtime.data.prompts import rows_of_file
from tltlab.runtime.drafter.heads.target import FrozenTarget, hidden_states_of, read_config
from tltlab.runtime.drafter.sequences import TrainingSequence, prompt_draw
from tltlab.runtime.engine.engine import Engine
from tltlab.runtime.engine.generation import GenerationRequest
from tltlab.runtime.recipe.drafter import TextConfig
from tltlab.traces.trace import is_trace, locate, read

Item = TypeVar("Item")


@frozen
class PromptedText:
    """A response and its prompt; `token_ids` is empty where the response is still to be generated."""

    prompt_token_ids: list[int]
    token_ids: list[int]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.token_ids)


def read_texts(data: str | Path, config: TextConfig, tokenizer: Any, rng: np.random.Generator) -> list[PromptedText]:
    """Read texts from a trace's folder or from a JSONL or Parquet file, prompts alone where it has no responses.

    InputError for data that is unreadable or empty.
    """
    path, most, cut = Path(data), config.responses, config.max_response_tokens
    if path.is_dir():
        texts = _random_sample(_texts_of_trace(path), most, rng)
    else:
        texts = [
            PromptedText(
                prompt_token_ids=_prompt_ids(prompt, config, tokenizer),
                token_ids=[] if response is None else _token_ids(response, tokenizer),
            )
            for prompt, response in _random_sample(_pairs_of_file(path, config), most, rng)
        ]
    if not texts:
        raise ConfigError(f"{data}: no prompts and no responses in it, nothing to train a drafter on")
    return [replace(text, token_ids=text.token_ids[:cut]) for text in texts]


def _random_sample(items: Iterable[Item], most: int, rng: np.random.Generator) -> list[Item]:
    """Draw at most `most` items uniformly, in their order; no more are held at a time."""
    drawn: list[tuple[int, Item]] = []
    for number, item in enumerate(items):
        if number < most:
            drawn.append((number, item))
        elif (place := int(rng.integers(number + 1))) < most:
            drawn[place] = (number, item)
    return [item for _, item in sorted(drawn, key=lambda pair: pair[0])]


def _texts_of_trace(path: Path) -> Iterator[PromptedText]:
    if not is_trace(locate(path)):
        raise ConfigError(f"{path}: neither a trace nor a JSONL or Parquet file of prompts and responses")
    trace = read(path)
    if not trace.num_rows("tokens"):
        raise ConfigError(f"{path}: the trace has no tokens.parquet, and a drafter learns from text")
    for step in trace.iter_rl_steps():
        tokens = step.tokens
        if tokens is not None:
            for prompt, response in zip(tokens["prompt_token_ids"], tokens["token_ids"], strict=True):
                if len(prompt) and len(response):
                    yield PromptedText(prompt_token_ids=prompt.tolist(), token_ids=response.tolist())


def _pairs_of_file(path: Path, config: TextConfig) -> Iterator[tuple[Any, Any]]:
    """Yield the prompt of each row and its response, None in every row of a file of prompts alone."""
    if path.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(f"{path}: not a trace's folder, and its name ends in neither .jsonl nor .parquet")
    answers = None
    for number, (_, row) in enumerate(rows_of_file(path)):
        prompt, response = row.get(config.prompt_column), row.get(config.response_column)
        if prompt is None:
            raise ConfigError(f"{path}: row {number} has no column {config.prompt_column!r}; it has {', '.join(row)}")
        answers = response is not None if answers is None else answers
        if answers != (response is not None):
            raise ConfigError(
                f"{path}: row {number} differs from the first: only some have a {config.response_column!r}"
            )
        yield prompt, response


def _prompt_ids(prompt: Any, config: TextConfig, tokenizer: Any) -> list[int]:
    if isinstance(prompt, list):
        return _checked_ids(prompt)
    text = whole_text(str(prompt))
    if not config.chat:
        return list(tokenizer(text)["input_ids"])
    messages = [{"role": "user", "content": text}]
    try:
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])
    except Exception as error:  # a template may raise anything
        raise ConfigError(f"the model has no chat template that works: {one_line(error)[:200]}") from error


def _token_ids(response: Any, tokenizer: Any) -> list[int]:
    if isinstance(response, list):
        return _checked_ids(response)
    end = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    return [*tokenizer(whole_text(str(response)), add_special_tokens=False)["input_ids"], *end]


def _checked_ids(ids: list[Any]) -> list[int]:
    try:
        return [int(token) for token in ids]
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"a prompt or response is a list, but not of token ids: {str(ids)[:80]}; give text or token ids"
        ) from error


def generate_responses(
    model: str, prompts: Sequence[PromptedText], config: TextConfig, *, seed: int, progress: Callable[[str], None]
) -> list[PromptedText]:
    """Return the prompts with responses generated by the target. ConfigError where it cannot run."""
    positions = read_config(model).max_position_embeddings
    fitting = [text.prompt_token_ids for text in prompts if 0 < len(text.prompt_token_ids) < positions]
    if not fitting:
        raise ConfigError(f"none of the {len(prompts)} prompts fits in the model's context of {positions} tokens")
    # vLLM needs KV memory for its whole context, which many models do not leave.
    context = min(positions, max(map(len, fitting)) + config.max_response_tokens)
    if not torch.cuda.is_available():
        return _generated(model, fitting, config, context, seed, progress)
    # A process of its own releases all of a device's memory when it ends.
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(_generated, model, fitting, config, context, seed, console.progress).result()


def _generated(
    model: str, prompts: list[list[int]], config: TextConfig, context: int, seed: int, progress: Callable[[str], None]
) -> list[PromptedText]:
    engine = Engine(model, max_draft_depth=0, seed=seed, vllm_args={"max_model_len": context})
    with closing(engine):
        requests = [
            GenerationRequest(
                key=(0, str(n), 0, 0), prompt_token_ids=ids, max_response_tokens=config.max_response_tokens
            )
            for n, ids in enumerate(prompts)
        ]
        num_reported = 0

        def report(ended: Sequence[Key]) -> bool:
            nonlocal num_reported
            if len(ended) >= num_reported + max(1, len(requests) // 4):
                num_reported = len(ended)
                progress(f"{num_reported} of {len(requests)} responses generated")
            return False

        rollout = engine.generate(requests, rl_step=0, temperature=config.temperature, until=report)
    return [
        PromptedText(prompt_token_ids=ids, token_ids=list(response.token_ids))
        for ids, response in zip(prompts, rollout.responses, strict=True)
    ]


def usable_texts(texts: Sequence[PromptedText], vocabulary: int, max_positions: int) -> list[PromptedText]:
    """Return texts cut to a model's positions, long enough to learn from; ConfigError for unknown tokens.

    ConfigError too where none is left.
    """
    cut_texts = []
    for text in texts:
        ids = (*text.prompt_token_ids, *text.token_ids)
        unknown = next((token for token in ids if not 0 <= token < vocabulary), None)
        if unknown is not None:
            raise ConfigError(
                f"a text has token {unknown}, and the model's vocabulary goes from 0 to {vocabulary - 1}: "
                "these texts are another model's"
            )
        room = max_positions - len(text.prompt_token_ids)
        cut = replace(text, token_ids=text.token_ids[: max(room, 0)])
        if cut.token_ids and cut.num_tokens >= 3:
            cut_texts.append(cut)
    if not cut_texts:
        raise ConfigError(
            f"none of {len(texts)} texts is long enough to learn from: a drafter needs three tokens, "
            "one of them the response's"
        )
    return cut_texts


def split_by_prompt(
    texts: Sequence[PromptedText], share: float, seed: int
) -> tuple[list[PromptedText], list[PromptedText]]:
    """Split texts into training and held-out ones, about `share` of the prompts and at least one, by `prompt_draw`.

    ConfigError for texts of fewer than two prompts.
    """
    prompts = list(dict.fromkeys(tuple(text.prompt_token_ids) for text in texts))
    if len(prompts) < 2:
        raise ConfigError("all texts have one prompt: some must be held out, so give texts of two prompts or more")
    num_heldout = min(max(1, round(share * len(prompts))), len(prompts) - 1)
    of_heldout = set(sorted(prompts, key=lambda prompt: prompt_draw(str(prompt), seed))[:num_heldout])
    sides: tuple[list[PromptedText], list[PromptedText]] = ([], [])
    for text in texts:
        sides[tuple(text.prompt_token_ids) in of_heldout].append(text)
    return sides


def along(model: Any, aux_layers: Sequence[int], prompt: Sequence[int], response: Sequence[int]) -> TrainingSequence:
    """Return a text with its target's hidden states, of one pass, on the target's device."""
    ids = torch.tensor([*prompt, *response], dtype=torch.int32)
    hidden, aux = hidden_states_of(model, ids[:-1], aux_layers)
    return TrainingSequence(key=(0, "", 0, 0), token_ids=ids, hidden=hidden, aux=aux, prompt_tokens=len(prompt))


class TargetStates:
    """The target's hidden states along texts, on the host: computed on demand, kept while `max_bytes` lasts.

    States that did not fit are recomputed each time. `computed` counts the tokens of all passes.
    """

    def __init__(self, model: Any, aux_layers: Sequence[int], max_bytes: int):
        self.model, self.aux_layers, self.max_bytes = model, tuple(aux_layers), max_bytes
        self.nbytes = 0
        self.computed = 0
        self._sequences: dict[int, TrainingSequence] = {}

    def of(self, text: PromptedText) -> TrainingSequence:
        """Return the sequence of a text; the cache identifies a text by object."""
        sequence = self._sequences.get(id(text))
        if sequence is None:
            sequence = along(self.model, self.aux_layers, text.prompt_token_ids, text.token_ids).on_host()
            self.computed += sequence.num_rows
            if self.nbytes + sequence.nbytes <= self.max_bytes:
                self._sequences[id(text)] = sequence
                self.nbytes += sequence.nbytes
        return sequence


class Epochs:
    """Texts in a random order, reshuffled each time all have been used, some tokens at a time."""

    def __init__(self, texts: Sequence[PromptedText], states: TargetStates, rng: np.random.Generator):
        self.texts, self.states, self._rng = list(texts), states, rng
        self._order: list[int] = []

    def take(self, tokens: int) -> list[TrainingSequence]:
        """Return sequences of at most `tokens` rows in all, at least one; a longer one is cut to a random stretch."""
        drawn: list[TrainingSequence] = []
        room = tokens
        while True:
            if not self._order:
                self._order = self._rng.permutation(len(self.texts)).tolist()
            text = self.texts[self._order[-1]]
            rows = text.num_tokens - 1
            if drawn and (rows > room or len(drawn) == len(self.texts)):
                return drawn
            self._order.pop()
            sequence = self.states.of(text)
            if rows > tokens:
                # A stretch that ends within the prompt would teach nothing.
                first = min(max(0, sequence.prompt_tokens - tokens // 2), rows - tokens)
                sequence = sequence.stretch(int(self._rng.integers(first, rows - tokens + 1)), tokens)
            assert sequence.teaches
            drawn.append(sequence)
            room -= sequence.num_rows


def load_target(folder: str | Path) -> tuple[Any, FrozenTarget]:
    """Load a target for its hidden states, and its embedding and LM head in float32, on the training device.

    On CUDA its passes run in bfloat16, as in an engine. ConfigError where the folder holds no language model.
    """
    disable_progress_bar()
    cuda = torch.cuda.is_available()
    model: Any
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16 if cuda else torch.float32)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}: no language model there: {one_line(error)[:300]}") from error
    model = model.to("cuda" if cuda else "cpu").eval().requires_grad_(False)
    return model, FrozenTarget.of(model).to(model.device, torch.float32)


def load_tokenizer(folder: str | Path) -> Any:
    """Load a model's tokenizer. ConfigError where there is none that loads."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # broken files raise bare Exception
        raise ConfigError(f"{folder} has no tokenizer that loads: {one_line(error)[:200]}") from error
    # Texts longer than the context are counted and refused elsewhere, with their place.
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    return tokenizer
