"""A window counts at its owner, in full, and nowhere else."""

import sys

import pytest

from shardpass.backends import LocalCommunicator
from shardpass.cli.memory import windows_of_others
from shardpass.core.exchange.windows import take_window
from shardpass.core.ranks import Ranks

SIZE, PAGES = 8_000_000, 100_000


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")
def test_windows_count_at_their_owner():
    comm = Ranks(LocalCommunicator())
    assert windows_of_others(comm) == 0
    comm.inner.shares_memory = True
    window = take_window(comm, [SIZE], 1, "test")
    assert abs(windows_of_others(comm) + SIZE) < PAGES, "reserved, and not yet in the resident set"
    window.memory[0].fill_(1)
    assert abs(windows_of_others(comm)) < PAGES
    other = LocalCommunicator().share(SIZE)
    other[0].fill_(1)
    assert abs(windows_of_others(comm) - SIZE) < PAGES
