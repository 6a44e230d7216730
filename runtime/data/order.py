"""Order of prompts: seeded epochs, cut into the batches of RL steps, resumable at any position."""

from collections.abc import Collection, Iterable

import numpy as np

from tltlab.arrays import Ints
from tltlab.errors import ConfigError
from tltlab.records import Json


class DataOrder:
    """Takes prompts by number, epoch by epoch; each epoch is a seeded permutation of all `num_prompts`."""

    def __init__(self, num_prompts: int, seed: int):
        self.num_prompts = num_prompts
        self.seed = seed
        self._begin(0)

    def _begin(self, epoch: int) -> None:
        self.epoch = epoch
        self._order = _epoch_order(self.num_prompts, epoch, self.seed)
        self._next = 0
        self._passed_over: list[int] = []
        self._again: list[int] = []

    def again(self, batch: Iterable[tuple[int, int]]) -> None:
        """Give back prompts that `take` returned, as (epoch, prompt number): they come again at the end of the epoch.

        Those of an earlier epoch come again in this one in any case.

        >>> order = DataOrder(4, seed=0)
        >>> order.again(order.take(2)[:1])
        >>> order.take(3)
        [(0, 1), (0, 3), (0, 2)]
        """
        again = [number for epoch, number in batch if epoch == self.epoch]
        self._again += again
        self._order += again

    def take(self, n: int, exclude: Collection[int] = ()) -> list[tuple[int, int]]:
        """Return (epoch, prompt number) of the next `n` prompts, none of them in `exclude` and none twice.

        An excluded prompt keeps its turn: it comes as soon as it is no longer excluded. The rest of an epoch that does
        not fill the batch waits for another epoch. Fewer than `n` come only where there are no more prompts.

        >>> order = DataOrder(4, seed=0)
        >>> order.take(2), order.take(2, exclude=[3])
        ([(0, 2), (0, 0)], [(1, 0), (1, 2)])
        """
        excluded = frozenset(exclude)
        size = min(n, self.num_prompts - sum(0 <= number < self.num_prompts for number in excluded))
        if size <= 0:
            return []
        waiting = [*self._passed_over, *self._order[self._next :]]
        if sum(number not in excluded for number in waiting) < size:
            self._begin(self.epoch + 1)
        batch: list[int] = []
        passed_over: list[int] = []
        for number in self._passed_over:
            (passed_over if number in excluded or len(batch) == size else batch).append(number)
        while len(batch) < size:
            number = self._order[self._next]
            self._next += 1
            (passed_over if number in excluded else batch).append(number)
        self._passed_over = passed_over
        return [(self.epoch, number) for number in batch]

    def turns(self) -> Ints:
        """Return the number of prompts before each one's next turn, if none is excluded, [num_prompts].

        >>> order = DataOrder(4, seed=0)
        >>> order.take(2)
        [(0, 2), (0, 0)]
        >>> order.turns().tolist()  # 1 and 3 are left of this epoch
        [3, 0, 4, 1]
        """
        waiting = [*self._passed_over, *self._order[self._next :]]
        turns = np.empty(self.num_prompts, np.int64)
        turns[_epoch_order(self.num_prompts, self.epoch + 1, self.seed)] = len(waiting) + np.arange(self.num_prompts)
        turns[waiting] = np.arange(len(waiting))
        return turns

    def state_dict(self) -> Json:
        """Return its position, in JSON types."""
        return {
            "num_prompts": self.num_prompts,
            "seed": self.seed,
            "epoch": self.epoch,
            "next": self._next,
            "passed_over": list(self._passed_over),
            "again": list(self._again),
        }

    def load_state_dict(self, state: Json) -> None:
        """Continue from a position; ConfigError where it is of another order, of other data or another seed."""
        for name, own, same in (("num_prompts", self.num_prompts, "data"), ("seed", self.seed, "seed")):
            if state[name] != own:
                raise ConfigError(
                    f"the checkpoint has {name} {state[name]}, this run {own}: resume with the same {same}"
                )
        self._begin(state["epoch"])
        self._next, self._passed_over = state["next"], list(state["passed_over"])
        # Earlier versions wrote none.
        self._again = list(state.get("again", ()))
        self._order += self._again


def _epoch_order(num_prompts: int, epoch: int, seed: int) -> list[int]:
    order: list[int] = np.random.default_rng([seed, epoch]).permutation(num_prompts).tolist()
    return order
