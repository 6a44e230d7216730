"""The regimes of lengths have what their published sources say."""

import numpy as np
import pandas as pd

from tltlab.lengths.generate import generate
from tltlab.lengths.model import REGIMES


def test_the_long_tail_regime_matches_its_source():
    law = REGIMES["long-tail"]
    tokens = generate(law, num_rl_steps=30, prompts_per_step=64, group_size=8, seed=5).outcomes
    longest, after = np.array([np.sort(step)[[-1, -33]] for _, step in tokens.groupby("rl_step")["response_tokens"]]).T
    # The share of the makespan in which at most 32 requests run, where each iteration takes as long.
    assert 0.74 <= 1 - after.sum() / longest.sum() <= 0.85
    assert longest.mean() > 0.9 * law.max_response_tokens
    assert np.percentile(tokens["response_tokens"], 75) < law.max_response_tokens / 8


def test_the_production_regime_is_the_measured_distribution(shared_data):
    pdf = pd.read_csv(shared_data / "deepseek_r1_output_tokens_pdf.csv.gz")
    share = pdf["prob"].cumsum() / pdf["prob"].sum()
    for level, tokens in REGIMES["production"].quantiles:
        assert tokens == pdf["output_tokens"][np.searchsorted(share, level)]
