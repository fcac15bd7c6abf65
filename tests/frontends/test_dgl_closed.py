"""What a sharded graph does not offer says so: members of DGLGraph by name, and DGL's functions of graphs.

Never a wrong number: each function below would need more of the graph than a rank has.
"""

import copy
import pickle

import pytest
import torch

pytest.importorskip("dgl")

import dgl
import dgl.function as fn
from dgl import DGLError, DGLGraph
from dgl.nn.functional import edge_softmax
from torch import nn

import shardpass as sp
from shardpass.errors import RefusedError
from shardpass.frontends.dgl.closed import ClosedMemberError, advice_for
from shardpass.frontends.dgl.graph import ShardedDGLGraph
from shardpass.testing import assignments, run, shard_in_memory

from .dgl_parity import GRAPH, float64, whole_graph  # noqa: F401
from .test_dgl_graph import sharded

RANDOM = assignments(GRAPH.num_nodes, 3, GRAPH.edge_index)["random"]
PUBLIC = [name for name in dir(DGLGraph) if not name.startswith("_")]
OFFERED = [name for name in PUBLIC if any(name in kind.__dict__ for kind in ShardedDGLGraph.__mro__[:3])]
REFUSED = [name for name in PUBLIC if name not in OFFERED]


def one_rank():
    """A graph on a single rank: closed as on several."""
    return sp.dgl.graph(shard_in_memory(GRAPH, torch.zeros(GRAPH.num_nodes, dtype=torch.int64), sp.connect("local")))


@pytest.mark.parametrize("name", REFUSED)
def test_a_member_that_is_not_offered_says_what_to_do(name):
    g = one_rank()
    with pytest.raises(
        ClosedMemberError, match=rf"test_dgl_closed.py:\d+: .*DGLGraph\.{name} is not available on a sharded graph.*: ."
    ):
        getattr(g, name)
    assert not hasattr(g, name) and getattr(g, name, None) is None
    assert advice_for(name) != advice_for("no such member"), "give it an advice of its own"


def test_most_members_are_one_or_the_other():
    assert len(OFFERED) > 35 and len(REFUSED) > 50 and set(OFFERED) | set(REFUSED) == set(PUBLIC)
    g = one_rank()
    for name in OFFERED:
        assert hasattr(g, name), name


def test_private_members_and_unknown_ones_raise():
    g = one_rank()
    private = [n for n in vars(DGLGraph) if n.startswith("_") and not n.startswith("__")]
    private = [n for n in private if not any(n in kind.__dict__ for kind in ShardedDGLGraph.__mro__[:2])]
    assert private
    for name in [*private, "_node_frames", "_batch_num_nodes", "brand_new"]:
        with pytest.raises(AttributeError):
            getattr(g, name)


def _to_heterogeneous(g):
    g.ndata[dgl.NTYPE] = torch.zeros(g.num_nodes(), dtype=torch.int64)
    g.edata[dgl.ETYPE] = torch.zeros(g.num_edges(), dtype=torch.int64)
    return dgl.to_heterogeneous(g, ["a"], ["b"])


