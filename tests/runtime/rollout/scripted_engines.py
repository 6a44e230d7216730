"""Engines that say what a script says, one token per request and iteration, for tests of what is built around them."""

import json
from collections import deque

from tltlab.runtime.data.order import DataOrder
from tltlab.runtime.data.prompts import Prompt
from tltlab.runtime.engine.generation import GenerationRequest, GenerationResponse, Rollout
from tltlab.runtime.recipe.recipe import Recipe
from tltlab.runtime.rollout.collected import RolloutTools
from tltlab.runtime.rollout.rewards import Scored
from tltlab.runtime.rollout.worker import enough
from tltlab.runtime.run.data import rollouts_of

END = 2


def prompts(num):
    return [Prompt(prompt_id=f"p{n}", text=f"text {n}", answer="", token_ids=[1, 10 + n, 5]) for n in range(num)]


def recipe(rollout, train=None, model="none", reward="a:b"):
    return Recipe.model_validate(
        {"model": str(model), "reward": reward, "data": {"train": "none"}, "rollout": rollout, "train": train or {}}
    )


def ways(rollout, num, train=None, model="none", reward="a:b"):
    """How a recipe rolls out on `num` prompts."""
    return rollouts_of(recipe(rollout, train, model, reward), prompts(num), DataOrder(num, seed=0))


def resumed(first, second, folder):
    """The second in the state that a checkpoint keeps of the first."""
    state, order = json.loads(json.dumps([first.state_dict(folder), first.order.state_dict()]))
    second.load_state_dict(state, folder)
    second.order.load_state_dict(order)
    return second


def response(key, token_ids, **more):
    """One that has ended by itself after a second, each of its tokens certain, unless `more` has it."""
    ended = {"finish_reason": "stop", "t_first_token": 0.0, "t_finish": 1.0, "logprobs": [0.0] * len(token_ids)}
    return GenerationResponse(key=key, token_ids=token_ids, **ended | more)


def rolled(responses, duration_s=0.0, **more):
    """A rollout without iterations, unless `more` has them."""
    rest = {"iterations": [], "decisions": [], "recorder_s": 0.0, "policy_s": 0.0} | more
    return Rollout(responses=responses, duration_s=duration_s, **rest)


def tools_of(generate, rl_step, share=lambda requests: [requests], **more):
    """Tools that pay nothing for a response and score none, unless `more` does."""
    rest = {"rewards": paid(lambda _: 0.0), "score": _no_score, "policy_version": rl_step}
    return RolloutTools(generate=generate, share=share, rl_step=rl_step, **rest | more)


def paid(reward):
    """Rewards of trajectories by a function of one: the reward, or it and the values of its terms."""

    def rewards(trajectories):
        found = map(reward, trajectories)
        return [Scored(*each) if isinstance(each, tuple) else Scored(each) for each in found]

    return rewards


def _no_score(pairs):
    raise AssertionError("nothing is to be scored")


class ScriptedEngines:
    """Workers whose response to (prompt, sample) has `length(prompt_id, sample)` tokens of which the last is END.

    Token i is 100 + i, with log-prob -(version + i / 100). An engine runs `concurrency` requests at a time, in order,
    an iteration a second; `asked` keeps every share, `running` how many ran in each iteration.
    """

    def __init__(self, num_workers, length, concurrency=1000):
        self.num_workers = num_workers
        self.length = length
        self.concurrency = concurrency
        self.version = 0
        self.asked = []
        self.running = [[] for _ in range(num_workers)]

    def share(self, requests):
        cuts = [-(-w * len(requests) // self.num_workers) for w in range(self.num_workers + 1)]
        return [requests[cuts[w] : cuts[w + 1]] for w in range(self.num_workers)]

    def generate(self, shares, number, quotas):
        self.asked.append(shares)
        return [self._run(n, share, None if quotas is None else quotas[n]) for n, share in enumerate(shares)]

    def arrivals(self, share, iteration):
        """Those of a share that an engine may begin from this iteration on."""
        return [] if iteration else share

    def _run(self, worker, share, quota):
        made = {}
        ended = {}
        waiting, running = deque[GenerationRequest](), deque[GenerationRequest]()
        iterations = []
        stop = enough(share, quota) if quota is not None else lambda keys: False
        while not stop(list(ended)):
            new = self.arrivals(share, len(iterations))
            made |= {request.key: [] for request in new}
            waiting.extend(new)
            if not waiting and not running:
                break
            while waiting and len(running) < self.concurrency:
                running.append(waiting.popleft())
            self.running[worker].append(len(running))
            clock = float(len(iterations))
            row = {"rl_step": share[0].key[0], "worker": worker, "iteration": len(iterations), "t_start": clock}
            iterations.append(row)
            for request in list(running):
                place = len(request.prompt_token_ids) + len(made[request.key]) - 3
                last = place + 1 == self.length(request.key[1], request.key[2])
                made[request.key].append(END if last else 100 + place)
                if last or len(made[request.key]) == request.max_response_tokens:
                    ended[request.key] = ("stop" if last else "length", clock + 1)
                    running.remove(request)
            self.after_iteration(share, len(iterations), {key: len(made[key]) for key in made if key not in ended})
        responses = []
        for request in (request for request in share if request.key in made):
            first = len(request.prompt_token_ids) - 3
            reason, finish = ended.get(request.key, ("abort", float(len(iterations))))
            said = {"finish_reason": reason, "t_first_token": 0.5, "t_finish": finish}
            said["logprobs"] = [-(self.version + (first + i) / 100) for i in range(len(made[request.key]))]
            responses.append(response(request.key, made[request.key], **said))
        decisions = [{"iteration": row["iteration"]} for row in iterations]
        return rolled(responses, float(len(iterations)), iterations=iterations, decisions=decisions)

    def after_iteration(self, share, iterations, running):
        """So many iterations are over, and these requests have come to so many tokens."""

    def tools(self, rl_step, reward=lambda _: 0.0, **more):
        self.version = rl_step
        return tools_of(self.generate, rl_step, self.share, rewards=paid(reward), **more)
