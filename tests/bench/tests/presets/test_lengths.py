"""Coverage of what is predicted of another RL step, on recorded rollouts."""

import numpy as np
import pandas as pd

from bench.presets.lengths import rows


def test_intervals_hold_nine_in_ten_other_steps(shared_data):
    found = pd.DataFrame(rows(shared_data))
    assert np.allclose(found["inside"] + found["below"] + found["above"], 1)
    for what in ("longest", "makespan"):
        drawn = found[(found["what"] == what) & (found["seen"] == "random")]
        assert 0.85 <= np.average(drawn["inside"], weights=drawn["n_points"]) <= 0.95
