"""The classes of `torch_geometric.nn.models` that are exact on a sharded graph, with how to make and call each."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch_geometric.nn.models.schnet import CFConv, InteractionBlock
from torch_geometric.nn.models.visnet import EdgeEmbedding, ViS_MP, ViS_MP_Vertex
from torch_geometric.utils import scatter

import shardpass as sp
from shardpass.core.sampling.permutation import shuffled

from .conv_cases import TYPES, edges, own
from .pyg_cases import GRAPH, Case, _attr, _plain, _weight, mlp

CLASSES = torch.arange(GRAPH.num_nodes) % 4
MASK = torch.arange(GRAPH.num_nodes) % 3 > 0


class Given(nn.Module):
    """Stands for a table of embeddings; its rows are an input of the case."""

    weight: Tensor


class EdgeModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = mlp(5 + 5 + 3, 3)

    def forward(self, src: Tensor, dst: Tensor, edge_attr: Tensor, u: Any, batch: Any) -> Tensor:
        return self.lin(torch.cat([src, dst, edge_attr], 1))


class NodeModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = mlp(5 + 3, 6)

    def forward(self, x: Tensor, edge_index: Any, edge_attr: Tensor, u: Any, batch: Any) -> Tensor:
        row, col = edge_index
        messages = self.lin(torch.cat([x[row], edge_attr], 1))
        return scatter(messages, col, dim=0, dim_size=x.size(0), reduce="mean")


class Variational(nn.Module):
    """The encoder of a VGAE."""

    def __init__(self) -> None:
        super().__init__()
        self.mu, self.logstd = gnn.GCNConv(5, 4), gnn.GCNConv(5, 4)

    def forward(self, x: Tensor, edge_index: Any) -> tuple[Tensor, Tensor]:
        return self.mu(x, edge_index), self.logstd(x, edge_index)


def batch_of(g: Any) -> Tensor:
    """``graph.batch``, and zeros for the whole graph."""
    return g.batch if hasattr(g, "batch") else torch.zeros(GRAPH.num_nodes, dtype=torch.int64)


def _rows(m: nn.Module, i: dict[str, Tensor], g: Any) -> Tensor:
    return m(i["x"])


def _several(m: nn.Module, i: dict[str, Tensor], g: Any) -> Tensor:
    return m([i["x"], i["x"].flip(1), i["x"].square()])


def _by_type(m: nn.Module, i: dict[str, Tensor], g: Any) -> Tensor:
    return m({"paper": [i["x"], i["x"].flip(1)]})["paper"]


def _encode(m: nn.Module, i: dict[str, Tensor], g: Any) -> Tensor:
    return m.encode(i["x"], g)


def _decode(m: nn.Module, i: dict[str, Tensor], g: Any) -> Tensor:
    return m.decode(m.encode(i["x"], g), g)


def _recommend(method: str) -> Any:
    def call(m: nn.Module, i: dict[str, Tensor], g: Any) -> Tensor:
        m.embedding.weight = i["x"]
        return getattr(m, method)(g) if method != "forward" else m(g)

    return call


def _recommender() -> nn.Module:
    model = gnn.LightGCN(GRAPH.num_nodes, 5, 2)
    model.embedding = Given()
    return model


def _propagated(y: Any) -> Any:
    return lambda m, i, g: m(own(y, g), g, own(MASK, g), i["edge_weight"].detach()) + i["x"][:, :1]


def _smoothed(m: nn.Module, i: dict[str, Tensor], g: Any) -> Tensor:
    mask = own(MASK, g)
    truth = own(CLASSES, g)[mask]
    soft = i["x"].detach().softmax(1)  # PyG's own gradient is NaN where a node has no neighbours
    first = m.correct(soft, truth, mask, g)
    return m(soft, truth, mask, g) + m.smooth(first, truth, mask, g) + first + i["x"]


def _labelled(m: nn.Module, i: dict[str, Tensor], g: Any) -> Tensor:
    return m(i["x"], own(CLASSES, g), own(MASK, g))


def _signs(g: Any, positive: bool) -> Any:
    """The edges of one sign; on the whole graph `g` is an edge_index."""
    index = g.edge_index if hasattr(g, "edge_index") else g
    return index[:, (edges(TYPES, g) > 0) == positive]


def _signed(m: nn.Module, i: dict[str, Tensor], g: Any) -> Tensor:
    return m(i["x"], _signs(g, True), _signs(g, False))


def _discriminated(m: nn.Module, i: dict[str, Tensor], g: Any) -> Tensor:
    return m.discriminate(_signed(m, i, g), g)


def _molecule(m: nn.Module, i: dict[str, Tensor], g: Any) -> Tensor:
    batch = batch_of(g)
    return m(i["x"], g, i["edge_attr"], batch)[batch]


def _fingerprint(m: nn.Module, i: dict[str, Tensor], g: Any) -> Tensor:
    batch = batch_of(g)
    return m(i["x"], g, batch)[batch]


def _wide(m: nn.Module, i: dict[str, Tensor], g: Any) -> Tensor:
    return m(torch.cat([i["x"], i["x"][:, :1]], 1), g)


def _meta(m: nn.Module, i: dict[str, Tensor], g: Any) -> Tensor:
    x, edge_attr, _ = m(i["x"], g, i["edge_attr"])
    index = g.edge_index if hasattr(g, "edge_index") else g
    return x + scatter(edge_attr, index[1], dim=0, dim_size=x.size(0), reduce="sum").repeat(1, 2)


def _meta_of_graph(m: nn.Module, i: dict[str, Tensor], g: Any) -> Tensor:
    batch = batch_of(g)
    x, _, whole = m(i["x"], g, i["edge_attr"], None, batch)
    return x + whole[batch]


class GraphModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)

    def forward(self, x: Tensor, edge_index: Any, edge_attr: Tensor, u: Any, batch: Any) -> Tensor:
        return self.lin(gnn.global_mean_pool(x, batch))


def _encoded(m: nn.Module, i: dict[str, Tensor], g: Any) -> Tensor:
    return m(i["x"], i["x"].square())


def _deep(block: str) -> nn.Module:
    return gnn.DeepGCNLayer(gnn.GENConv(5, 5), gnn.LayerNorm(5, mode="graph"), nn.ReLU(), block=block)


def _sequential() -> nn.Module:
    return gnn.Sequential(
        "x, edge_index, edge_weight",
        [
            (gnn.GCNConv(5, 8), "x, edge_index, edge_weight -> x1"),
            nn.BatchNorm1d(8),
            (gnn.SAGEConv(8, 8, aggr="max"), "x1, edge_index -> x2"),
            (lambda x1, x2: [x1, x2], "x1, x2 -> xs"),
            (gnn.JumpingKnowledge("cat", 8, 2), "xs -> x"),
            nn.Linear(16, 3),
        ],
    )


def _adversarial() -> nn.Module:
    return gnn.ARGA(gnn.GCNConv(5, 4), gnn.MLP([4, 6, 1], norm=None))


def _infomax(model, inputs, graph):
    """Every row of the outputs. Nodes are shuffled over the whole graph."""
    order = torch.from_numpy(shuffled(np.arange(GRAPH.num_nodes), GRAPH.num_nodes, 0))
    if isinstance(graph, torch.Tensor):
        model.corruption = lambda x, edge_index: (x[order], edge_index)
        model.summary = lambda z, *args: z.mean(0).sigmoid()
    else:
        model.corruption = lambda x, edge_index: (sp.rows(graph, x, sp.permuted_ids(graph, 0)), edge_index)
        model.summary = lambda z, *args: gnn.global_mean_pool(z, graph.batch).sigmoid()
    positive, negative, summary = model(inputs["x"], graph)
    return positive + negative * 2 + summary * 3


class Visnet(nn.Module):
    """Two of ViSNet's layers. The second returns no edges."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.first, self.of_edges = nn.Linear(5, 8), EdgeEmbedding(3, 8)
        self.layers = nn.ModuleList([kind(2, 8, 5.0, None, False, last) for last in (False, True)])

    def forward(self, x: Tensor, edge_index: Any, length: Tensor, edge_attr: Tensor) -> Tensor:
        x, direction = self.first(x), edge_attr / 3
        edges, vec = self.of_edges(edge_index, edge_attr, x), x.unsqueeze(1) * x.new_tensor([[1], [2], [-1]])
        for layer in self.layers:
            dx, dvec, dedges = layer(x, vec, edge_index, length, edges, direction)
            x, vec, edges = x + dx, vec + dvec, edges if dedges is None else edges + dedges
        return x + vec.sum(1)


