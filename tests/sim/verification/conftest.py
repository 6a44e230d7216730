"""What the tests of `verify` share."""

import pytest

from tltlab.sim.verification import rollouts


@pytest.fixture(autouse=True)
def few_forecasts(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interval of three simulations is one as well, and they are most of what a prediction takes."""
    monkeypatch.setattr(rollouts, "FORECASTS", 3)
