"""Ranks of an MPI job, under a real mpirun."""

import pytest

from .launchers import launch, needs_mpi

pytestmark = [pytest.mark.mpi, pytest.mark.processes, needs_mpi]


@pytest.mark.parametrize("ranks", [2, *(pytest.param(ranks, marks=pytest.mark.long) for ranks in (1, 4))])
def test_contract_and_a_silent_end(ranks):
    """Of two ranks with receives under way too: Open MPI still writes into their buffers while it finalizes."""
    ended = launch("mpirun", ranks, "contract over mpi")
    assert ended.code == 0, ended.text
    for rank in range(ranks):
        assert f"rank {rank} of {ranks} with MpiCommunicator" in ended.text
        assert f"rank {rank} is done" in ended.text
    if ranks == 2:
        assert ended.text.count("left alone") == 2, ended.text
        assert len([line for line in ended.text.splitlines() if line.strip()]) == 6, ended.text
