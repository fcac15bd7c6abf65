"""The models of PyG's ``examples/`` that see a whole graph, as they are published, with how to call each.

Dropout probabilities are `P`, so that a whole run and a sharded one draw nothing. Examples that are a ready model alone
(GCN, GAT, GIN, label propagation, correct and smooth, signed GCN, autoencoders) are among the other cases.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch_geometric.data import Data

from shardpass.core.sharding import EDGE, NODE

from .conv_cases import TYPES, edges, own
from .pyg_cases import Case
from .tuple_models import Flipped, GatedGCN, MeshGraphNet, OverTargets, PaiNN, Product

P = 0.0


class GCN(nn.Module):  # gcn.py
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = gnn.GCNConv(5, 16, cached=True), gnn.GCNConv(16, 3, cached=True)

    def forward(self, x, edge_index, edge_weight=None):
        x = F.dropout(x, p=P, training=self.training)
        x = self.conv1(x, edge_index, edge_weight).relu()
        x = F.dropout(x, p=P, training=self.training)
        return self.conv2(x, edge_index, edge_weight)


class GAT(nn.Module):  # gat.py
    def __init__(self):
        super().__init__()
        self.conv1 = gnn.GATConv(5, 4, 8, dropout=P)
        self.conv2 = gnn.GATConv(32, 3, heads=1, concat=False, dropout=P)

    def forward(self, x, edge_index):
        x = F.elu(self.conv1(F.dropout(x, p=P, training=self.training), edge_index))
        return self.conv2(F.dropout(x, p=P, training=self.training), edge_index)


class GCNII(nn.Module):  # gcn2_cora.py
    def __init__(self):
        super().__init__()
        self.lins = nn.ModuleList([nn.Linear(5, 8), nn.Linear(8, 3)])
        self.convs = nn.ModuleList(gnn.GCN2Conv(8, 0.1, 0.5, i + 1, True, normalize=False) for i in range(4))

    def forward(self, x, adj_t):
        x = F.dropout(x, P, training=self.training)
        x = x_0 = self.lins[0](x).relu()
        for conv in self.convs:
            x = F.dropout(x, P, training=self.training)
            x = conv(x, x_0, adj_t).relu()
        x = F.dropout(x, P, training=self.training)
        return self.lins[1](x).log_softmax(dim=-1)


class Net(nn.Module):  # benchmark/citation/appnp.py
    def __init__(self):
        super().__init__()
        self.lin1, self.lin2, self.prop1 = nn.Linear(5, 8), nn.Linear(8, 3), gnn.APPNP(10, 0.1)

    def forward(self, data):
        x, edge_index = data.x, data.edge_index
        x = F.dropout(x, p=P, training=self.training)
        x = F.relu(self.lin1(x))
        x = F.dropout(x, p=P, training=self.training)
        x = self.prop1(self.lin2(x), edge_index)
        return F.log_softmax(x, dim=1)


class OfGlobalData(nn.Module):
    """agnn.py, tagcn.py, sgc.py and cora.py read a `data` of their module in ``forward(self)``."""

    def __init__(self, *layers):
        super().__init__()
        self.lin1, self.layers, self.lin2 = nn.Linear(5, 8), nn.ModuleList(layers), nn.Linear(8, 3)

    def forward(self):
        x = F.relu(self.lin1(self.data.x))
        for layer in self.layers:
            x = F.dropout(layer(x, self.data.edge_index), training=False)
        return F.log_softmax(self.lin2(x), dim=1)


class ARMA(nn.Module):  # arma.py
    def __init__(self):
        super().__init__()
        self.conv1 = gnn.ARMAConv(5, 8, num_stacks=3, num_layers=2, shared_weights=True, dropout=P)
        self.conv2 = gnn.ARMAConv(8, 3, num_stacks=3, num_layers=2, shared_weights=True, dropout=P, act=lambda x: x)

    def forward(self, x, edge_index):
        return F.log_softmax(self.conv2(F.relu(self.conv1(x, edge_index)), edge_index), dim=1)


class DNA(nn.Module):  # dna.py
    def __init__(self):
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(5, 8), nn.Linear(8, 3)
        self.convs = nn.ModuleList(gnn.DNAConv(8, 2, 2, dropout=P) for _ in range(3))

    def forward(self, x, edge_index):
        x_all = F.relu(self.lin1(x)).view(-1, 1, 8)
        for conv in self.convs:
            x = F.relu(conv(x_all, edge_index)).view(-1, 1, 8)
            x_all = torch.cat([x_all, x], dim=1)
        return torch.log_softmax(self.lin2(x_all[:, -1]), dim=1)


class RGCN(nn.Module):  # rgcn.py with features
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = gnn.RGCNConv(5, 8, 3, num_bases=2), gnn.RGCNConv(8, 3, 3, num_bases=2)

    def forward(self, x, edge_index, edge_type):
        return F.log_softmax(self.conv2(F.relu(self.conv1(x, edge_index, edge_type)), edge_index, edge_type), dim=1)


class RGAT(nn.Module):  # rgat.py
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2, self.lin = gnn.RGATConv(5, 8, 3), gnn.RGATConv(8, 8, 3), nn.Linear(8, 3)

    def forward(self, x, edge_index, edge_type):
        x = self.conv1(x, edge_index, edge_type).relu()
        x = self.conv2(x, edge_index, edge_type).relu()
        return F.log_softmax(self.lin(x), dim=-1)


class DirGNN(nn.Module):  # dir_gnn.py
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([gnn.DirGNNConv(gnn.SAGEConv(5, 8)), gnn.DirGNNConv(gnn.SAGEConv(8, 3))])

    def forward(self, x, edge_index):
        return self.convs[1](self.convs[0](x, edge_index).relu(), edge_index)


class MixHop(nn.Module):  # mixhop.py
    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = gnn.MixHopConv(5, 4, powers=[0, 1, 2]), gnn.BatchNorm(12)
        self.conv2, self.norm2 = gnn.MixHopConv(12, 4, powers=[0, 1, 2]), gnn.BatchNorm(12)
        self.lin = nn.Linear(12, 3)

    def forward(self, x, edge_index):
        x = F.dropout(self.norm1(self.conv1(x, edge_index)), p=P, training=self.training)
        x = F.dropout(self.norm2(self.conv2(x, edge_index)), p=P, training=self.training)
        return self.lin(x)


class UniMP(nn.Module):  # unimp_arxiv.py
    def __init__(self):
        super().__init__()
        self.label_emb, self.convs, self.norms = gnn.MaskLabel(4, 5), nn.ModuleList(), nn.ModuleList()
        for i in range(1, 4):
            width, concat = (3, False) if i == 3 else (4, True)
            self.convs.append(gnn.TransformerConv(5 if i == 1 else 8, width, 2, concat=concat, beta=True, dropout=P))
            if i < 3:
                self.norms.append(nn.LayerNorm(8))

    def forward(self, x, y, edge_index, label_mask):
        x = self.label_emb(x, y, label_mask)
        for conv, norm in zip(self.convs, self.norms):
            x = norm(conv(x, edge_index)).relu()
        return self.convs[-1](x, edge_index)


class DeeperGCN(nn.Module):  # ogbn_proteins_deepgcn.py
    def __init__(self):
        super().__init__()
        self.node_encoder, self.edge_encoder = nn.Linear(5, 8), nn.Linear(3, 8)
        self.layers = nn.ModuleList()
        for _ in range(3):
            conv = gnn.GENConv(8, 8, aggr="softmax", t=1.0, learn_t=True, num_layers=2, norm="layer")
            norm, act = nn.LayerNorm(8, elementwise_affine=True), nn.ReLU(inplace=True)
            self.layers.append(gnn.DeepGCNLayer(conv, norm, act, block="res+", dropout=P, ckpt_grad=False))
        self.lin = nn.Linear(8, 3)

    def forward(self, x, edge_index, edge_attr):
        x, edge_attr = self.node_encoder(x), self.edge_encoder(edge_attr)
        x = self.layers[0].conv(x, edge_index, edge_attr)
        for layer in self.layers[1:]:
            x = layer(x, edge_index, edge_attr)
        x = self.layers[0].act(self.layers[0].norm(x))
        return self.lin(F.dropout(x, p=P, training=self.training))


class FiLM(nn.Module):  # film.py
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([gnn.FiLMConv(5, 8), gnn.FiLMConv(8, 8)])
        self.norms = nn.ModuleList(nn.BatchNorm1d(8) for _ in range(2))
        self.last = gnn.FiLMConv(8, 3, act=None)

    def forward(self, x, edge_index):
        for conv, norm in zip(self.convs, self.norms):
            x = F.dropout(norm(conv(x, edge_index)), p=P, training=self.training)
        return self.last(x, edge_index)


class GATWithSkips(nn.Module):  # ppi.py, ogbn_products_gat.py
    def __init__(self):
        super().__init__()
        self.conv1, self.lin1 = gnn.GATConv(5, 4, heads=4), nn.Linear(5, 16)
        self.conv2, self.lin2 = gnn.GATConv(16, 3, heads=6, concat=False), nn.Linear(16, 3)

    def forward(self, x, edge_index):
        x = F.elu(self.conv1(x, edge_index) + self.lin1(x))
        return self.conv2(x, edge_index) + self.lin2(x)


class Breadth(nn.Module):
    def __init__(self, in_dim, out_dim):
        super().__init__()
        self.gatconv = gnn.GATConv(in_dim, out_dim, heads=1)

    def forward(self, x, edge_index):
        return torch.tanh(self.gatconv(x, edge_index))


class Depth(nn.Module):
    def __init__(self, in_dim, hidden):
        super().__init__()
        self.lstm = nn.LSTM(in_dim, hidden, 1, bias=False)

    def forward(self, x, h, c):
        return self.lstm(x, (h, c))


class GeniePath(nn.Module):  # geniepath.py, of lazy layers
    def __init__(self):
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(5, 7), nn.Linear(7, 3)
        self.breadth = nn.ModuleList(Breadth(7, 7) for _ in range(2))
        self.depth = nn.ModuleList(Depth(14, 7) for _ in range(2))

    def forward(self, x, edge_index):
        x = self.lin1(x)
        h = torch.zeros(1, x.shape[0], 7, dtype=x.dtype, device=x.device)
        c = torch.zeros(1, x.shape[0], 7, dtype=x.dtype, device=x.device)
        h_tmps = [breadth(x, edge_index) for breadth in self.breadth]
        x = x[None, :]
        for i, depth in enumerate(self.depth):
            in_cat = torch.cat((h_tmps[i][None, :], x), -1)
            x, (h, c) = depth(in_cat, h, c)
        return self.lin2(x[0])


class EGC(nn.Module):  # egc.py, for nodes
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(5, 8)
        self.convs = nn.ModuleList(gnn.EGConv(8, 8, ["symnorm", "min", "max"], 4, 4) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm1d(8) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(8, 4, bias=False), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Linear(4, 3))

    def forward(self, x, adj_t, batch):
        x = self.encoder(x)
        for conv, norm in zip(self.convs, self.norms):
            h = norm(conv(x, adj_t)).relu_()
            x = x + F.dropout(h, P, training=self.training)
        return self.mlp(x + gnn.global_mean_pool(x, batch)[batch])


class GIN(nn.Module):  # mutag_gin.py; the graph's logits are handed back to its nodes
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([gnn.GINConv(gnn.MLP([5, 8, 8])), gnn.GINConv(gnn.MLP([8, 8, 8]))])
        self.mlp = gnn.MLP([8, 8, 3], norm=None, dropout=P)

    def forward(self, x, edge_index, batch):
        for conv in self.convs:
            x = conv(x, edge_index).relu()
        return self.mlp(gnn.global_add_pool(x, batch))[batch]


class QM9(nn.Module):  # qm9_nn_conv.py
    def __init__(self):
        super().__init__()
        self.lin0 = nn.Linear(5, 6)
        self.conv = gnn.NNConv(6, 6, nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 36)), aggr="mean")
        self.gru, self.set2set = nn.GRU(6, 6), gnn.Set2Set(6, processing_steps=3)
        self.lin1, self.lin2 = nn.Linear(12, 6), nn.Linear(6, 1)

    def forward(self, data):
        out = F.relu(self.lin0(data.x))
        h = out.unsqueeze(0)
        for _ in range(3):
            m = F.relu(self.conv(out, data.edge_index, data.edge_attr))
            out, h = self.gru(m.unsqueeze(0), h)
            out = out.squeeze(0)
        out = self.set2set(out, data.batch)
        return self.lin2(F.relu(self.lin1(out)))[data.batch]


class SIGN(nn.Module):  # sign.py, with the powers taken in forward
    def __init__(self):
        super().__init__()
        self.prop, self.lins = gnn.SGConv(5, 5, K=1, bias=False), nn.ModuleList(nn.Linear(5, 8) for _ in range(3))
        self.lin = nn.Linear(24, 3)

    def forward(self, x, edge_index):
        xs = [x, self.prop(x, edge_index)]
        xs.append(self.prop(xs[-1], edge_index))
        hs = [F.dropout(lin(x).relu(), p=P, training=self.training) for x, lin in zip(xs, self.lins)]
        return self.lin(torch.cat(hs, dim=-1)).log_softmax(dim=-1)


def _plain(m: Any, i: dict[str, Tensor], g: Any) -> Tensor:
    return m(i["x"], g)


def _typed(m: Any, i: dict[str, Tensor], g: Any) -> Tensor:
    return m(i["x"], g, edges(TYPES, g))


def data_of(i: dict[str, Tensor], g: Any) -> Any:
    """`data` of the fields `i`: PyG's own, or the graph itself, whose fields these become."""
    if isinstance(g, Tensor):
        return Data(edge_index=g, batch=torch.zeros(len(i["x"]), dtype=torch.int64), **i)
    g._node_fields[NODE]._read.update(x=i["x"])
    g.relations[EDGE].fields._read.update(edge_attr=i["edge_attr"], edge_weight=i["edge_weight"])
    return g


