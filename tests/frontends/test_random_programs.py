"""Random programs around layers: each is exact to 1e-9, or refused at the line of the statement that mixes rows."""

from __future__ import annotations

import random
import re

import pytest
import torch

pytest.importorskip("torch_geometric")

import shardpass as sp
from shardpass.errors import RefusedError
from shardpass.testing import evaluate_whole
from shardpass.testing.exact import assert_same
from shardpass.testing.graphs import assignments
from shardpass.testing.parity import evaluate_sharded

from .random_programs import draw, graph

GRAPH = graph()
ORDER = ("edge_weight", "edge_attr", "kind", "m", "y")


def call(model, fields, edges):
    batch = edges.batch if hasattr(edges, "batch") else torch.zeros(GRAPH.num_nodes, dtype=torch.long)
    edge_index = edges if isinstance(edges, torch.Tensor) else edges.edge_index
    return model(fields["x"], edge_index, *(fields[name] for name in ORDER), batch)


def check(seed, folder):
    """What became of the program of a seed: exact or refused; anything else raises, with its source."""
    program, rng = draw(seed, GRAPH.num_nodes), random.Random(seed)
    ranks, mode = rng.randint(1, 4), rng.choice(["sar", "keep", "halo"])
    name = f"program_{seed}"
    torch.manual_seed(seed)
    model = program.load(folder, name).Model().double()
    whole = evaluate_whole(model, GRAPH, call)
    assert torch.isfinite(whole.output).all(), program.source
    owners = rng.choice([*assignments(GRAPH.num_nodes, ranks, GRAPH.edge_index).values()])
    where = f"program {seed} on {ranks} ranks, mode {mode}\n{program.source}"
    try:
        sharded = evaluate_sharded(model, GRAPH, call, owners, ranks, sp.pyg.wrap, sp.Options(mode=mode), whole)
    except RefusedError as error:
        named = {int(line) for line in re.findall(rf"{name}\.py:(\d+)", str(error))}
        assert program.mixes, f"refused without a reason: {error}\n{where}"
        assert named and named <= program.lines, f"named {named} and not {program.lines}: {error}\n{where}"
        return "refused"
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error}\n{where}") from error
    assert_same(whole, sharded, where, bound=1e-9, relative=True)
    return "exact"


@pytest.mark.parametrize("seed", range(40))
def test_a_program_is_exact_or_refused(seed, tmp_path):
    check(seed, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("start", range(1000, 1500, 50))
def test_many_programs(start, tmp_path):
    found = [check(seed, tmp_path) for seed in range(start, start + 50)]
    assert min(found.count("exact"), found.count("refused")) >= 10, "the programs are of both kinds"
