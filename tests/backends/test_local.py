"""The single-rank communicator."""

import pytest

from shardpass.backends import Communicator, LocalCommunicator, RecordingCommunicator
from shardpass.errors import PeerFailure

from . import contract


def test_contract():
    assert len(contract.run_all(LocalCommunicator())) > 12


def test_contract_while_recording():
    assert len(contract.run_all(RecordingCommunicator(LocalCommunicator()))) > 12


def test_it_is_a_communicator():
    assert isinstance(LocalCommunicator(), Communicator)
    assert isinstance(RecordingCommunicator(LocalCommunicator()), Communicator)


def test_abort():
    with pytest.raises(PeerFailure, match="rank 0 failed first: enough"):
        LocalCommunicator().abort("enough")
