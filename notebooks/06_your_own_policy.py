# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 6. How do I put in a policy of my own?
#
# Before each decode iteration a policy chooses how many tokens to draft; afterwards it receives the outcome. Here one
# is written, checked, compared and improved, in the simulator. The same class drives real training.

# %%
from pathlib import Path

from IPython.display import display

import tltlab
from tltlab import NO_SPECULATION, Selector, Strategy
from tltlab.testing import check_selector

root = next(folder for folder in [Path.cwd(), *Path.cwd().parents] if (folder / "traces").is_dir())
trace = tltlab.read(root / "traces" / "tiny")

# %% [markdown]
# ## Minute one: a class with one method
#
# `strategies` are all that it may choose, so that engines can be built for them. `choose` is given the worker's state:
# `batch` (running requests), `waiting`, `context_tokens`, `rl_step` and more. Drafts by n-grams cost nothing to make
# and little to check while few requests run.


# %%
class Halving(Selector):
    strategies = (NO_SPECULATION, Strategy.chain("ngram", 2), Strategy.chain("ngram", 8))

    def choose(self, state):
        return self.strategies[2 if state.batch <= 2 else 1 if state.batch <= 8 else 0]


check_selector(Halving)

# %% [markdown]
# `check_selector` is the contract as a test: it raises where a choice is none of the `strategies`, or where a saved
# policy continues differently. It raised nothing, so the policy is sound.
#
# ## Minute two: what it brings
#
# The responses of a recorded run are replayed under it. A policy is a class, an instance, a name, a file or a draft in
# short.

# %%
result = tltlab.simulate(trace, Halving)
print(result)
display(result.to_frame())
print(f"{result.summary['regret']:.0%} above the least that its strategies could reach: its regret to the bound")

# %% [markdown]
# ## Minute three: against others
#
# All have common random numbers, so that small differences show. `speed_up` is beside each ratio; intervals are over
# the RL steps.

# %%
rows = tltlab.compare(trace, ["none", "ngram:4", "ngram:4@8", Halving, "beg-mab"])
display(rows)
rows.plot()

# %% [markdown]
# ## Minute four: one that learns
#
# `observe` receives the outcome of each choice: the iteration's seconds, its batch, the accepted tokens. An outcome
# comes one choice late, since an engine drafts in one iteration what the next one verifies. This policy keeps the mean
# tokens per second of each strategy by batch size, tries what it does not know, and takes the best. A selector draws
# from `rng` alone, so the same seed gives the same run.


# %%
class Greedy(Selector):
    strategies = Halving.strategies

    def __init__(self):
        self.seen = {}

    def choose(self, state):
        rates = {s: self.seen.get((state.batch, s), (0.0, 1e-9)) for s in self.strategies}
        return max(self.strategies, key=lambda s: rates[s][0] / rates[s][1] if rates[s][0] else float("inf"))

    def observe(self, choice, outcome):
        tokens, seconds = self.seen.get((outcome.batch, choice.strategy), (0.0, 0.0))
        made = outcome.batch + sum(outcome.accepted)
        self.seen[outcome.batch, choice.strategy] = tokens + made, seconds + outcome.elapsed_s

    def state_dict(self):
        return {"seen": [[batch, self.strategies.index(s), *both] for (batch, s), both in self.seen.items()]}

    def load_state_dict(self, state):
        self.seen = {(batch, self.strategies[s]): (tokens, seconds) for batch, s, tokens, seconds in state["seen"]}


check_selector(Greedy)
display(tltlab.compare(trace, ["none", Halving, Greedy, "beg-mab"]))

# %% [markdown]
# Learning has a price on few iterations: every strategy has to be tried at every batch size first. TLT's bandit groups
# batch sizes for that reason.
#
# ## Minute five: into real training
#
# Put the class into a module beside your recipe; then it is named as `mine:Halving` on every command line:
#
#     tltlab simulate traces/tiny --policy mine:Halving
#     tltlab train recipe.toml rollout.policy=mine:Halving
#
# `tltlab new policy halving` writes such a module with its test. What is wrong is one sentence:


# %%
class Misspelt(Halving):
    def choose(self, state):
        return self.strategies[state.batsh <= 8]


try:
    tltlab.simulate(trace, Misspelt)
except tltlab.ConfigError as error:
    print(error)
