"""The fingerprint of a model: the same text for the same numbers, another for whatever changes a result."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from shardpass.backends import LocalCommunicator
from shardpass.core.inference.fingerprint import argument_lines, model_lines
from shardpass.core.ranks import Ranks
from shardpass.testing import awkward_graph, shard_in_memory


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.norm, self.slope, self.order = nn.Linear(3, 2), nn.BatchNorm1d(2), 0.1, ["a", "b"]


def lines(change=None):
    torch.manual_seed(0)
    model = Net()
    if change is not None:
        with torch.no_grad():
            change(model)
    return list(model_lines(model))


CHANGES = {
    "a weight": lambda m: m.lin.weight[0, 0].add_(1e-6),
    "a buffer": lambda m: m.norm.running_mean.add_(1),
    "a number": lambda m: setattr(m, "slope", 0.2),
    "a list": lambda m: m.order.reverse(),
    "another layer": lambda m: setattr(m, "lin", nn.Linear(3, 2, bias=False)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_whatever_changes_a_result_changes_the_text(name):
    assert lines() == lines() != lines(CHANGES[name])


def test_what_changes_no_result_does_not():
    assert lines() == lines(lambda m: m.lin.weight.requires_grad_(False))


def test_arguments_are_compared_by_content_and_graphs_by_being_the_graph():
    whole = awkward_graph()
    comm = Ranks(LocalCommunicator())
    graph = shard_in_memory(whole, torch.zeros(whole.num_nodes, dtype=torch.int64), comm)
    x = torch.arange(6.0)
    first, again = (list(argument_lines((x.clone(), graph, 3), graph)) for _ in range(2))
    assert first == again and first[1] == "argument 1 of the graph"
    assert list(argument_lines((x + 1, graph, 3), graph)) != first
    unknown = [list(argument_lines((object(),), graph)) for _ in range(2)]
    assert unknown[0] != unknown[1], "what cannot be compared is never the same"


CODE = """
import torch
from shardpass.core.inference.fingerprint import model_lines
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
model.names = {"a": 1, "b": "text"}
lines = list(model_lines(model))
"""


@pytest.mark.processes
def test_it_reads_the_same_in_every_process():
    here = {}
    exec(CODE, here)
    command = [sys.executable, "-c", CODE + "print(lines)"]
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=480, check=True)
    assert done.stdout.strip() == str(here["lines"])