MORE_MODELS: dict[str, Case] = {
    "MLP": (lambda: gnn.MLP([5, 8, 3]), _rows),
    "MLP with GraphNorm": (lambda: gnn.MLP([5, 8, 3], norm="graph_norm", act="gelu"), _rows),
    "JumpingKnowledge cat": (lambda: gnn.JumpingKnowledge("cat"), _several),
    "JumpingKnowledge max": (lambda: gnn.JumpingKnowledge("max"), _several),
    "JumpingKnowledge lstm": (lambda: gnn.JumpingKnowledge("lstm", 5, 3), _several),
    "HeteroJumpingKnowledge": (lambda: gnn.HeteroJumpingKnowledge(["paper"], "lstm", 5, 2), _by_type),
    "GCN jk lstm": (lambda: gnn.GCN(5, 8, 3, 4, jk="lstm", norm="graph_norm"), _weight),
    "GraphSAGE jk max": (lambda: gnn.GraphSAGE(5, 8, 3, 4, jk="max", act_first=True, norm="pair_norm"), _plain),
    "GAT of edges": (lambda: gnn.GAT(5, 8, 2, 4, edge_dim=3, norm="layer_norm"), _attr),
    "DeepGCNLayer res+": (lambda: _deep("res+"), _plain),
    "DeepGCNLayer res": (lambda: _deep("res"), _plain),
    "DeepGCNLayer dense": (lambda: _deep("dense"), _plain),
    "DeepGCNLayer plain": (lambda: _deep("plain"), _plain),
    "Sequential": (_sequential, _weight),
    "LightGCN": (_recommender, _recommend("get_embedding")),
    "LightGCN of edges": (_recommender, _recommend("forward")),
    "LabelPropagation": (lambda: gnn.LabelPropagation(3, 0.7), _propagated(CLASSES)),
    "LabelPropagation of rows": (lambda: gnn.LabelPropagation(2, 0.9), _propagated(GRAPH.node["x"])),
    "CorrectAndSmooth": (lambda: gnn.CorrectAndSmooth(2, 0.8, 3, 0.6), _smoothed),
    "CorrectAndSmooth scale": (lambda: gnn.CorrectAndSmooth(2, 0.8, 3, 0.6, autoscale=False, scale=2.0), _smoothed),
    "PMLP training": (lambda: gnn.PMLP(5, 8, 3, 3), _rows),
    "PMLP": (lambda: gnn.PMLP(5, 8, 3, 3).eval(), _plain),
    "RECT_L": (lambda: gnn.RECT_L(5, 8), lambda m, i, g: m(i["x"], g) + m.embed(i["x"], g)[:, :5]),
    "AttentiveFP": (lambda: gnn.AttentiveFP(5, 6, 4, 3, num_layers=3, num_timesteps=2), _molecule),
    "NeuralFingerprint": (lambda: gnn.models.NeuralFingerprint(5, 6, 4, 2), _fingerprint),
    "GroupAddRev": (lambda: gnn.GroupAddRev(gnn.GCNConv(3, 3), num_groups=2, disable=True), _wide),
    "GroupAddRev inverse": (
        lambda: gnn.GroupAddRev(gnn.GCNConv(3, 3), num_groups=2, disable=True),
        lambda m, i, g: m.inverse(_wide(m, i, g), g) + torch.cat([i["x"], i["x"][:, :1]], 1),
    ),
    "MaskLabel add": (lambda: gnn.MaskLabel(4, 5), _labelled),
    "MaskLabel concat": (lambda: gnn.MaskLabel(4, 3, "concat"), _labelled),
    "SignedGCN": (lambda: gnn.SignedGCN(5, 8, 2), _signed),
    "SignedGCN of edges": (lambda: gnn.SignedGCN(5, 8, 2), _discriminated),
    "InnerProductDecoder": (lambda: gnn.InnerProductDecoder(), lambda m, i, g: m(i["x"], g)),
    "GAE": (lambda: gnn.GAE(gnn.GCN(5, 8, 2, 4)), _encode),
    "GAE of edges": (lambda: gnn.GAE(gnn.GCN(5, 8, 2, 4)), _decode),
    "VGAE": (lambda: gnn.VGAE(Variational()).eval(), _encode),
    "ARGA": (_adversarial, _encode),
    "ARGVA": (lambda: gnn.ARGVA(Variational(), nn.Linear(4, 1)).eval(), _encode),
    "ARLinkPredictor": (lambda: gnn.models.ARLinkPredictor(5, 6), _plain),
    "DeepGraphInfomax": (lambda: gnn.DeepGraphInfomax(4, gnn.GCN(5, 8, 2, 4), None, None), _infomax),
    "MetaLayer": (lambda: gnn.MetaLayer(EdgeModel(), NodeModel()), _meta),
    "MetaLayer of a graph": (lambda: gnn.MetaLayer(EdgeModel(), NodeModel(), GraphModel()), _meta_of_graph),
    "GPSENodeEncoder": (lambda: gnn.GPSENodeEncoder(8, 5, 3, 5, True, dropout_be=0.0, dropout_ae=0.0), _encoded),
    "InteractionBlock": (
        lambda: InteractionBlock(5, 3, 6, 2.0),
        lambda m, i, g: m(i["x"], g, i["edge_weight"], i["edge_attr"]),
    ),
    "ViS_MP": (lambda: Visnet(ViS_MP), lambda m, i, g: m(i["x"], g, i["edge_weight"], i["edge_attr"])),
    "ViS_MP_Vertex": (lambda: Visnet(ViS_MP_Vertex), lambda m, i, g: m(i["x"], g, i["edge_weight"], i["edge_attr"])),
    "CFConv": (lambda: CFConv(5, 6, 4, mlp(3, 4), 2.0), lambda m, i, g: m(i["x"], g, i["edge_weight"], i["edge_attr"])),
}  # fmt: skip
