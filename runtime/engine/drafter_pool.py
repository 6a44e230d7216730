"""The drafters of one engine by name: strategies an engine can run, drafts per request, recent acceptance.

Model-free drafters propose here, next to the scheduler. A learned drafter proposes in the engine's workers and its
tokens pass through. A hybrid decides between the two for each request.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tltlab.config import counted
from tltlab.coordination.canary import Canary, CanaryConfig, DraftCounts, DraftPositions, Verdict, check_chances
from tltlab.drafters.base import Drafter, Key
from tltlab.drafters.specs import (
    DEFAULT_DRAFTERS,
    Drafters,
    DrafterSpec,
    HybridSpec,
    LearnedSpec,
    traits_of,
)
from tltlab.errors import ConfigError, RunError, did_you_mean
from tltlab.records import Json, frozen
from tltlab.state import DrafterState
from tltlab.strategy import Strategy

from .requests import LiveRequest
from .tracker import Clock

ResponseTokens = tuple[Key, Sequence[int], Sequence[int]]
"""A key, the tokens of its prompt and the tokens of its response so far."""

Ahead = Sequence[tuple[LiveRequest, Sequence[int]]]
"""Requests, each with the tokens that it has and that are not in its output yet."""

AT_ONCE = 32
"""Most tokens that a drafter puts in while a device waits for its drafts, if it can draft without them."""

_ESTIMATE_WEIGHT = 0.02
"""Weight of the newest draft in a drafter's mean of accepted tokens: about the last fifty drafts count."""


class DrafterCollapsed(RunError):
    """The canary stopped the run: the learned drafter's acceptance is far below training's prediction."""


@frozen
class DrafterReport:
    """State of an engine's drafters; `dataclasses.asdict` of it is JSON.

    `drafter` is the learned drafter, "" where there is none, with its `age` in RL steps and its `updates`. It `serves`
    if it is trained, fresh and `trusted` by the canary. `predicted` (by training) and `measured` (since the last swap)
    are acceptance rates by draft position, given that all tokens before were accepted. `positions` are the counts of
    every drafter since the last swap, `verdicts` the newest ones of the canary.
    """

    drafter: str
    age: int
    updates: int
    trusted: bool
    serves: bool
    predicted: tuple[float, ...]
    measured: tuple[float | None, ...]
    positions: dict[str, DraftPositions]
    verdicts: tuple[Verdict, ...]


@dataclass(slots=True, eq=False)
class _Feed:
    """A model-free drafter in use, named `name`, and the turn at which it was last fed.

    `behind` is True while text waits to be looked up.
    """

    name: str
    drafter: Drafter
    turn: float = -math.inf
    behind: bool = False

    def open(self, live: LiveRequest) -> None:
        """Begin a request with its prompt."""
        live.shown[self.name] = 0
        self.drafter.open(live.key, live.prompt)

    def feed(self, lives: Iterable[LiveRequest]) -> None:
        """Show the drafter what requests have generated since."""
        for live in lives:
            if new := live.output[live.shown[self.name] :]:
                self.drafter.extend(live.key, new)
                live.shown[self.name] += len(new)

    def show(self, ahead: Ahead) -> None:
        """Show the drafter tokens `ahead` of outputs, all of which it was fed."""
        for live, tokens in ahead:
            if new := tokens[max(live.shown[self.name] - len(live.output), 0) :]:
                self.drafter.extend(live.key, new)
                live.shown[self.name] += len(new)

    def close(self, live: LiveRequest) -> None:
        """End a request; the rest of its text is shown first."""
        if new := live.output[live.shown[self.name] :]:
            self.drafter.extend(live.key, new)
        self.drafter.close(live.key)


_METHODS_WITHOUT_NETWORK = frozenset({"ngram", "ngram_gpu", "suffix"})
"""Methods of vLLM's speculative_config; the others run a network."""


