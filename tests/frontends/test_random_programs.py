"""Random programs around layers: each is exact to 1e-9, or refused at the line of the statement that mixes rows."""

import random
import re

import pytest
import torch

import shardpass as sp
from shardpass.errors import RefusedError
from shardpass.testing import assert_same, assignments, evaluate_sharded, evaluate_whole

from .program_lines import PYG_LINES, PYG_MIXING
from .random_programs import DGL, PYG, compose, draw, graph

GRAPH = graph()


def call_pyg(model, fields, edges):
    batch = edges.batch if hasattr(edges, "batch") else torch.zeros(GRAPH.num_nodes, dtype=torch.long)
    edge_index = edges if isinstance(edges, torch.Tensor) else edges.edge_index
    rest = (fields[name] for name in ("edge_weight", "edge_attr", "kind", "m", "y"))
    return model(fields["x"], edge_index, *rest, batch)


def call_dgl(model, fields, edges):
    import dgl

    whole = isinstance(edges, torch.Tensor)
    g = dgl.graph(tuple(edges), num_nodes=GRAPH.num_nodes) if whole else sp.dgl.graph(edges)
    return model(g, *(fields[name] for name in ("x", "edge_weight", "edge_attr", "kind", "m", "y")))


LIBRARIES = {"torch_geometric": (PYG, call_pyg, "pyg"), "dgl": (DGL, call_dgl, "dgl")}


@pytest.fixture(params=LIBRARIES)
def library(request):
    """A library that is installed, by name; DGL makes some tensors in the default dtype."""
    pytest.importorskip(request.param)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield request.param
    torch.set_default_dtype(before)


def check(seed, library, folder, program=None):
    """What became of the program of a seed: exact or refused; anything else raises, with its source."""
    parts, call, frontend = LIBRARIES[library]
    program, rng = program or draw(seed, GRAPH, parts), random.Random(seed)
    ranks, mode = rng.randint(1, 4), rng.choice(["sar", "keep", "halo"])
    name = f"program_{seed}"
    torch.manual_seed(seed)
    model = program.load(folder, name).Model().double()
    whole = evaluate_whole(model, GRAPH, call)
    assert torch.isfinite(whole.output).all(), program.source
    owners = rng.choice([*assignments(GRAPH.num_nodes, ranks, GRAPH.edge_index).values()])
    where = f"program {seed} on {ranks} ranks, mode {mode}\n{program.source}"
    wrap = getattr(sp, frontend).wrap
    try:
        sharded = evaluate_sharded(model, GRAPH, call, owners, ranks, wrap, sp.Options(mode=mode), whole)
    except RefusedError as error:
        named = {int(line) for line in re.findall(rf"{name}\.py:(\d+)", str(error))}
        assert program.mixes, f"refused without a reason: {error}\n{where}"
        assert program.names(named, str(error)), f"named {named} and not {program.lines}: {error}\n{where}"
        return "refused"
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error}\n{where}") from error
    assert_same(whole, sharded, where, bound=1e-9, relative=True)
    return "exact"


def test_some_programs(library, tmp_path):
    found = [check(seed, library, tmp_path) for seed in range(3, 10)]
    assert min(found.count("exact"), found.count("refused")) >= 3, "the programs are of both kinds"


@pytest.mark.parametrize("seed", range(len(PYG_LINES + PYG_MIXING)))
def test_each_line_around_edges_of_pyg(seed, tmp_path):
    pytest.importorskip("torch_geometric")
    line, mixes = (PYG_LINES + PYG_MIXING)[seed], seed >= len(PYG_LINES)
    program = compose([PYG.layers[0], line], line if mixes else None, 1, GRAPH, PYG)
    assert check(3 * seed, "torch_geometric", tmp_path, program) == ("refused" if mixes else "exact")


@pytest.mark.long
@pytest.mark.parametrize("start", range(1000, 1250, 50))
def test_many_programs(start, library, tmp_path):
    found = [check(seed, library, tmp_path) for seed in range(start, start + 50)]
    assert min(found.count("exact"), found.count("refused")) >= 10, "the programs are of both kinds"
