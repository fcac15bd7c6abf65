"""Shared by all tests: one thread per rank, so that runs on few cores stay quick."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)