def as_data(m: Any, i: dict[str, Tensor], g: Any) -> Tensor:
    """A model that is called with `data`."""
    return m(data_of(i, g))


def _global(m: Any, i: dict[str, Tensor], g: Any) -> Tensor:
    m.data = SimpleNamespace(x=i["x"], edge_index=g if isinstance(g, Tensor) else g.edge_index)
    return m()


def _batched(m: Any, i: dict[str, Tensor], g: Any) -> Tensor:
    return m(i["x"], g, g.batch if hasattr(g, "batch") else torch.zeros(len(i["x"]), dtype=torch.int64))


def _labels(m: Any, i: dict[str, Tensor], g: Any) -> Tensor:
    number = torch.arange(41)
    return m(i["x"], own(number % 4, g), g, own(number % 3 > 0, g))


EXAMPLES: dict[str, Case] = {
    "gcn": (GCN, lambda m, i, g: m(i["x"], g, i["edge_weight"])),
    "gat": (GAT, _plain),
    "gcn2_cora": (GCNII, _plain),
    "appnp": (Net, as_data),
    "agnn": (lambda: OfGlobalData(gnn.AGNNConv(requires_grad=False), gnn.AGNNConv(requires_grad=True)), _global),
    "tagcn": (lambda: OfGlobalData(gnn.TAGConv(8, 16), gnn.TAGConv(16, 8)), _global),
    "sgc": (lambda: OfGlobalData(gnn.SGConv(8, 8, K=2, cached=True)), _global),
    "arma": (ARMA, _plain),
    "dna": (DNA, _plain),
    "rgcn": (RGCN, _typed),
    "rgat": (RGAT, _typed),
    "dir_gnn": (DirGNN, _plain),
    "mixhop": (MixHop, _plain),
    "unimp_arxiv": (UniMP, _labels),
    "ogbn_proteins_deepgcn": (DeeperGCN, lambda m, i, g: m(i["x"], g, i["edge_attr"])),
    "film": (FiLM, _plain),
    "ppi": (GATWithSkips, _plain),
    "geniepath": (GeniePath, _plain),
    "egc": (EGC, _batched),
    "mutag_gin": (GIN, _batched),
    "qm9_nn_conv": (QM9, as_data),
    "sign": (SIGN, _plain),
    "MeshGraphNets": (MeshGraphNet, as_data),
    "MeshGraphNets over targets": (lambda: MeshGraphNet(OverTargets), as_data),
    "MeshGraphNets against the edges": (lambda: MeshGraphNet(Flipped), as_data),
    "tuples and edges": (lambda: MeshGraphNet(Product), as_data),
    "GatedGCN": (lambda: MeshGraphNet(GatedGCN), as_data),
    "PaiNN": (PaiNN, lambda m, i, g: m(i["x"], g, i["edge_attr"])),
}
