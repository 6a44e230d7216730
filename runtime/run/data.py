"""Training and evaluation data of a run: its prompts, their order, and the rollouts that draw from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from tltlab.config import counted
from tltlab.errors import ConfigError
from tltlab.records import Fields, Json, frozen
from tltlab.runtime.data.order import DataOrder
from tltlab.runtime.data.prompts import Prompt, read_prompts
from tltlab.runtime.recipe.engines import config_of, engine_context
from tltlab.runtime.recipe.recipe import Recipe, with_steps
from tltlab.runtime.rollout.collected import Collected, Rollouts, SynchronousRollouts
from tltlab.runtime.rollout.environments import stop_token_ids
from tltlab.runtime.rollout.partial import AsynchronousRollouts, PartialRollouts
from tltlab.runtime.rollout.prefix_reuse import ReusingRollouts


@frozen
class RolledOut:
    """An RL step's responses, the policy version that drew them, and the start time of their rollout."""

    collected: Collected
    version: int
    t_start: float


class RolloutsAhead:
    """Rolls out RL step after RL step, the next ones during training.

    With `rollout.one_step_off` one RL step ahead, with `rollout.staleness` that many. `collect` rolls out an RL step
    under the engines' current weights. No rollout is made ahead across a checkpoint, which would lose it, nor after the
    last RL step, nor once the run is `ending`.
    """

    ending = False

    def __init__(self, recipe: Recipe, collect: Callable[[int], RolledOut]):
        self._recipe, self._collect = recipe, collect
        self._ahead: dict[int, Future[RolledOut]] = {}
        self._executor = ThreadPoolExecutor(1)

    def close(self) -> None:
        """End its thread."""
        self._executor.shutdown()

    def take(self, rl_step: int) -> RolledOut:
        """Return the responses of an RL step, rolled out ahead or now."""
        ahead = self._ahead.pop(rl_step, None)
        return self._collect(rl_step) if ahead is None else ahead.result()

    def begin(self, rl_step: int) -> None:
        """Begin an RL step's rollout, and later ones that may run before the previous one is done."""
        recipe, every = self._recipe, self._recipe.checkpoint.every
        num_ahead = recipe.rollout.staleness or int(recipe.rollout.one_step_off)
        for step in range(rl_step, min(rl_step + num_ahead, recipe.train.steps)):
            if self.ending or (every and step % every == 0):
                break
            if step not in self._ahead:
                self._ahead[step] = self._executor.submit(self._collect, step)

    @property
    def is_empty(self) -> bool:
        """True where no RL step is rolled out, or begun, ahead."""
        return not self._ahead

    def settle(self) -> None:
        """Wait until engines are done."""
        wait(list(self._ahead.values()))

    def forget(self) -> None:
        """Drop rollouts made ahead: the run goes back to an earlier RL step."""
        for ahead in self._ahead.values():
            ahead.cancel()
        self.settle()
        self._ahead.clear()

    def refuse(self, advice: str) -> None:
        """Raise ConfigError where the run must be between two RL steps, and the next is rolled out already."""
        if self._ahead:
            raise ConfigError(f"this run has rolled out its next RL step already: {advice}")


