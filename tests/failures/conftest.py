"""Stores shared by all tests of this folder; every test must leave them as they are."""

import pytest
import torch

import shardpass as sp

from .training import PARTS, random_graph


@pytest.fixture(scope="session")
def store(tmp_path_factory):
    """The random graph with float32 features."""
    path = tmp_path_factory.mktemp("failures") / "store"
    sp.partition(random_graph(), path, PARTS, method="random")
    return path


@pytest.fixture(scope="session")
def exact_store(tmp_path_factory):
    """The random graph with float64 features."""
    path = tmp_path_factory.mktemp("failures") / "exact"
    sp.partition(random_graph(torch.float64), path, PARTS, method="random")
    return path
