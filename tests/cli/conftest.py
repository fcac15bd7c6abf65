"""A small store that all tests of the command line share."""

from pathlib import Path

import pytest

from shardpass.cli.graphs import powerlaw
from shardpass.data import partition


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """600 nodes in 4 random parts (every rank needs rows of every other), with features, labels and masks."""
    path = tmp_path_factory.mktemp("cli") / "parts"
    partition(powerlaw(600, 8, channels=12, classes=4), path, 4, "random")
    return path
