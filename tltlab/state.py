"""State that a policy sees before an iteration, its choice, and the outcome that it receives for that choice."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .records import frozen
from .strategy import NO_SPECULATION, Strategy

Key = tuple[int, str, int, int]
"""A request's key in traces: RL step, prompt, sample, turn."""


@frozen
class RequestState:
    """One running request. `recent_acceptance` is accepted tokens per draft lately (bonus excluded), None if none."""

    key: Key
    prompt_id: str
    generated_tokens: int
    max_response_tokens: int
    recent_acceptance: float | None = None


@frozen
class DrafterState:
    """Freshness of a drafter: `age` in RL steps since its last update, and updates so far."""

    age: int = 0
    updates: int = 0


# Made anew for each decision, so neither is frozen: freezing a record triples what it takes to make one.
@dataclass(slots=True, kw_only=True)
class StepState:
    """A worker as it begins an iteration, when it asks what the *next* iteration is to verify.

    `batch` requests run and `waiting` wait on this worker; `context_tokens` is the sum over the batch of prompt and
    generated tokens; `strategy` is the one whose drafts this iteration verifies. `requests` is a lazy view in order of
    admission: reading it costs time, not reading it is free. Simulator and engines set every field, by one meaning.
    """

    rl_step: int
    batch: int
    worker: int = 0
    waiting: int = 0
    context_tokens: float = 0.0
    strategy: Strategy = NO_SPECULATION
    drafters: Mapping[str, DrafterState] = field(default_factory=dict)
    requests: Sequence[RequestState] = ()

    @property
    def remaining(self) -> int:
        """Running and waiting requests."""
        return self.batch + self.waiting


@dataclass(frozen=True, slots=True)
class Choice:
    """A strategy as a policy chose it, with all that its outcome needs to be learned from, whenever that comes.

    `propensity` is the probability with which this strategy was chosen, `bucket` the index of the range of batch sizes
    it was chosen in. A choice that does not `learn` has no use for its outcome, so none is delivered. `stays` promises
    that the next choices are this one until `batch`, `waiting` or `rl_step` changes, asked for or not. With
    `least_batch` the promise also holds as `batch` falls to that many requests.

    >>> Choice(Strategy.chain("ngram", 4), propensity=0.9).strategy.draft_depth
    4
    """

    strategy: Strategy
    propensity: float = 1.0
    bucket: int | None = None
    learns: bool = True
    stays: bool = False
    least_batch: int | None = None


NO_CHOICE = Choice(NO_SPECULATION, learns=False)
"""Plain decoding that no policy chose, as in the first iteration of a rollout."""


@dataclass(slots=True, kw_only=True)
class StepOutcome:
    """Outcome of a choice: the iteration that verified its drafts.

    `elapsed_s` seconds, of drafting and of verification; `batch` requests ran. `drafted` and `accepted` tokens per
    request of the batch, without the bonus token (expected values in the simulator's fluid mode), are empty where the
    strategy does not speculate; `had_prefill` marks an iteration that also prefilled prompts.

    >>> StepOutcome(elapsed_s=0.01, batch=2, drafted=(4, 4), accepted=(3, 1)).accept_length
    3.0
    """

    elapsed_s: float
    batch: int
    drafted: Sequence[float] = ()
    accepted: Sequence[float] = ()
    had_prefill: bool = False

    @property
    def accept_length(self) -> float:
        """Tokens per request, the bonus token included."""
        return float(sum(self.accepted)) / self.batch + 1.0


NEWEST_WEIGHT = 0.2
"""Weight of the newest draft in a request's `recent_acceptance`: about its last five drafts count."""


def recent_acceptance(previous: float | None, accepted: float, num_drafts: int = 1) -> float:
    """Return a request's recent acceptance after `num_drafts` more drafts, of each of which `accepted` were kept.

    The first draft sets it; until then `previous` is None.

    >>> recent_acceptance(None, 3.0), round(recent_acceptance(3.0, 1.0), 3), round(recent_acceptance(3.0, 1.0, 2), 3)
    (3.0, 2.6, 2.28)
    """
    return accepted if previous is None else accepted + (previous - accepted) * (1.0 - NEWEST_WEIGHT) ** num_drafts
