"""Programs inside a model: what mixes rows is refused at its line by every rank, what looks like it is exact.

The tables are the modules `inside_*.py`.
"""

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("torch_geometric")

import torch_geometric.nn as gnn
from torch_geometric.data import Data

import shardpass as sp
from shardpass.errors import RefusedError
from shardpass.testing import WholeGraph, run, shard_in_memory

from . import inside_counts as counts
from . import inside_gradients as gradients
from . import inside_refused as reasons
from . import inside_rows as rows
from . import inside_square as square
from . import inside_values as values
from .how_much import one_each
from .inside_model import (
    GRAPH,
    GROUP,
    NODES,
    OWNERS,
    TEAMS,
    Team,
    Together,
    built,
    called,
    cases,
    own_fields,
    refused_or_why,
    whole_graph,
)
from .on_ranks import on_ranks

EIGHTS = {w: torch.arange(w).repeat_interleave(8)[torch.randperm(8 * w)] for w in (1, 3, 4)}
SQUARES = {w: Team(whole_graph(who), who, w) for w, who in EIGHTS.items() if w < 4}
FEW = {3: Team(GRAPH, torch.tensor([1] + [0] * (NODES - 1)), 3)}
REFUSED = cases(
    *(rows.MIXING_BY_PLACE, counts.POSITIONS, counts.COUNTED, counts.CONSTANTS, counts.TURNED, counts.NUMPY),
    *(counts.SCRIPTED, counts.ESCAPES, values.SCALARS, values.MIXED, values.LEAVING, reasons.WORDS, gradients.MIXING),
)
EXACT = cases(rows.ROW_WISE, values.STAYING, reasons.MUST_RUN, gradients.ROW_WISE)
SOME_REFUSED = [
    "roll by 28 rows", "rows above a far diagonal", "roll of edges in a message", "standardised",
    "zeros in the first sixty", "ones and zeros cut", "eight rows turned", "NumPy, a line", "an integer",
    "a tensor of the least and the most", "a dataclass with a loss", "distances of all pairs",
]  # fmt: skip
SOME_EXACT = [
    "roll of channels", "a triangle of each row", "renorm of rows in a message", "convolution over channels",
    "batch norm of all ranks", "LSTM over a time per node", "mask of nodes computed", "largest channels",
    "softmax over edges", "views by size", "zeros of own size", "a constant cut by the width", "sizes of a spectrum",
    "a constant kernel of one node",
]  # fmt: skip
TABLES = {  # which programs, and on which ranks
    "": (REFUSED, EXACT, {ranks: TEAMS[ranks] for ranks in (1, 3)}),
    "as many rows as channels": (cases(square.MIXING), cases(square.ROW_WISE), SQUARES),
    "one row and none": (
        {name: REFUSED[name] for name in SOME_REFUSED}, {name: EXACT[name] for name in SOME_EXACT}, FEW,
    ),
    "several ranks": (cases(values.ON_SEVERAL), {}, {3: TEAMS[3]}),
}  # fmt: skip


def by_default(kind, chosen):
    """The programs of `TABLES` with numbers of ranks; all but those of which `chosen(i, ranks)` is true are long."""
    return [
        pytest.param(where, name, ranks, marks=[] if len(tables[2]) == 1 or chosen(i, ranks) else pytest.mark.long)
        for where, tables in TABLES.items()
        for i, name in enumerate(tables[kind])
        for ranks in tables[2]
    ]


# one rank refuses as each of several does; what is exact on one rank may be wrong on several
ALL_REFUSED = by_default(0, lambda i, ranks: ranks == (3 if i % 2 else 1))
ALL_EXACT = by_default(1, lambda i, ranks: ranks == 3 or i < GROUP)