class DrafterPool(Mapping[str, DrafterState]):
    """Drafters by the names that strategies use; as a mapping it gives policies the state of each.

    A request is known from `open` to `close`. A model-free drafter receives its text when a strategy asks that drafter
    (`feed`), and at the end. A drafter that no strategy asks costs nothing.

    `drafters` are specs or `Drafter` objects, by default `ngram` and `suffix`. At most one is learned; it does not
    serve until the canary trusts it. `max_depth` is the deepest draft the engine was built for. Without
    `on_host` drafts come only from an engine's workers. ConfigError for drafters that cannot run together.
    """

    def __init__(self, drafters: Mapping[str, DrafterSpec | Drafter] | None, max_depth: int, *, on_host: bool = True):
        self.max_depth = max_depth
        self.on_host = on_host
        self._rl_step = -1
        self._fresh = True
        self.specs = dict(DEFAULT_DRAFTERS if drafters is None else drafters)
        self._model_free: dict[str, Drafter] = {}
        self._weights = DrafterState()
        self._accept_estimates: dict[str, float] = {}
        self._counts: defaultdict[str, DraftCounts] = defaultdict(DraftCounts)
        self.canary = Canary(CanaryConfig())
        self._awaited_state: Json | None = None
        self._drafter_feeds: dict[str, _Feed] = {}
        learned = {name: spec for name, spec in self.specs.items() if isinstance(spec, LearnedSpec)}
        if len(learned) > 1:
            raise ConfigError(f"an engine holds one learned drafter, got {' and '.join(learned)}")
        self.learned = next(iter(learned), None)
        self._learned_spec = learned[self.learned] if self.learned is not None else None
        fallback = self._learned_spec.fallback if self._learned_spec is not None else None
        if fallback is not None and (fallback not in self.specs or not self._is_model_free(fallback)):
            raise ConfigError(f"drafter {self.learned}: its fallback {fallback!r} is no model-free drafter here")
        for name, spec in self.specs.items():
            if isinstance(spec, HybridSpec):
                for part in (spec.first, spec.otherwise):
                    if part not in self.specs or isinstance(self.specs[part], HybridSpec):
                        raise ConfigError(f"drafter {name} is a hybrid of {part!r}, and the engine has no such drafter")
                if spec.first == self.learned:
                    raise ConfigError(
                        f"drafter {name}: a hybrid's first drafter must be model-free, got {spec.first!r}"
                    )

    @property
    def registry(self) -> Drafters:
        """Return the drafters by name; `Drafter` objects draft next to the scheduler."""
        specs = {name: spec for name, spec in self.specs.items() if not isinstance(spec, Drafter)}
        own = {name: traits_of(type(spec)) for name, spec in self.specs.items() if isinstance(spec, Drafter)}
        return Drafters(specs, own)

    def use(self, strategies: Sequence[Strategy], lives: Collection[LiveRequest] = ()) -> None:
        """Feed the drafters that `strategies` name from now on, all if there are none, with running requests too."""
        for strategy in strategies:
            self.check(strategy)
        # Build all drafters before anything changes: an error leaves the pool unchanged.
        drafters = {name: self._drafter(name) for name in self.model_free(strategies)}
        previous, self._drafter_feeds = self._drafter_feeds, {}
        for name, drafter in drafters.items():
            if name in previous:
                self._drafter_feeds[name] = previous.pop(name)
                continue
            feed = self._drafter_feeds[name] = _Feed(name, drafter)
            for live in lives:
                feed.open(live)
        for feed in previous.values():
            for live in lives:
                feed.close(live)

    def model_free(self, strategies: Sequence[Strategy]) -> tuple[str, ...]:
        """Return the model-free drafters that `strategies` may use, all of them if there are none."""
        drafters = [s.drafter for s in strategies if s.speculates]
        names = {part for name in drafters for part in self._parts(name)} if strategies else set(self.specs)
        return tuple(name for name in self.specs if name in names and self._is_model_free(name))

    def needed(self, strategies: Sequence[Strategy]) -> frozenset[str]:
        """Return the drafters that `strategies` need, and the learned one, which is trained in any case."""
        named = {s.drafter for s in strategies if s.speculates} & self.specs.keys()
        parts = {part for name in named for part in self._parts(name)}
        return frozenset({*named, *parts, *(self._parts(self.learned) if self.learned is not None else ())})

    def check(self, strategy: Strategy) -> None:
        """Raise ConfigError where this engine cannot run `strategy`."""
        if not strategy.speculates:
            return
        complaint = ""
        if strategy.top_k != 1:
            complaint = (
                "vLLM drafts chains only and has no tree attention; top_k must be 1 (trees run in the simulator)"
            )
        elif strategy.drafter not in self.specs:
            near = did_you_mean(strategy.drafter, self.specs)
            complaint = f"this engine has the drafters {', '.join(self.specs) or 'none'}{near}"
        elif strategy.draft_depth > self.max_depth:
            complaint = (
                f"the engine is built for draft depths up to {self.max_depth}; raise max_draft_depth, or set "
                "rollout.graphs = stock where graphs were planned for another policy"
            )
        elif not self.runs(strategy.drafter):
            complaint = (
                "with asynchronous scheduling or vLLM's V2 model runner drafts stay on the device, so only a learned "
                "drafter without a fallback serves; leave async_scheduling off and set VLLM_USE_V2_MODEL_RUNNER=0"
            )
        if complaint:
            raise ConfigError(f"strategy {strategy}: {complaint}")

    def runs(self, name: str) -> bool:
        """Return True if drafter `name` can be used: model-free drafters need `on_host`."""
        return self.on_host or not any(self._is_model_free(part) for part in self._parts(name))

    def has_network(self, name: str) -> bool:
        """Return True if a drafter has a network; one that is not of this pool is called by its method in vLLM."""
        registry = self.registry
        return registry[name].has_network if name in registry else name not in _METHODS_WITHOUT_NETWORK

    @property
    def feeds(self) -> bool:
        """True if a model-free drafter is in use."""
        return bool(self._drafter_feeds)

    def worker_depth(self, strategy: Strategy) -> int:
        """Draft depth of the learned drafter under `strategy`; 0 when the strategy does not use it."""
        if not strategy.speculates or self.learned not in self._parts(strategy.drafter) or not self._serves():
            return 0
        return strategy.reach

    def asks_host(self, strategy: Strategy) -> bool:
        """Return True if drafts of `strategy` may be made here in the present state."""
        return strategy.speculates and bool(self._candidates(strategy.drafter))

    def show(self, strategy: Strategy, ahead: Ahead) -> None:
        """Show the drafters that `strategy` may ask tokens `ahead` of outputs, which they may look up later."""
        many = sum(len(tokens) for _, tokens in ahead) > AT_ONCE
        for name in self._candidates(strategy.drafter):
            feed = self._drafter_feeds[name]
            feed.show(ahead)
            if many and feed.drafter.drafts_behind:
                feed.drafter.catch_up(0)

    def feed(self, strategy: Strategy, turn: int, clock: Clock, lives: Collection[LiveRequest]) -> float:
        """Feed the drafters that `strategy` may ask with newly generated text, requests in order of arrival.

        Return the seconds spent on text of turns before `turn`: a drafter not fed in the last k turns has k parts to
        process. Each drafter gets one `extend` per request that has grown, and processes at most one piece of text. The
        remainder waits for later turns, and until then the drafter does without it.
        """
        late_s = 0.0
        for name in self._candidates(strategy.drafter):
            feed = self._drafter_feeds[name]
            drafter, most = feed.drafter, feed.drafter.piece_tokens + self.max_depth * len(lives)
            start_s = entry_s = clock()
            if not feed.behind:
                # Text of requests that entered or left.
                feed.behind = not drafter.catch_up(most)
                entry_s = clock()
            late = feed.behind
            feed.feed(lives)
            feed.behind = not drafter.catch_up(most)
            late_s += entry_s - start_s + (clock() - entry_s) * (1.0 if late else 1.0 - 1.0 / max(turn - feed.turn, 1))
            feed.turn = turn
        return late_s

    def behind(self, strategy: Strategy) -> bool:
        """Return True if a drafter that `strategy` may ask has text left to process later."""
        return any(self._drafter_feeds[name].behind for name in self._candidates(strategy.drafter))

    def propose(
        self, strategy: Strategy, depths: Sequence[tuple[Key, int]], learned: Sequence[list[int]]
    ) -> tuple[list[str], list[list[int]]]:
        """Return drafters and drafts of at most `depth` tokens per (key, depth); workers made the `learned` drafts."""
        if not depths:
            return [], []
        spec = self.specs[strategy.drafter]
        if not isinstance(spec, HybridSpec):
            name, drafts = self._propose(strategy.drafter, depths, learned)
            return [name] * len(drafts), drafts
        first, otherwise = spec.first, spec.otherwise
        estimate = self._accept_estimates.get(otherwise, 0.0) if otherwise != self.learned or self._serves() else 0.0
        firsts = self._drafter_feeds[first].drafter.propose_all(depths)
        names, drafts = [first] * len(firsts), [draft.tokens for draft in firsts]
        places = [n for n, (_, depth) in enumerate(depths) if not spec.choose(firsts[n], min(estimate, depth))]
        name, replacements = self._propose(otherwise, [depths[n] for n in places], [learned[n] for n in places])
        for n, draft in zip(places, replacements, strict=True):
            names[n], drafts[n] = name, draft
        return names, drafts

    def _propose(
        self, name: str, depths: Sequence[tuple[Key, int]], learned: Sequence[list[int]]
    ) -> tuple[str, list[list[int]]]:
        if self._learned_spec is not None and name == self.learned:
            if self._serves():
                return name, [draft[:depth] for (_, depth), draft in zip(depths, learned, strict=True)]
            if self._learned_spec.fallback is None:
                return name, [[] for _ in depths]
            name = self._learned_spec.fallback
        return name, [draft.tokens for draft in self._drafter_feeds[name].drafter.propose_all(depths)]

    def observe(self, name: str, verified: Sequence[tuple[Key, int, int]]) -> None:
        """Record verified drafts of `name`: (key, number of drafted tokens, number of accepted tokens) each."""
        if not verified:
            return
        estimate = self._accept_estimates.get(name, float(verified[0][2]))
        for _, _, num_accepted in verified:
            estimate += _ESTIMATE_WEIGHT * (num_accepted - estimate)
        self._accept_estimates[name] = estimate
        if name == self.learned:
            for _, num_drafted, num_accepted in verified:
                self._counts[name].add(num_drafted, num_accepted)
                self.canary.observe(num_drafted, num_accepted)
            return
        outcomes = Counter([draft[1:] for draft in verified])
        for (num_drafted, num_accepted), times in outcomes.items():
            self._counts[name].add(num_drafted, num_accepted, times)
        if name in self._drafter_feeds:
            self._drafter_feeds[name].drafter.observe_all(verified)

    def begin(self, rl_step: int) -> None:
        """Begin a rollout of `rl_step`. A repeated RL step, or an evaluation's -1, ages no drafter."""
        for feed in self._drafter_feeds.values():
            feed.drafter.begin(rl_step)
            feed.turn = -math.inf
        later, self._rl_step = rl_step > self._rl_step, max(rl_step, self._rl_step)
        if later and self.learned is not None:
            # The first rollout under new weights uses them at age 0.
            self._weights = replace(self._weights, age=0 if self._fresh else self._weights.age + 1)
            self._fresh = False

    def open(self, live: LiveRequest) -> None:
        """Add a request with its prompt."""
        for feed in self._drafter_feeds.values():
            feed.open(live)

    def close(self, live: LiveRequest) -> None:
        """Remove a request, its output complete."""
        for feed in self._drafter_feeds.values():
            feed.close(live)

    def remember(self, responses: Iterable[ResponseTokens]) -> None:
        """Add whole responses that the drafters in use did not see grow: (key, prompt, response) each."""
        for key, prompt, response in responses:
            for feed in self._drafter_feeds.values():
                feed.drafter.remember(key, prompt, response)

    def recall(self, responses: Sequence[ResponseTokens]) -> None:
        """Replace the history of the drafters in use by these responses; nothing may be running."""
        for feed in self._drafter_feeds.values():
            feed.drafter.recall(responses)

    def forget(self) -> None:
        """Clear the history and the acceptance estimate of every model-free drafter."""
        for drafter in self._model_free.values():
            drafter.forget()
        self._accept_estimates = {}
        self._counts.clear()

    @property
    def memory_bytes(self) -> int:
        """Bytes of the history of the drafters in use, by their own estimate; walks all of it."""
        return sum(getattr(feed.drafter, "memory_bytes", 0) for feed in self._drafter_feeds.values())

    def state_dict(self, history: bool = True) -> Json:
        """Return the history and acceptance estimates of the drafters in use, as of between rollouts.

        Without `history` the remembered responses are left out: the caller recalls them after loading.
        """
        return {
            "drafters": {name: feed.drafter.state_dict() for name, feed in self._drafter_feeds.items() if history},
            "lately": dict(self._accept_estimates),
            "canary": self.canary.state_dict(),
            "updates": self._weights.updates,
            "age": self._weights.age,
            "fresh": self._fresh,
            "rl_step": self._rl_step,
            "counts": {name: counts.state_dict() for name, counts in self._counts.items()},
        }

    def load_state_dict(self, state: Json) -> None:
        """Restore the result of `state_dict`, for the same drafters in use.

        The learned drafter's acceptance is restored with its weights: now, or when those weights are swapped in next.
        """
        for name, feed in self._drafter_feeds.items():
            feed.drafter.load_state_dict(state["drafters"].get(name, {}))
        self._accept_estimates = dict(state["lately"])
        # Acceptance of some weights is no evidence about others; the weights it belongs to may still arrive.
        self._awaited_state = None
        if state["updates"] == self._weights.updates:
            self._recall(state)
        else:
            self._awaited_state = state

    def _recall(self, state: Json) -> None:
        """Restore the record of the weights that serve."""
        self.canary.load_state_dict(state["canary"])
        self._fresh, self._rl_step = state["fresh"], state["rl_step"]
        if self.learned is not None:
            self._weights = replace(self._weights, age=state["age"])
        self._counts.clear()
        for name, counts in state["counts"].items():
            self._counts[name] = DraftCounts(counts)

    def guard(self, config: CanaryConfig) -> None:
        """Monitor the learned drafter by `config` from now on; earlier predictions and observations are dropped."""
        self.canary = Canary(config)

    def updated(self, predicted: Sequence[float] = (), updates: int | None = None) -> None:
        """Note new weights of the learned drafter; training measured acceptance rates `predicted` by position.

        The weights are the result of `updates` optimizer updates, by default one more than the last.
        """
        assert self.learned is not None
        check_chances(predicted)
        updates = self._weights.updates + 1 if updates is None else updates
        self._weights = DrafterState(updates=updates)
        self._fresh = True
        self._accept_estimates.pop(self.learned, None)
        self._counts.clear()
        self.canary.expect(predicted, f"weights of {counted(updates, 'update')} were swapped in{self._when()}")
        state, self._awaited_state = self._awaited_state, None
        if state is not None and state["updates"] == updates:
            self._recall(state)

    def target_updated(self, version: str) -> None:
        """Note new weights of the target model."""
        self.canary.reset(f"the sync of weights {version}{self._when()}", target_moved=True)

    def note_wake(self) -> None:
        """Note that the engine released its memory and has it back."""
        self.canary.reset(f"the engine woke{self._when()}")

    @property
    def complaint(self) -> str:
        """Why the run must stop, in a sentence; empty where it continues."""
        verdict = self.canary.collapsed
        return verdict.sentence if verdict is not None and self.canary.config.on_collapse == "stop" else ""

    def report(self) -> DrafterReport:
        """Return the state of the drafters."""
        name = self.learned or ""
        positions = {drafter: counts.positions for drafter, counts in self._counts.items()}
        return DrafterReport(
            drafter=name,
            age=self._weights.age,
            updates=self._weights.updates,
            trusted=self.canary.trusted,
            serves=self._serves(),
            predicted=self.canary.predicted,
            measured=positions.get(name, DraftPositions()).chance,
            positions=positions,
            verdicts=tuple(self.canary.verdicts),
        )

    def __getitem__(self, name: str) -> DrafterState:
        if name not in self.specs:
            raise KeyError(name)
        return self._weights if self.learned in self._parts(name) else DrafterState()

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)

    def _parts(self, name: str) -> tuple[str, ...]:
        """Return the drafters that a strategy naming `name` may use."""
        spec = self.specs[name]
        if isinstance(spec, HybridSpec):
            return (*self._parts(spec.first), *self._parts(spec.otherwise))
        if isinstance(spec, LearnedSpec) and spec.fallback is not None:
            return name, spec.fallback
        return (name,)

    def _candidates(self, name: str) -> tuple[str, ...]:
        """Return the model-free drafters that a strategy naming `name` may ask in the present state."""
        spec = self.specs[name]
        if isinstance(spec, HybridSpec):
            return tuple(dict.fromkeys((*self._candidates(spec.first), *self._candidates(spec.otherwise))))
        if isinstance(spec, LearnedSpec):
            return () if spec.fallback is None or self._serves() else (spec.fallback,)
        return (name,)

    def _is_model_free(self, name: str) -> bool:
        return not isinstance(self.specs[name], LearnedSpec | HybridSpec)

    def _serves(self) -> bool:
        """Return True if the learned drafter is there, fresh enough and trusted."""
        if self._learned_spec is None or not self.canary.trusted:
            return False
        trained, max_age = self._learned_spec.trained, self._learned_spec.max_age
        return (trained or self._weights.updates > 0) and (max_age is None or self._weights.age <= max_age)

    def _when(self) -> str:
        return f" at RL step {self._rl_step}" if self._rl_step >= 0 else ""

    def _drafter(self, name: str) -> Drafter:
        drafter = self._model_free.get(name)
        if drafter is None:
            spec = self.specs[name]
            assert not isinstance(spec, LearnedSpec | HybridSpec)
            drafter = self._model_free[name] = spec if isinstance(spec, Drafter) else spec.make()
        return drafter
