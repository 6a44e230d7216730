"""Rows of acceptance.parquet, for tests of what reads them."""

import pandas as pd

from tltlab.traces.schema import KEY


def counterfactuals(rows):
    """Rows of a response's key, then drafter, age, updates, max_depth and accepted lengths."""
    names = [*KEY, "drafter", "drafter_age", "drafter_updates", "max_depth", "accept_if_drafted"]
    return pd.DataFrame(list(rows), columns=names)
