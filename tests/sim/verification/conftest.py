"""What the tests of `verify` share."""

import pytest

from tltlab.sim.verification import rollouts


@pytest.fixture(scope="module", autouse=True)
def few_forecasts():
    """An interval of three simulations is one as well, and they are most of what a prediction takes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollouts, "FORECASTS", 3)
        yield