class RunData:
    """The prompts of a recipe; `notes` counts those left out, and those without room for a whole response.

    `recipe` is the one given, in RL steps where it was in epochs. `heldout` has the sets of evaluations by name.
    ConfigError for a prompt that cannot be read or leaves an engine no room to respond, and for a foreign tokenizer.
    """

    def __init__(self, recipe: Recipe, tokenizer: PreTrainedTokenizerBase):
        self.recipe, self.notes = recipe, list[str]()
        vocabulary, rows = len(tokenizer), config_of(recipe.model).get("vocab_size")
        if isinstance(rows, int) and vocabulary > rows:
            raise ConfigError(f"the tokenizer of {recipe.model} has {vocabulary} tokens, more than the model's {rows}")
        self.train = self._read(recipe.data.train, None, tokenizer)
        if recipe.train.epochs is not None:
            self.recipe = with_steps(recipe, len(self.train))
            steps, prompts = counted(self.recipe.train.steps, "RL step"), counted(len(self.train), "prompt")
            self.notes.append(f"train.epochs = {recipe.train.epochs:g}: {steps}, with {prompts}")
        self._number = {prompt.prompt_id: number for number, prompt in enumerate(self.train)}
        self.heldout = {
            name: self._read(source, recipe.data.heldout_split, tokenizer)
            for name, source in recipe.data.heldout_sets.items()
        }
        if (environment := recipe.rollout.environment) is not None:
            # Before anything starts; each worker reads it again.
            stop_token_ids(environment, recipe.code, tokenizer)
        self.begin()

    def begin(self) -> None:
        """Start at the first prompt, with no unfinished or reusable response."""
        self.order = DataOrder(len(self.train), self.recipe.seed)
        self.rollouts = rollouts_of(self.recipe, self.train, self.order)

    def next_use(self, prompt_ids: Sequence[str], rl_steps_left: int) -> list[int | None]:
        """Return about how many prompts come before each of these recurs; None where the run ends before.

        O(prompts of the data).
        """
        turns = self.order.turns()
        turns[list(self.rollouts.under_way)] = 0
        rounds = self.recipe.train.sampling_rounds
        last = rl_steps_left * self.recipe.rollout.prompts_per_step * rounds
        numbers = [self._number[prompt_id] for prompt_id in prompt_ids]
        return [turn if turn < last else None for turn in turns[numbers].tolist()]

    def state_dict(self, folder: Path) -> Json:
        """Return the position in the data, as JSON types; unfinished responses go into `folder`, which is made."""
        folder.mkdir()
        return {"order": self.order.state_dict(), "rollouts": self.rollouts.state_dict(folder)}

    def load_state_dict(self, state: Fields, folder: Path) -> None:
        """Continue from the result of `state_dict`."""
        self.begin()
        self.order.load_state_dict(state["order"])
        self.rollouts.load_state_dict(state["rollouts"], folder)

    def _read(self, source: str, split: str | None, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
        data, cap, room = self.recipe.data, self.recipe.rollout.max_response_tokens, engine_context(self.recipe)
        prompts, num_dropped = read_prompts(source, data, tokenizer, split=split, room=room)
        if num_dropped:
            left_out, most = counted(num_dropped, "prompt"), data.max_prompt_tokens
            self.notes.append(f"{left_out} of {source} left out, with more than data.max_prompt_tokens = {most}")
            per_step, num_left = self.recipe.rollout.prompts_per_step, len(prompts)
            if split is None and num_left < per_step:
                raise ConfigError(f"{self.notes[-1]}: {num_left} left for rollout.prompts_per_step = {per_step}")
        lengths = [len(prompt.token_ids) for prompt in prompts]
        if room is not None and (num_long := sum(length + cap > room for length in lengths)):
            self.notes.append(
                f"{num_long} prompts of {source}, of up to {max(lengths)} tokens, leave less than "
                f"rollout.max_response_tokens = {cap} of the engine's context of {room}: their responses end there"
            )
        return prompts


def rollouts_of(recipe: Recipe, prompts: Sequence[Prompt], order: DataOrder) -> Rollouts:
    """Return the recipe's way of rolling out; ConfigError for contradictory settings."""
    if recipe.rollout.staleness:
        return AsynchronousRollouts(recipe, prompts, order, recipe.rollout.staleness)
    if recipe.rollout.partial is not None:
        return PartialRollouts(recipe, prompts, order, recipe.rollout.partial)
    if recipe.rollout.reuse is not None:
        return ReusingRollouts(recipe, prompts, order, recipe.rollout.reuse)
    return SynchronousRollouts(recipe, prompts, order)
