"""The graph on which message functions are looked at."""

import pytest
from looking import GRAPH, OWNERS

from shardpass.testing import run, shard_in_memory


@pytest.fixture(scope="module")
def graph():
    return run(lambda comm: shard_in_memory(GRAPH, OWNERS, comm), 3)[0]