FUNCTIONS = {
    "add_edges": lambda g: dgl.add_edges(g, [0], [1]),
    "add_nodes": lambda g: dgl.add_nodes(g, 1),
    "add_reverse_edges": dgl.add_reverse_edges,
    "add_self_loop": dgl.add_self_loop,
    "adj_product_graph": lambda g: dgl.adj_product_graph(g, g, "edge_weight"),
    "adj_sum_graph": lambda g: dgl.adj_sum_graph([g, g], "edge_weight"),
    "batch": lambda g: dgl.batch([g, g]),
    "block_to_graph": dgl.block_to_graph,
    "bfs_nodes_generator": lambda g: dgl.bfs_nodes_generator(g, 0),
    "broadcast_edges": lambda g: dgl.broadcast_edges(g, torch.ones(1, 2)),
    "compact_graphs": dgl.compact_graphs,
    "dfs_edges_generator": lambda g: dgl.dfs_edges_generator(g, 0),
    "double_radius_node_labeling": lambda g: dgl.double_radius_node_labeling(g, 0, 1),
    "edge_homophily": lambda g: dgl.edge_homophily(g, torch.zeros(g.num_nodes())),
    "edge_subgraph": lambda g: dgl.edge_subgraph(g, [0]),
    "edge_subgraph of all nodes": lambda g: dgl.edge_subgraph(g, [0], relabel_nodes=False),
    "edge_type_subgraph": lambda g: dgl.edge_type_subgraph(g, ["_E"]),
    "in_subgraph": lambda g: dgl.in_subgraph(g, [0]),
    "khop_adj": lambda g: dgl.khop_adj(g, 2),
    "khop_graph": lambda g: dgl.khop_graph(g, 2),
    "khop_in_subgraph": lambda g: dgl.khop_in_subgraph(g, 0, 2),
    "khop_out_subgraph": lambda g: dgl.khop_out_subgraph(g, 0, 2),
    "lap_pe": lambda g: dgl.lap_pe(g, 2),
    "laplacian_lambda_max": dgl.laplacian_lambda_max,
    "line_graph": dgl.line_graph,
    "linkx_homophily": lambda g: dgl.linkx_homophily(g, torch.zeros(g.num_nodes(), dtype=torch.int64)),
    "max_edges": lambda g: dgl.max_edges(g, "edge_attr"),
    "max_nodes": lambda g: dgl.max_nodes(g, "x"),
    "mean_edges": lambda g: dgl.mean_edges(g, "edge_attr"),
    "mean_nodes": lambda g: dgl.mean_nodes(g, "x"),
    "merge": lambda g: dgl.merge([g, g]),
    "metapath_reachable_graph": lambda g: dgl.metapath_reachable_graph(g, ["_E", "_E"]),
    "node_homophily": lambda g: dgl.node_homophily(g, torch.zeros(g.num_nodes())),
    "node_subgraph": lambda g: dgl.node_subgraph(g, [0]),
    "node_type_subgraph": lambda g: dgl.node_type_subgraph(g, ["_N"]),
    "norm_by_dst": dgl.norm_by_dst,
    "out_subgraph": lambda g: dgl.out_subgraph(g, [0]),
    "prop_nodes_bfs": lambda g: dgl.prop_nodes_bfs(g, 0, fn.copy_u("x", "m"), fn.sum("m", "x")),
    "random_walk_pe": lambda g: dgl.random_walk_pe(g, 2),
    "readout_edges": lambda g: dgl.readout_edges(g, "edge_attr"),
    "readout_nodes": lambda g: dgl.readout_nodes(g, "x"),
    "remove_edges": lambda g: dgl.remove_edges(g, [0]),
    "remove_nodes": lambda g: dgl.remove_nodes(g, [0]),
    "remove_self_loop": dgl.remove_self_loop,
    "reorder_graph": dgl.reorder_graph,
    "reverse": dgl.reverse,
    "save_graphs": lambda g: dgl.save_graphs("/dev/null", [g]),
    "shortest_dist": dgl.shortest_dist,
    "slice_batch": lambda g: dgl.slice_batch(g, 0),
    "softmax_edges": lambda g: dgl.softmax_edges(g, "edge_attr"),
    "softmax_nodes": lambda g: dgl.softmax_nodes(g, "x"),
    "sort_csc_by_tag": lambda g: dgl.sort_csc_by_tag(g, torch.zeros(g.num_nodes(), dtype=torch.int64)),
    "sum_edges": lambda g: dgl.sum_edges(g, "edge_attr"),
    "sum_nodes": lambda g: dgl.sum_nodes(g, "x"),
    "svd_pe": lambda g: dgl.svd_pe(g, 2),
    "to_bidirected": lambda g: dgl.to_bidirected(g, copy_ndata=False),
    "to_block": dgl.to_block,
    "to_heterogeneous": _to_heterogeneous,
    "to_homogeneous": dgl.to_homogeneous,
    "to_networkx": dgl.to_networkx,
    "to_simple": dgl.to_simple,
    "to_simple_graph": dgl.to_simple_graph,
    "topk_edges": lambda g: dgl.topk_edges(g, "edge_attr", 2),
    "topk_nodes": lambda g: dgl.topk_nodes(g, "x", 2),
    "topological_nodes_generator": dgl.topological_nodes_generator,
    "unbatch": dgl.unbatch,
    "sampling.random_walk": lambda g: dgl.sampling.random_walk(g, [0], length=2),
    "sampling.node2vec": lambda g: dgl.sampling.node2vec_random_walk(g, [0], 1.0, 1.0, 2),
    "sampling.neighbors": lambda g: dgl.sampling.sample_neighbors(g, [0], 2),
    "sampling.negative": lambda g: dgl.sampling.global_uniform_negative_sampling(g, 2),
    "sampling.topk": lambda g: dgl.sampling.select_topk(g, 1, "edge_weight", [0]),
    "sampling.pinsage": lambda g: dgl.sampling.RandomWalkNeighborSampler(g, 2, 0.5, 2, 2)(torch.tensor([0])),
    "dataloading": lambda g: next(iter(dgl.dataloading.DataLoader(
        g, torch.arange(2), dgl.dataloading.MultiLayerFullNeighborSampler(1)))),
    "edge_softmax by source": lambda g: edge_softmax(g, g.edata["edge_weight"], norm_by="src"),
    "ops.copy_u": lambda g: dgl.ops.copy_u(g, g.ndata["x"]),
    "ops.copy_u_sum": lambda g: dgl.ops.copy_u_sum(g, g.ndata["x"]),
    "ops.copy_u_mean": lambda g: dgl.ops.copy_u_mean(g, g.ndata["x"]),
    "ops.copy_u_max": lambda g: dgl.ops.copy_u_max(g, g.ndata["x"]),
    "ops.u_mul_e_sum": lambda g: dgl.ops.u_mul_e_sum(g, g.ndata["x"], g.edata["edge_weight"].unsqueeze(1)),
    "ops.u_add_e_max": lambda g: dgl.ops.u_add_e_max(g, g.ndata["x"][:, :3], g.edata["edge_attr"]),
    "ops.u_dot_v": lambda g: dgl.ops.u_dot_v(g, g.ndata["x"], g.ndata["x"]),
    "ops.u_add_v": lambda g: dgl.ops.u_add_v(g, g.ndata["x"], g.ndata["x"]),
    "ops.v_sub_u": lambda g: dgl.ops.v_sub_u(g, g.ndata["x"], g.ndata["x"]),
    "ops.e_mul_u": lambda g: dgl.ops.e_mul_u(g, g.edata["edge_attr"], g.ndata["x"][:, :3]),
    "ops.gspmm": lambda g: dgl.ops.gspmm(g, "copy_lhs", "sum", g.ndata["x"], None),
    "ops.gsddmm": lambda g: dgl.ops.gsddmm(g, "add", g.ndata["x"], g.ndata["x"], "u", "u"),
    "ops.segment_reduce": lambda g: dgl.ops.segment_reduce(g.batch_num_nodes(), g.ndata["x"]),
    "transforms.DropEdge": lambda g: dgl.DropEdge(0.5)(g),
    "transforms.AddSelfLoop": lambda g: dgl.AddSelfLoop()(g),
    "transforms.DropNode": lambda g: dgl.DropNode(0.5)(g),
    "pickle": pickle.dumps,
    "deepcopy": copy.deepcopy,
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_graphs_raise(name):
    def work(g, comm):
        with pytest.raises((DGLError, RefusedError, AttributeError, TypeError)):
            print(FUNCTIONS[name](g))

    sharded(work, RANDOM)
    with pytest.raises((DGLError, RefusedError, AttributeError, TypeError)):
        print(FUNCTIONS[name](one_rank()))


def test_the_more_likely_ones_say_what_to_do():
    g = one_rank()
    for name in ("reverse", "add_self_loop", "to_block", "khop_in_subgraph", "sum_nodes", "to_simple"):
        with pytest.raises(RefusedError, match="sharded graph"):
            FUNCTIONS[name](g)


class Computes(nn.Module):
    """A model that returns what a function makes of the graph."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, g):
        return self.function(g)


SENTENCES = {
    "ops.gspmm": "lambda g: dgl.ops.gspmm.*: a function of DGL that reads source nodes or the structure .* update_all",
    "ops.gsddmm": "lambda g: dgl.ops.gsddmm.*: a function of DGL that reads source nodes .* apply_edges",
    "sampling.topk": "sampling.select_topk.*: a function of DGL .* sample with shardpass.dgl.DataLoader",
    "sampling.neighbors": r"DGLGraph\.is_pinned .*: sample with shardpass.dgl.DataLoader, or in one process",
    "prop_nodes": r"DGLGraph\.prop_nodes .*: use update_all or apply_edges",
    "sample_neighbors": r"DGLGraph\.sample_neighbors .*: sample with shardpass.dgl.DataLoader, or in one process",
}


@pytest.mark.parametrize("name", SENTENCES)
def test_a_wrapped_model_says_what_it_cannot_call(name):
    function = FUNCTIONS.get(name) or (lambda g: getattr(g, name))
    with pytest.raises(RefusedError, match=SENTENCES[name]):
        sharded(lambda g, comm: sp.dgl.wrap(Computes(function), comm)(g.core), RANDOM)


def test_an_explainer_and_a_model_that_is_not_wrapped_say_what_to_do():
    g, conv = one_rank(), dgl.nn.GraphConv(5, 3, allow_zero_in_degree=True)
    for explainer in (dgl.nn.GNNExplainer(conv, 2), dgl.nn.SubgraphX(conv, 2)):
        with pytest.raises(RefusedError, match="cuts out of a whole graph"):
            sp.dgl.wrap(copy.deepcopy(explainer), g.comm)
    with pytest.raises(RefusedError, match="explain a model, in one process that has the whole graph"):
        dgl.nn.GNNExplainer(conv, 2).explain_node(0, g, g.ndata["x"])
    with pytest.raises(AttributeError, match=r"call a model that shardpass.dgl.wrap\(model, comm\) has wrapped"):
        conv(g.core, g.ndata["x"])


def _softmax_of_some(g):
    """As in edge dropout, but with edges that are the same everywhere."""
    kept = (g.edata["edge_weight"] > 0.3).nonzero().view(-1)
    out = torch.zeros_like(g.edata["edge_attr"])
    out[kept] = edge_softmax(g, g.edata["edge_attr"][kept], eids=kept)
    return out


LOCAL = {
    "edge_softmax of some": _softmax_of_some,
    "edge_softmax": lambda g: edge_softmax(g, g.edata["edge_attr"]),
    "copy_e_sum": lambda g: dgl.ops.copy_e_sum(g, g.edata["edge_attr"]),
    "e_sub_v": lambda g: dgl.ops.e_sub_v(g, g.edata["edge_attr"], g.dstdata["x"][:, :3]),
    "copy_v": lambda g: dgl.ops.copy_v(g, g.dstdata["x"]),
    "broadcast_nodes": lambda g: dgl.broadcast_nodes(g, torch.ones(1, 2)),
    "SIGNDiffusion": lambda g: dgl.SIGNDiffusion(2, in_feat_name="x", diffuse_op="rw")(g).ndata["out_feat_2"],
    "GCNNorm": lambda g: dgl.GCNNorm("edge_weight")(g).edata["edge_weight"],
    "RowFeatNormalizer": lambda g: dgl.RowFeatNormalizer(node_feat_names=["x"], edge_feat_names=[])(g).ndata["x"],
    "copy": lambda g: copy.copy(g).ndata["x"],
}


@pytest.mark.parametrize("name", LOCAL)
def test_what_is_exact_on_a_sharded_graph(name):
    """It needs in-edges only, or is written with message passing."""
    expected = LOCAL[name](whole_graph())

    def work(g, comm):
        found = LOCAL[name](g)
        ids = g.ndata[dgl.NID] if expected.size(0) == GRAPH.num_nodes else g.edata[dgl.EID]
        torch.testing.assert_close(found, expected[ids], rtol=0, atol=1e-12)

    for owners in assignments(GRAPH.num_nodes, 3, GRAPH.edge_index).values():
        sharded(work, owners)


@pytest.mark.parametrize("rank", [0, 2])
def test_an_error_on_one_rank_ends_all(rank):
    """As DGL's own check for nodes without in-edges does, which is true on the ranks that have such nodes."""
    lonely = torch.bincount(GRAPH.edge_index[1], minlength=41) == 0
    owners = torch.where(lonely, rank, torch.arange(41) % 3)
    owners = torch.where(~lonely & (owners == rank), (rank + 1) % 3, owners)

    def work(comm):
        model = sp.dgl.wrap(dgl.nn.GraphConv(5, 3), comm, check=False)
        g = shard_in_memory(GRAPH, owners, comm)
        return model(g, g.node["x"])

    with pytest.raises(DGLError, match="0-in-degree"):
        run(work, 3)
