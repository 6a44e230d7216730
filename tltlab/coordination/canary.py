"""The canary on drafters: are drafts kept as often as a learned drafter's training predicted, or as often as before?

A drafter that serves with stale weights, or reads the wrong embedding, changes nothing that is sampled: it only makes
the run slow, and raises no error. So acceptance is compared after each swap of the drafter's weights, each sync of the
target's and each wake of the engine: with the prediction (`Canary`), or with what it was before (`Alarm`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Literal

from scipy.special import bdtr  # type: ignore[import-untyped, unused-ignore]

from tltlab.config import Count, FrozenModel, Share
from tltlab.errors import ConfigError
from tltlab.records import Json, frozen

FALSE_ALARM = 1e-4
"""Chance, at most, that a drafter exactly at the bound is called collapsed in one window, however long it lasts."""

START = ("the start",)

LEAST_DRAFTS = 32
"""Number of drafts from which on an acceptance rate counts as known."""

COLLAPSE = 0.25
"""Share of its acceptance rate before below which a drafter has collapsed, where no training predicted one."""

ASSUMED = 0.2
"""Acceptance rate of first tokens of a drafter with a network whose own is not known."""

NUM_VERDICTS = 64
"""Newest verdicts that a canary keeps."""


class CanaryConfig(FrozenModel):
    """Definition of a collapsed drafter: the chance of a draft's first token is below `collapse` times what training
    predicted, surely so, after at least `min_drafts` drafts since the last swap, weight sync or wake.

    `on_collapse` the model-free drafter `fallback` serves in its place, or the run stops with a sentence ("stop").
    Each weight sync since the prediction lowers the bound by the share `moved_target`, as the target moves away from
    the one that training saw. A drafter whose training predicts less than `min_predicted` has not learned anything
    yet: it does not serve, and stops no run.
    """

    on_collapse: Literal["fallback", "stop"] = "fallback"
    min_drafts: Count = 200
    collapse: Share = 0.5
    moved_target: Share = 0.05
    min_predicted: Share = 0.1


@frozen
class DraftPositions:
    """Per position of a draft, the first one first: how many drafts reached so far, how many of these had all tokens
    before it kept (`tried`), how many had it kept too.

    >>> DraftPositions(drafted=(4, 4), tried=(4, 3), kept=(3, 1)).chance  # 3 of 4, then 1 of 3
    (0.75, 0.3333333333333333)
    """

    drafted: tuple[int, ...] = ()
    tried: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()

    @property
    def chance(self) -> tuple[float | None, ...]:
        """The chance that a token is kept where those before it were; None where none was tried."""
        return tuple(kept / tried if tried else None for kept, tried in zip(self.kept, self.tried, strict=True))


class DraftCounts:
    """Counts drafts by length and by tokens kept, in constant time each; `positions` works out the rest.

    `rows` are those of an earlier `state_dict`.
    """

    def __init__(self, rows: Iterable[tuple[int, int, int]] = ()):
        self.drafts = self.first_kept = 0
        self._times: Counter[tuple[int, int]] = Counter()
        for row in rows:
            self.add(*row)

    def add(self, num_drafted: int, num_kept: int, times: int = 1) -> None:
        """Count `times` drafts of `num_drafted` tokens, at least one, of which the first `num_kept` were kept."""
        self.drafts += times
        self.first_kept += times * (num_kept > 0)
        self._times[num_drafted, num_kept] += times

    @property
    def positions(self) -> DraftPositions:
        depths, counts = range(max((drafted for drafted, _ in self._times), default=0)), self._times.items()
        return DraftPositions(
            drafted=tuple(sum(n for (drafted, _), n in counts if drafted > i) for i in depths),
            tried=tuple(sum(n for (drafted, kept), n in counts if drafted > i <= kept) for i in depths),
            kept=tuple(sum(n for (_, kept), n in counts if kept > i) for i in depths),
        )

    def state_dict(self) -> list[list[int]]:
        return [[*lengths, times] for lengths, times in self._times.items()]


@frozen
class Verdict:
    """Finding of the canary: `measured` and `predicted` are chances per draft position, given those before were kept.

    `why` names what the drafts are counted from. "untrained": the prediction itself is too low to serve.
    """

    kind: Literal["fine", "collapsed", "untrained"]
    why: str
    predicted: tuple[float, ...]
    measured: tuple[float | None, ...]
    drafts: int

    @classmethod
    def from_row(cls, row: Json) -> Verdict:
        """Restore the verdict from its fields, after JSON."""
        return cls(**(row | {name: tuple(row[name]) for name in ("predicted", "measured")}))

    @property
    def sentence(self) -> str:
        """The verdict in words."""
        if self.kind == "untrained":
            return (
                f"the learned drafter has not learned yet: training predicts a chance of {self.predicted[0]:.3f} for a "
                f"draft's first token ({self.why})"
            )
        share = f"{self.measured[0]:.3f} of {self.drafts} first draft tokens were kept since {self.why}"
        if self.kind == "fine":
            return f"the learned drafter does as predicted: {share}, training predicted {self.predicted[0]:.3f}"
        return (
            f"the learned drafter has collapsed: {share}, but training predicted {self.predicted[0]:.3f}; likely the "
            "engine drafts with stale weights, a wrong embedding or LM head, or a wrong vocabulary"
        )


class Canary:
    """Compares a drafter's acceptance with what training predicted; `trusted` is whether it may serve.

    Call `expect` at each swap, `reset` at each weight sync and wake, and `observe` per verified draft. `expect` and
    `reset` open a window, which is looked at after `min_drafts` drafts, then each time their number has doubled. At
    look i (from 0) the drafter has collapsed if the binomial chance of so few first tokens at the bound is at most
    `FALSE_ALARM` / 2^(i + 1): over all looks of a window a drafter at or above the bound raises a false alarm with
    probability at most `FALSE_ALARM`, if drafts are independent. A collapsed drafter is not trusted until the
    next `expect`. Without a prediction every drafter is trusted.

    >>> canary = Canary(CanaryConfig(min_drafts=50))
    >>> canary.expect([0.8, 0.7], "the swap")
    >>> for _ in range(50):
    ...     canary.observe(2, 0)
    >>> canary.trusted, canary.verdicts[-1].kind
    (False, 'collapsed')
    """

    def __init__(self, config: CanaryConfig):
        self.config = config
        self.predicted: tuple[float, ...] = ()
        self.trusted = True
        self.verdicts: deque[Verdict] = deque(maxlen=NUM_VERDICTS)
        self._moves = 0
        self._open("the start")

    def expect(self, accept: Sequence[float], why: str) -> None:
        """New weights serve: draft token i is to be kept with chance `accept[i]`, given those before it.

        Without chances the new weights are trusted unseen. ConfigError for what are no chances.
        """
        check_chances(accept)
        self.predicted = tuple(float(chance) for chance in accept)
        self._moves = 0
        self.trusted = not self.predicted or self.predicted[0] >= self.config.min_predicted
        self._open(why)
        if not self.trusted:
            self._judge("untrained")

    def reset(self, why: str, *, target_moved: bool = False) -> None:
        """Count afresh, as something happened that may break the drafter; the prediction and the trust stay."""
        self._moves += target_moved
        self._open(why)

    def observe(self, drafted: int, accepted: int) -> None:
        """A draft of `drafted` tokens was verified, its first `accepted` were kept."""
        self.counts.add(drafted, accepted)
        if self.counts.drafts == self._next_look:
            self._look()

    @property
    def bound(self) -> float:
        """The chance of a first token below which the drafter has collapsed."""
        if not self.predicted:
            return 0.0
        return self.config.collapse * self.predicted[0] * (1.0 - self.config.moved_target) ** self._moves

    @property
    def collapsed(self) -> Verdict | None:
        """The verdict by which the drafter is out of service; None for one that serves, or that has yet to learn."""
        if self.trusted or self.verdicts[-1].kind != "collapsed":
            return None
        return self.verdicts[-1]

    def state_dict(self) -> Json:
        """Return the counts and verdicts of the weights that serve, as JSON."""
        return {
            "moves": self._moves,
            "predicted": list(self.predicted),
            "trusted": self.trusted,
            "verdicts": [asdict(verdict) for verdict in self.verdicts],
            "why": self._why,
            "next_look": self._next_look,
            "looks": self._looks,
            "counts": self.counts.state_dict(),
        }

    def load_state_dict(self, state: Json) -> None:
        """Go back to what `state_dict` gave."""
        self._moves, self._why = state["moves"], state["why"]
        self.predicted, self.trusted = tuple(state["predicted"]), state["trusted"]
        self._next_look, self._looks = state["next_look"], state["looks"]
        self.verdicts.clear()
        for row in state["verdicts"]:
            self.verdicts.append(Verdict.from_row(row))
        self.counts = DraftCounts(state["counts"])

    def _open(self, why: str) -> None:
        self._why = why
        self.counts = DraftCounts()
        self._looks = 0
        # No number of drafts is 0: nothing is looked at then.
        self._next_look = self.config.min_drafts if self.predicted and self.trusted else 0

    def _look(self) -> None:
        self._looks += 1
        if bdtr(self.counts.first_kept, self.counts.drafts, self.bound) <= FALSE_ALARM * 0.5**self._looks:
            self.trusted = False
            self._next_look = 0
            self._judge("collapsed")
            return
        self._next_look *= 2
        if self._looks == 1:
            self._judge("fine")

    def _judge(self, kind: Literal["fine", "collapsed", "untrained"]) -> None:
        verdict = Verdict(
            kind=kind,
            why=self._why,
            predicted=self.predicted,
            measured=self.counts.positions.chance,
            drafts=self.counts.drafts,
        )
        self.verdicts.append(verdict)


class _Window:
    """Drafts of one drafter since the `events`, and those of which its acceptance before is known.

    `kept` of the `drafts` had their first token accepted.
    """

    def __init__(self) -> None:
        self.before = (0, 0)
        self.collapsed = ""
        self.open(START)

    def open(self, events: Sequence[str]) -> None:
        self.events = events
        self.kept = self.drafts = self.looks = 0
        self.next_look = LEAST_DRAFTS

    @property
    def rate(self) -> float:
        """Acceptance rate of first tokens before, 0 where nothing is known."""
        kept, drafts = self.before
        return kept / max(drafts, 1)

    def note_event(self, event: str) -> None:
        """Open another window; one with too few accepted drafts continues, until it is enough for a verdict."""
        if not self.collapsed and self.kept <= COLLAPSE * self.rate * self.drafts:
            earlier = self.events if self.drafts or self.events != START else []
            self.events = list(dict.fromkeys([*earlier, event]))
            return
        enough = self.drafts >= LEAST_DRAFTS
        if not self.collapsed and (enough or self.before[1] < LEAST_DRAFTS):
            kept, drafts = (0, 0) if enough else self.before
            self.before = kept + self.kept, drafts + self.drafts
        self.open([event])


class Alarm:
    """Compares the acceptance of every drafter with its own before a wake of the engine, or before new weights.

    `note_event` opens a window for each drafter. A window is examined after `LEAST_DRAFTS` drafts, then whenever their
    number has doubled, and when the engine falls idle. A drafter has collapsed if so few first tokens are accepted
    that their binomial chance, at `COLLAPSE` times the rate before, is at most `FALSE_ALARM` / 2^(i + 1) at look i
    (from 0). A drafter without a network, which depends on the text alone, and one whose rate before is not known
    collapse only where no draft at all is accepted. That rate is `ASSUMED` for a network; without a network there is no
    alarm then.
    `notify` receives a sentence at each collapse.

    >>> notices = []
    >>> alarm = Alarm(notices.append)
    >>> alarm.observe("eagle", [(3, 2)] * 40, has_network=True)
    >>> alarm.note_event("the engine woke")
    >>> alarm.observe("eagle", [(3, 0)] * 64, has_network=True)
    >>> notices[0].partition(":")[0]
    'drafter eagle has collapsed since the engine woke'
    """

    def __init__(self, notify: Callable[[str], object]):
        self._notify = notify
        self._windows: dict[str, tuple[_Window, bool]] = {}

    def note_event(self, event: str) -> None:
        """Note what may break a drafter: a wake, or new weights."""
        for window, _ in self._windows.values():
            window.note_event(event)

    def observe(self, drafter: str, verified: Sequence[tuple[int, int]], *, has_network: bool) -> None:
        """Count drafts that were verified: (drafted tokens, accepted tokens) each."""
        if drafter not in self._windows:
            self._windows[drafter] = _Window(), has_network
        window, _ = self._windows[drafter]
        window.drafts += len(verified)
        window.kept += sum(accepted > 0 for _, accepted in verified)
        if window.drafts >= window.next_look:
            self._look(drafter)

    def idle(self) -> None:
        """Look at what has come since the last look: a rollout has ended."""
        for drafter, (window, _) in self._windows.items():
            if window.looks and window.drafts > window.next_look // 2 + LEAST_DRAFTS // 2:
                self._look(drafter)

    @property
    def collapsed(self) -> dict[str, str]:
        """Sentence of each drafter's collapse by name, "" for one that drafts as before."""
        return {drafter: window.collapsed for drafter, (window, _) in self._windows.items()}

    def _look(self, drafter: str) -> None:
        window, has_network = self._windows[drafter]
        window.looks += 1
        window.next_look = 2 * window.drafts
        known = window.before[1] >= LEAST_DRAFTS
        rate = window.rate if known else ASSUMED if has_network else 0.0
        chance = float(bdtr(window.kept, window.drafts, COLLAPSE * rate))
        sure = chance <= FALSE_ALARM * 0.5**window.looks
        if not sure or (window.kept and not (known and has_network)):
            if window.kept > COLLAPSE * rate * window.drafts:
                window.collapsed = ""
            return
        if not window.collapsed:
            before = f"{rate:.3f} before" if known else "a drafter with a network has more"
            window.collapsed = (
                f"drafter {drafter} has collapsed since {' and '.join(window.events)}: "
                f"{window.kept / window.drafts:.3f} of {window.drafts} first draft tokens were accepted, {before}; "
                "outputs stay right but drafts only cost time: load the drafter's weights anew, restart the engine, or "
                "turn speculation off"
            )
            self._notify(window.collapsed)


def check_chances(accept: Sequence[float]) -> None:
    """Raise ConfigError unless all are chances; NaN is none."""
    for position, chance in enumerate(accept):
        if not 0.0 <= chance <= 1.0:
            raise ConfigError(
                f"a drafter's predicted acceptance must be chances in [0, 1], got {chance} at position {position}: "
                "do not swap in what training could not judge"
            )
