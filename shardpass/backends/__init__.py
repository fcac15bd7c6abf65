"""Transports: what carries tensors between ranks, as threads, over gloo or over MPI.

A backend knows tensors and ranks, never nodes or edges, and keeps nothing of the engine. `Communicator` is what the
engine needs of one. `connect` and `spawn` choose and start a backend, `BaseCommunicator` is what a new one derives
from, and `RecordingCommunicator` shows what goes over the wire.
"""

from shardpass.backends.base import BaseCommunicator
from shardpass.backends.communicator import Communicator, Handle, ReduceOp
from shardpass.backends.connect import TIMEOUT_VARIABLE, connect
from shardpass.backends.delegating import DelegatingCommunicator
from shardpass.backends.environment import Launch, detect
from shardpass.backends.failure import Failure, TransportLostError, TransportTimeoutError, first_failure, reason_of
from shardpass.backends.hosts import CHEAP_TENSORS, addresses_of, huge_pages, lacks_cheap_tensors, reuse_memory
from shardpass.backends.local import LocalCommunicator
from shardpass.backends.primitives import DEFAULT_TIMEOUT, Pending
from shardpass.backends.recording import Message, RecordingCommunicator
from shardpass.backends.spawn import spawn

__all__ = [
    "CHEAP_TENSORS",
    "DEFAULT_TIMEOUT",
    "TIMEOUT_VARIABLE",
    "BaseCommunicator",
    "Communicator",
    "DelegatingCommunicator",
    "Failure",
    "Handle",
    "Launch",
    "LocalCommunicator",
    "Message",
    "Pending",
    "RecordingCommunicator",
    "ReduceOp",
    "TransportLostError",
    "TransportTimeoutError",
    "addresses_of",
    "connect",
    "detect",
    "first_failure",
    "huge_pages",
    "lacks_cheap_tensors",
    "reason_of",
    "reuse_memory",
    "spawn",
]
