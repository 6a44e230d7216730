"""Summaries of lengths, of traces and of the regimes that were fitted to published ones."""

import numpy as np
import pandas as pd
import pytest

from tltlab.lengths.fit import outlook, summaries_of
from tltlab.lengths.generate import generate
from tltlab.lengths.model import REGIMES


def measured(law, *, prompts=64, group=8):
    return outlook(generate(law, num_rl_steps=30, prompts_per_step=prompts, group_size=group, seed=5)).summaries


def test_tail_is_what_at_most_32_requests_leave():
    # 40 responses of 1 to 40 tokens: when 32 are left 8 tokens have passed; in RL step 1 all take twice as long.
    steps = [pd.DataFrame({"rl_step": t, "response_tokens": np.arange(1, 41) * (t + 1)}) for t in (0, 1)]
    outcomes = pd.concat(steps).assign(prompt_id="p", finish_reason="stop")
    found = summaries_of(outcomes, cap=None, prompt_share=None)
    assert found["tail"] == pytest.approx(1 - (8 + 16) / (40 + 80))
    assert [found.get(name) for name in ("max", "responses", "cut", "cap")] == [60.0, 40.0, 0.0, None]
    few = summaries_of(outcomes[outcomes["response_tokens"] > 60], cap=None, prompt_share=None)
    assert "tail" not in few


def test_the_long_tail_regime_matches_its_source():
    law = REGIMES["long-tail"]
    found = measured(law)
    assert 0.74 <= found["tail"] <= 0.85
    assert found["max"] > 0.9 * found["cap"]
    assert found["p75"] < found["cap"] / 8


def test_the_production_regime_is_the_measured_distribution(shared_data):
    pdf = pd.read_csv(shared_data / "deepseek_r1_output_tokens_pdf.csv.gz")
    share = pdf["prob"].cumsum() / pdf["prob"].sum()
    for level, tokens in REGIMES["production"].quantiles:
        assert tokens == pdf["output_tokens"][np.searchsorted(share, level)]
