"""An own acceptance model whose requests drift with the tokens that they generated."""

import numpy as np

from tltlab.acceptance.base import AcceptanceModel, known_drafter, only_chains


class CurveAcceptance(AcceptanceModel):
    """Token i of a draft is kept, given those before it, with the chance

        sigmoid(keep_logits[i - 1] + drift * ln(1 + generated / 64)).

    Beyond the last of `keep_logits` the last holds.
    """

    varies_by = "request"
    names: tuple[str, ...] = ("ngram",)
    keep_logits: tuple[float, ...]
    drift: float = 0.0

    @property
    def drafters(self):
        return self.names

    def survival(self, strategy, requests):
        only_chains(strategy, "curves")
        known_drafter(strategy, self.names, "the acceptance model")
        at = np.minimum(np.arange(strategy.reach), len(self.keep_logits) - 1)
        drift = self.drift * np.log1p(requests.generated_tokens / 64.0)
        return np.asarray(np.cumprod(1.0 / (1.0 + np.exp(-np.asarray(self.keep_logits)[at] - drift[:, None])), axis=1))