@pytest.fixture(scope="module")
def together(doubles, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exact")
    return {
        (where, ranks): Together(exact, folder, {ranks: team})
        for where, (_, exact, teams) in TABLES.items()
        for ranks, team in teams.items()
    }


@pytest.mark.parametrize(("where", "name", "ranks"), ALL_REFUSED)
def test_refused_at_its_line_by_every_rank(where, name, ranks, doubles, tmp_path):
    refused, _, teams = TABLES[where]
    model = built(refused[name], tmp_path)
    if teams is not SQUARES:
        called(copy.deepcopy(model), dict(GRAPH.node | GRAPH.edge), GRAPH.edge_index)  # it runs on the whole graph
    wrong = refused_or_why(model, refused[name], {ranks: teams[ranks]})
    assert not wrong, "\n".join([str(refused[name]), *wrong])


@pytest.mark.parametrize(("where", "name", "ranks"), ALL_EXACT)
def test_exact_on_any_number_of_ranks(where, name, ranks, together):
    wrong = together[where, ranks].wrong(name)
    assert not wrong, "\n".join([str(TABLES[where][1][name]), *wrong])


@pytest.mark.parametrize("name", SOME_REFUSED)
def test_refused_in_eval(name, doubles, tmp_path):
    model = built(REFUSED[name], tmp_path).eval().requires_grad_(False)
    wrong = refused_or_why(model, REFUSED[name], {3: TEAMS[3]})
    assert not wrong, "\n".join([str(REFUSED[name]), *wrong])


@pytest.mark.parametrize("name", TABLES["several ranks"][0])
def test_what_only_several_ranks_refuse_passes_on_one(name, doubles, tmp_path):
    case = TABLES["several ranks"][0][name]
    assert refused_or_why(built(case, tmp_path), case, {1: TEAMS[1]}) == ["rank 0 of 1 does not refuse it"]


CHECKED = cases("""
a scale that is negative at one node
    scale = torch.where(x[:, :1] == SEEN, -1.0, 1.0).expand(n, 8)
    h = torch.distributions.Normal(h, scale, validate_args=True).log_prob(torch.zeros_like(h))
""")


@pytest.mark.parametrize("ranks", OWNERS)
def test_a_check_of_arguments_that_fails_at_one_node_ends_the_call_on_every_rank(ranks, doubles, tmp_path):
    (case,) = CHECKED.values()
    case.lines["top"] = [f"SEEN = {float(GRAPH.node['x'][5, 0])!r}"]
    model = built(case, tmp_path)
    with pytest.raises(ValueError, match="scale"):
        called(model, dict(GRAPH.node | GRAPH.edge), GRAPH.edge_index)

    def job(comm, graph):
        called(sp.pyg.wrap(copy.deepcopy(model), comm), own_fields(graph), graph)

    found = TEAMS[ranks].run(job)
    assert all(isinstance(error, Exception) for error in found)
    assert not any(isinstance(error, RefusedError) for error in found), found
    assert any(isinstance(error, ValueError) and "scale" in str(error) for error in found)


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    path = tmp_path_factory.mktemp("inference mode") / "parts"
    data = Data(x=GRAPH.node["x"], edge_index=GRAPH.edge_index, y=GRAPH.node["y"])
    sp.partition(data, path, parts=2, method="random")
    return path


@on_ranks(1, 2)
def test_fields_first_read_in_inference_mode_can_be_trained_on(comm, parts):
    graph = sp.load(parts, comm)
    with sp.seed(0, comm):
        model = gnn.GCN(6, 8, 2, 8).double()
    model = sp.pyg.wrap(model, comm)
    with torch.inference_mode():
        model(graph.x, graph)
    loss = sp.cross_entropy(model(graph.x, graph), graph.y, None, comm)
    loss.backward()
    sp.sync_gradients(model, comm)
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("ranks", OWNERS)
def test_features_in_a_sparse_tensor_are_exact_or_refused_alike(ranks, doubles, tmp_path):
    (case,) = cases("sparse features | h = h.relu()").values()
    model = built(case, tmp_path)
    fields = dict(GRAPH.node | GRAPH.edge)
    expected = called(model, fields, GRAPH.edge_index)

    def job(comm, graph):
        own = own_fields(graph) | {"x": graph.x.detach().to_sparse()}
        return (called(sp.pyg.wrap(copy.deepcopy(model), comm), own, graph) - expected[graph.node_ids]).abs().max()

    found = TEAMS[ranks].run(job)
    assert not any(isinstance(one, Exception) and not isinstance(one, RefusedError) for one in found), found
    assert len({isinstance(one, RefusedError) for one in found}) == 1
    assert all(isinstance(one, RefusedError) or one < 1e-10 for one in found), found


@pytest.mark.parametrize(
    ("made", "ranks"),
    one_each([lambda x: x * 2, lambda x: x.detach().clone(), lambda x: x[:, [1, 0, 2, 3, 4, 5]]], [*OWNERS]),
)
def test_features_made_outside_are_rows_of_nodes_where_edges_are_as_many(made, ranks, doubles, tmp_path):
    """Twice, of which the second call has features that only look like those of the first."""
    model = built(EXACT["a layer norm in a message"], tmp_path)
    fields = dict(GRAPH.node | GRAPH.edge)
    expected = called(model, fields | {"x": made(fields["x"])}, GRAPH.edge_index)

    def job(comm, graph):
        mine = sp.pyg.wrap(copy.deepcopy(model), comm)
        own = own_fields(graph)
        outs = [called(mine, own | {"x": made(own["x"])}, graph) for _ in range(2)]
        return [(out - expected[graph.node_ids]).abs().max() for out in outs]

    for found in TEAMS[ranks].run(job):
        assert not isinstance(found, Exception), found
        assert max(found) < 1e-10


class Renewing(nn.Module):
    """It writes what it has computed into the data that it was given, as PyG's own transforms do."""

    def __init__(self):
        super().__init__()
        self.first, self.last = gnn.SAGEConv(6, 8), gnn.SAGEConv(8, 8)

    def forward(self, data):
        data.x = self.first(data.x, data.edge_index).relu()  # here
        return self.last(data.x, data.edge_index)


@pytest.mark.parametrize("ranks", OWNERS)
def test_what_forward_assigns_is_read_after_the_call_or_refused(ranks, doubles):
    torch.manual_seed(0)
    plain = Renewing().double()
    data = Data(x=GRAPH.node["x"], edge_index=GRAPH.edge_index)
    plain(data)

    def job(comm):
        graph = shard_in_memory(WholeGraph(NODES, GRAPH.edge_index, {"x": GRAPH.node["x"]}), OWNERS[ranks], comm)
        try:
            sp.pyg.wrap(copy.deepcopy(plain), comm)(graph)
        except RefusedError as error:
            return str(error)
        found = graph.x
        assert found.shape == (graph.num_own_nodes, 8), "the assignment is lost"
        return float((found - data.x[graph.node_ids]).abs().max())

    found = run(job, ranks)
    assert all(one < 1e-10 if isinstance(one, float) else "data.x = " in one for one in found)
    assert len({type(one) for one in found}) == 1
