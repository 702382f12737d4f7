"""Check that agent tests begin and end without open resources."""

import pytest

from tests.agent.resources import Counter


@pytest.fixture(autouse=True)
def no_resource_stays_open():
    Counter.open_instances.clear()
    Counter.made.clear()
    yield
    assert not Counter.open_instances
