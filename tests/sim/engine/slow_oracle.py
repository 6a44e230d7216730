"""The simulation's slow, independent oracle: every iteration and every request one at a time, no closed form, no SimPy.

It exists to check the engine: same semantics, written as directly as the text of the command line has them.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tltlab.policies.selector import chosen
from tltlab.sim.engine.regime import Regime
from tltlab.state import NO_CHOICE, StepOutcome, StepState
from tltlab.strategy import NO_SPECULATION

Gain = Callable[[int, float, int, Regime], float]
"""Tokens that a request gets: (request, tokens generated, its speculative iterations so far, regime)."""


@dataclass(slots=True)
class _Request:
    request: int
    prompt_tokens: int
    length: int
    generated: float = 0.0
    num_speculative: int = 0
    to_prefill: float = 0.0
    group: str = ""
    shared: int = 0

    @property
    def context_tokens(self):
        return self.prompt_tokens + self.generated


def expected(request, generated, num_speculative, regime):
    """The gain of fluid mode."""
    return regime.tokens


class _Asked:
    """A selector, asked before an iteration: what it chooses holds from the next one on, and plain decoding until then.

    A memoryless one's choice holds at once, but `ahead` and in the first iteration. So does one for a block of
    iterations, which ends early where something happens; its outcome comes after the next block's choice, and that of
    the last block at the end.
    """

    def __init__(self, selector, block, ahead):
        self.selector, self.block = selector, block
        self.each_time = selector.memoryless and not ahead
        self.in_force = NO_CHOICE
        self.after_first = False
        self.ran = []
        self.held = None

    def ask(self, state, something_happened):
        """The choice that this iteration verifies, and the latest one."""
        verified, is_first = self.in_force, self.in_force is NO_CHOICE
        ahead = (self.block == 1 and not self.each_time) or is_first
        if len(self.ran) % self.block == 0 or something_happened or self.each_time or self.after_first:
            self.ran = []
            self.in_force = chosen(self.selector, state)
            self.tell_held()
        self.after_first = is_first
        return verified if ahead else self.in_force, self.in_force

    def tell(self, verified, seconds, drafted, accepted, had_prefill):
        """An iteration is over: seconds of it and of prefill, tokens drafted for each request, and what each kept."""
        self.ran.append((seconds, accepted, had_prefill))
        num, speculates = len(self.ran), verified.strategy.speculates
        kept = tuple(sum(of_request) / num for of_request in zip(*(kept for _, kept, _ in self.ran), strict=True))
        outcome = StepOutcome(
            elapsed_s=sum(seconds for seconds, _, _ in self.ran) / num,
            batch=len(accepted),
            drafted=(drafted,) * len(accepted) * speculates,
            accepted=kept * speculates,
            had_prefill=any(had_prefill for _, _, had_prefill in self.ran),
        )
        self.held = (verified, outcome) if verified.learns else None
        if self.block == 1:
            self.tell_held()

    def tell_held(self):
        if self.held is not None:
            self.selector.observe(*self.held)
        self.held = None


def finish_times(
    requests,
    queue,
    selector,
    regimes,
    costs,
    *,
    gain=expected,
    decision_block=1,
    ahead=None,
):
    """Finish time of each request of one worker, whose selector is asked and told as `_Asked` says."""
    waiting = [
        _Request(r, requests.prompt_tokens[r], requests.response_tokens[r], group=requests.keys[r][1]) for r in queue
    ]
    if requests.prefix_caching:
        for r in waiting:
            alike = [n for n, key in zip(requests.prompt_tokens, requests.keys, strict=True) if key[1] == r.group]
            r.shared = max(0, min(alike) - 1) // 16 * 16 if len(alike) > 1 else 0
    cached = set()
    kept = {}
    prefilling = []
    running = []
    finished = {}
    now = 0.0
    began = ready = False
    policy = _Asked(selector, decision_block, ahead)
    something_happened = True
    while waiting or prefilling or running:
        preempted, begin_s, prefilled = False, now, 0.0
        while not _fits([*running, *prefilling], costs) and running and len(running) + len(prefilling) > 1:
            newest = prefilling.pop() if prefilling else running.pop()
            waiting.insert(0, newest)
            if requests.prefix_caching:
                kept[newest.request] = newest.context_tokens - (newest.to_prefill or 1.0)
            preempted = something_happened = True
        while waiting and not preempted and _admissible([*running, *prefilling, waiting[0]], costs):
            new = waiting.pop(0)
            reused = max(new.shared if new.group in cached else 0, kept.pop(new.request, 0.0))
            new.to_prefill = new.context_tokens - reused
            cached.add(new.group)
            prefilling.append(new)
            something_happened = True
        if not preempted:
            _evict(kept, [*running, *prefilling], costs)
        if not running or costs.max_num_batched_tokens is None:
            budget = costs.max_num_batched_tokens or float("inf")
            while prefilling and (not running or costs.max_num_batched_tokens is None):
                prefilled += (tokens := _prefill(prefilling, running, budget))
                now += costs.prefill_s(tokens)
        state = StepState(
            rl_step=requests.rl_step,
            batch=len(running),
            waiting=len(waiting) + len(prefilling),
            context_tokens=sum(r.context_tokens for r in running),
            strategy=policy.in_force.strategy,
        )
        verified, latest = policy.ask(state, something_happened)
        strategy, something_happened = verified.strategy, False
        if began and latest.strategy.speculates and not ready:
            now += costs.switch_s
            begin_s += costs.switch_s
        began, ready = True, ready or latest.strategy.speculates
        listed = verified is not NO_CHOICE or NO_SPECULATION in regimes.strategies
        loaded = listed and (ready or not costs.switch_s)
        regime = regimes.at(strategy, len(running), loaded=loaded)
        now += regime.cost.seconds(len(running), sum(r.context_tokens for r in running))
        beside = []
        if prefilling:
            chunk = (costs.max_num_batched_tokens or 0) - len(running) * regime.cost.tokens_to_verify
            tokens = _prefill(prefilling, beside, max(0.0, chunk))
            prefilled += tokens
            now += regime.cost.added_s(len(running), tokens, costs.prefill_s(tokens))
        gains = [gain(r.request, r.generated, r.num_speculative, regime) for r in running]
        for r, gained in zip(running, gains, strict=True):
            r.generated += gained
            r.num_speculative += strategy.speculates
        _evict(kept, [*running, *beside, *prefilling], costs)
        for r in running:
            if r.generated >= r.length - 1e-6:
                finished[r.request] = now
                something_happened = True
        policy.tell(verified, now - begin_s, regime.num_drafted, [gained - 1.0 for gained in gains], prefilled > 0)
        running = [r for r in running if r.request not in finished] + beside
    policy.tell_held()
    return finished


def _prefill(prefilling, done, tokens):
    """Give tokens to the prompts in order; those that are done move over. Returns the tokens that were used."""
    spent = 0.0
    while prefilling:
        used = min(prefilling[0].to_prefill, tokens - spent)
        prefilling[0].to_prefill -= used
        spent += used
        if prefilling[0].to_prefill > 1e-6:
            break
        done.append(prefilling.pop(0))
    return spent


def _evict(kept, held, costs):
    """Token by token from the end of what was kept longest, until the rest fits."""
    if costs.kv_capacity_tokens is None:
        return
    room = max(0.0, costs.kv_capacity_tokens - _needed(held))
    for request in list(kept):
        if (excess := sum(kept.values()) - room) > 0:
            kept[request] -= min(kept[request], excess)


def _needed(held):
    """Tokens of the contexts and one more each, what a group shares once."""
    needed = sum(r.context_tokens + 1 for r in held)
    for group in {r.group for r in held}:
        members = [r for r in held if r.group == group]
        needed -= (len(members) - 1) * members[0].shared
    return needed


def _fits(held, costs):
    """Whether the contexts and one more token each fit; the rounding of expected tokens is forgiven."""
    return costs.kv_capacity_tokens is None or _needed(held) <= costs.kv_capacity_tokens + 1e-6


def _admissible(held, costs):
    if costs.max_num_seqs is not None and len(held) > costs.max_num_seqs:
        return False
    return len(held) == 1 or _fits(held, costs)
