"""An own acceptance model whose requests differ by level, and drift with the tokens that they generated."""

import hashlib
from statistics import NormalDist

import numpy as np

from tltlab.acceptance.base import AcceptanceModel, known_drafter, only_chains
from tltlab.state import Key


def normals(seed, keys):
    """A standard normal per request, a hash of (seed, key) and of nothing else."""
    quantile = NormalDist().inv_cdf
    digests = (hashlib.blake2b(repr(("level", seed, key)).encode(), digest_size=8).digest() for key in keys)
    return np.array([quantile(((int.from_bytes(d, "little") >> 11) + 0.5) * 2.0**-53) for d in digests], np.float64)


class CurveAcceptance(AcceptanceModel):
    """Token i of a draft is kept, given those before it, with the chance

        sigmoid(keep_logits[i - 1] + level + drift * ln(1 + generated / 64)),

    the level normal with standard deviation `spread`, or one of `known` by (rl_step, prompt_id, sample, turn). Beyond
    the last of `keep_logits` the last holds.
    """

    varies_by = "request"
    names: tuple[str, ...] = ("ngram",)
    keep_logits: tuple[float, ...]
    drift: float = 0.0
    spread: float = 0.0
    known: tuple[tuple[Key, float], ...] = ()

    @property
    def drafters(self):
        return self.names

    def levels(self, drafter, keys, seed):
        known, drawn = dict(self.known), self.spread * normals(seed, keys)
        return np.array([known.get(key, level) for key, level in zip(keys, drawn.tolist(), strict=True)], np.float64)

    def survival(self, strategy, requests):
        only_chains(strategy, "curves")
        known_drafter(strategy, self.names, "the acceptance model")
        at = np.minimum(np.arange(strategy.reach), len(self.keep_logits) - 1)
        levels = requests.levels + self.drift * np.log1p(requests.generated_tokens / 64.0)
        logits = np.asarray(self.keep_logits)[at] + levels[:, None]
        return np.asarray(np.cumprod(1.0 / (1.0 + np.exp(-logits)), axis=1), np.float64)
