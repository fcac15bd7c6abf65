"""Node-level models as the examples of DGL's repository write them, with how to make and call them.

Classes are in their published form, shortened where lines do not touch rows, such as the reading of options.
"""

from __future__ import annotations

import dgl
import dgl.function as fn
import dgl.nn.pytorch as dnn
import torch
import torch.nn.functional as F
from dgl.nn.functional import edge_softmax
from torch import nn

# ruff: noqa: E501, SIM108, PIE790


class GCN(nn.Module):
    def __init__(self, in_size, hid_size, out_size):
        super().__init__()
        self.layers = nn.ModuleList()
        self.layers.append(dnn.GraphConv(in_size, hid_size, activation=F.relu))
        self.layers.append(dnn.GraphConv(hid_size, out_size))
        self.dropout = nn.Dropout(0.0)

    def forward(self, g, features):
        h = features
        for i, layer in enumerate(self.layers):
            if i != 0:
                h = self.dropout(h)
            h = layer(g, h)
        return h


class GAT(nn.Module):
    def __init__(self, in_size, hid_size, out_size, heads, conv=dnn.GATConv):
        super().__init__()
        self.gat_layers = nn.ModuleList()
        self.gat_layers.append(conv(in_size, hid_size, heads[0], activation=F.elu))
        self.gat_layers.append(conv(hid_size * heads[0], out_size, heads[1], residual=True, activation=None))

    def forward(self, g, inputs):
        h = inputs
        for i, layer in enumerate(self.gat_layers):
            h = layer(g, h)
            if i == len(self.gat_layers) - 1:
                h = h.mean(1)
            else:
                h = h.flatten(1)
        return h


class GraphSAGE(nn.Module):
    def __init__(self, in_feats, n_hidden, n_classes, aggregator_type):
        super().__init__()
        self.layers = nn.ModuleList()
        self.layers.append(dnn.SAGEConv(in_feats, n_hidden, aggregator_type))
        self.layers.append(dnn.SAGEConv(n_hidden, n_classes, aggregator_type))

    def forward(self, graph, inputs):
        h = inputs
        for l, layer in enumerate(self.layers):  # noqa: E741
            h = layer(graph, h)
            if l != len(self.layers) - 1:
                h = F.relu(h)
        return h


class HoldsGraph(nn.Module):
    """TAGCN, APPNP, MoNet, GCN of older examples: the model is made with the graph and keeps it."""

    def __init__(self, g, layers, classifier=None):
        super().__init__()
        self.g, self.layers, self.classifier = g, nn.ModuleList(layers), classifier

    def forward(self, features):
        h = features
        for layer in self.layers:
            h = layer(h) if isinstance(layer, nn.Linear) else layer(self.g, h)
        return h if self.classifier is None else self.classifier(h)


class MoNet(nn.Module):
    def __init__(self, g, in_feats, n_hidden, out_feats, dim, n_kernels):
        super().__init__()
        self.g = g
        self.layers = nn.ModuleList()
        self.pseudo_proj = nn.ModuleList()
        for sizes in ((in_feats, n_hidden), (n_hidden, out_feats)):
            self.layers.append(dnn.GMMConv(*sizes, dim, n_kernels))
            self.pseudo_proj.append(nn.Sequential(nn.Linear(2, dim), nn.Tanh()))

    def forward(self, feat, pseudo):
        h = feat
        for i in range(len(self.layers)):
            h = self.layers[i](self.g, h, self.pseudo_proj[i](pseudo))
        return h


class RGCN(nn.Module):
    """With features in place of `emb.weight`."""

    def __init__(self, h_dim, out_dim, num_rels):
        super().__init__()
        self.conv1 = dnn.RelGraphConv(h_dim, h_dim, num_rels, regularizer="basis", num_bases=num_rels, self_loop=False)
        self.conv2 = dnn.RelGraphConv(h_dim, out_dim, num_rels, regularizer="basis", num_bases=num_rels, self_loop=False)

    def forward(self, g, x):
        h = F.relu(self.conv1(g, x, g.edata[dgl.ETYPE], g.edata["norm"]))
        h = self.conv2(g, h, g.edata[dgl.ETYPE], g.edata["norm"])
        return h


class EmbeddedRGCN(RGCN):
    """Parameters for every node, looked up by the original ids."""

    def __init__(self, num_nodes, h_dim, out_dim, num_rels):
        super().__init__(h_dim, out_dim, num_rels)
        self.emb = nn.Embedding(num_nodes, h_dim)

    def forward(self, g, ids=None):
        x = self.emb.weight if ids is None else self.emb(ids)
        return super().forward(g, x)


class GATConv(nn.Module):
    """The layer of the example ogbn-arxiv, and with edge features of ogbn-proteins."""

    def __init__(self, in_feats, out_feats, num_heads=1, edge_feats=0, edge_drop=0.0, use_symmetric_norm=False):
        super().__init__()
        self._num_heads, self._out_feats = num_heads, out_feats
        self._use_symmetric_norm = use_symmetric_norm
        self.fc = nn.Linear(in_feats, out_feats * num_heads, bias=False)
        self.attn_l = nn.Parameter(torch.randn(1, num_heads, out_feats))
        self.attn_r = nn.Parameter(torch.randn(1, num_heads, out_feats))
        self.attn_edge_fc = nn.Linear(edge_feats, num_heads, bias=False) if edge_feats else None
        self.attn_drop = nn.Dropout(0.0)
        self.edge_drop = edge_drop
        self.leaky_relu = nn.LeakyReLU(0.2)
        self.res_fc = nn.Linear(in_feats, num_heads * out_feats, bias=False)

    def forward(self, graph, feat, feat_edge=None):
        with graph.local_scope():
            if (graph.in_degrees() == 0).any():
                raise AssertionError()
            h_src = feat
            feat_src = self.fc(h_src).view(-1, self._num_heads, self._out_feats)
            if graph.is_block:
                h_dst = h_src[: graph.number_of_dst_nodes()]
                feat_dst = feat_src[: graph.number_of_dst_nodes()]
            else:
                h_dst = h_src
                feat_dst = feat_src
            if self._use_symmetric_norm:
                degs = graph.out_degrees().float().clamp(min=1)
                norm = torch.pow(degs, -0.5)
                shp = norm.shape + (1,) * (feat_src.dim() - 1)
                norm = torch.reshape(norm, shp)
                feat_src = feat_src * norm
            el = (feat_src * self.attn_l).sum(dim=-1).unsqueeze(-1)
            graph.srcdata.update({"ft": feat_src, "el": el})
            er = (feat_dst * self.attn_r).sum(dim=-1).unsqueeze(-1)
            graph.dstdata.update({"er": er})
            graph.apply_edges(fn.u_add_v("el", "er", "e"))
            if feat_edge is not None:
                graph.edata["attn_edge"] = self.attn_edge_fc(feat_edge).view(-1, self._num_heads, 1)
                graph.edata["e"] += graph.edata["attn_edge"]
            e = self.leaky_relu(graph.edata.pop("e"))
            if self.training and self.edge_drop > 0:
                perm = torch.randperm(graph.number_of_edges(), device=e.device)
                bound = int(graph.number_of_edges() * self.edge_drop)
                eids = perm[bound:]
                graph.edata["a"] = torch.zeros_like(e)
                graph.edata["a"][eids] = self.attn_drop(edge_softmax(graph, e[eids], eids=eids))
            else:
                graph.edata["a"] = self.attn_drop(edge_softmax(graph, e))
            graph.update_all(fn.u_mul_e("ft", "a", "m"), fn.sum("m", "ft"))
            rst = graph.dstdata["ft"]
            if self._use_symmetric_norm:
                degs = graph.in_degrees().float().clamp(min=1)
                norm = torch.pow(degs, 0.5)
                shp = norm.shape + (1,) * (feat_dst.dim() - 1)
                norm = torch.reshape(norm, shp)
                rst = rst * norm
            resval = self.res_fc(h_dst).view(h_dst.shape[0], -1, self._out_feats)
            rst = rst + resval
            return rst


class ArxivGAT(nn.Module):
    def __init__(self, in_feats, n_classes, n_hidden, n_heads, edge_drop=0.0):
        super().__init__()
        self.convs, self.norms = nn.ModuleList(), nn.ModuleList()
        for i, width in enumerate((in_feats, n_heads * n_hidden, n_heads * n_hidden)):
            self.convs.append(GATConv(width, n_classes if i == 2 else n_hidden, n_heads, 0, edge_drop, True))
            if i < 2:
                self.norms.append(nn.BatchNorm1d(n_heads * n_hidden))
        self.bias_last = nn.Parameter(torch.zeros(n_classes))
        self.dropout = nn.Dropout(0.0)

    def forward(self, graph, feat):
        h = feat
        for i in range(3):
            conv = self.convs[i](graph, h)
            h = conv
            if i < 2:
                h = h.flatten(1)
                h = self.norms[i](h)
                h = F.relu(h, inplace=True)
                h = self.dropout(h)
        h = h.mean(1)
        h = h + self.bias_last
        return h


class ProteinsGAT(nn.Module):
    def __init__(self, node_feats, edge_feats, n_classes, n_layers, n_heads, n_hidden, edge_emb, edge_drop=0.0):
        super().__init__()
        self.n_layers = n_layers
        self.convs, self.norms, self.edge_encoder = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        self.node_encoder = nn.Linear(node_feats, n_hidden)
        for i in range(n_layers):
            in_hidden = n_heads * n_hidden if i > 0 else n_hidden
            self.edge_encoder.append(nn.Linear(edge_feats, edge_emb))
            self.convs.append(GATConv(in_hidden, n_hidden, n_heads, edge_emb, edge_drop))
            self.norms.append(nn.BatchNorm1d(n_heads * n_hidden))
        self.pred_linear = nn.Linear(n_heads * n_hidden, n_classes)
        self.input_drop, self.dropout = nn.Dropout(0.0), nn.Dropout(0.0)

    def forward(self, g):
        if not isinstance(g, list):
            subgraphs = [g] * self.n_layers
        else:
            subgraphs = g
        h = subgraphs[0].srcdata["feat"]
        h = self.node_encoder(h)
        h = F.relu(h, inplace=True)
        h = self.input_drop(h)
        h_last = None
        for i in range(self.n_layers):
            efeat = subgraphs[i].edata["feat"]
            efeat_emb = self.edge_encoder[i](efeat)
            efeat_emb = F.relu(efeat_emb, inplace=True)
            h = self.convs[i](subgraphs[i], h, efeat_emb).flatten(1, -1)
            if h_last is not None:
                h += h_last[: h.shape[0], :]
            h_last = h
            h = self.norms[i](h)
            h = F.relu(h, inplace=True)
            h = self.dropout(h)
        h = self.pred_linear(h)
        return h


class ARMAConv(nn.Module):
    def __init__(self, in_dim, out_dim, num_stacks, num_layers, activation=None):
        super().__init__()
        self.K, self.T, self.activation = num_stacks, num_layers, activation
        self.dropout = nn.Dropout(p=0.0)
        self.w_0 = nn.ModuleDict({str(k): nn.Linear(in_dim, out_dim, bias=False) for k in range(self.K)})
        self.w = nn.ModuleDict({str(k): nn.Linear(out_dim, out_dim, bias=False) for k in range(self.K)})
        self.v = nn.ModuleDict({str(k): nn.Linear(in_dim, out_dim, bias=False) for k in range(self.K)})
        self.bias = nn.Parameter(torch.rand(self.K, self.T, 1, out_dim))

    def forward(self, g, feats):
        with g.local_scope():
            init_feats = feats
            # assume that the graphs are undirected and graph.in_degrees() is the same as graph.out_degrees()
            degs = g.in_degrees().float().clamp(min=1)
            norm = torch.pow(degs, -0.5).to(feats.device).unsqueeze(1)
            output = None
            for k in range(self.K):
                feats = init_feats
                for t in range(self.T):
                    feats = feats * norm
                    g.ndata["h"] = feats
                    g.update_all(fn.copy_u("h", "m"), fn.sum("m", "h"))
                    feats = g.ndata.pop("h")
                    feats = feats * norm
                    if t == 0:
                        feats = self.w_0[str(k)](feats)
                    else:
                        feats = self.w[str(k)](feats)
                    feats += self.dropout(self.v[str(k)](init_feats))
                    feats += self.v[str(k)](self.dropout(init_feats))
                    feats += self.bias[k][t]
                    if self.activation is not None:
                        feats = self.activation(feats)
                if output is None:
                    output = feats
                else:
                    output = output + feats
            return output / self.K


class GCNII(nn.Module):
    def __init__(self, in_feats, hidden, classes, layers):
        super().__init__()
        self.convs = nn.ModuleList(dnn.GCN2Conv(hidden, i + 1, 0.1, 0.5) for i in range(layers))
        self.fcs = nn.ModuleList([nn.Linear(in_feats, hidden), nn.Linear(hidden, classes)])

    def forward(self, graph, features):
        h0 = F.relu(self.fcs[0](features))
        h = h0
        for con in self.convs:
            h = F.relu(con(graph, h, h0))
        return self.fcs[-1](h)


class JKNet(nn.Module):
    def __init__(self, in_dim, hid_dim, out_dim, mode):
        super().__init__()
        self.dropout = nn.Dropout(0.0)
        self.layers = nn.ModuleList([dnn.GraphConv(in_dim, hid_dim, activation=F.relu), dnn.GraphConv(hid_dim, hid_dim)])
        self.jump = dnn.JumpingKnowledge(mode, hid_dim, 2)
        self.output = nn.Linear(hid_dim * 2 if mode == "cat" else hid_dim, out_dim)

    def forward(self, g, feats):
        feat_lst = []
        for layer in self.layers:
            feats = self.dropout(layer(g, feats))
            feat_lst.append(feats)
        g.ndata["h"] = self.jump(feat_lst)
        g.update_all(fn.copy_u("h", "m"), fn.sum("m", "h"))
        return self.output(g.ndata["h"])


class MixHopConv(nn.Module):
    def __init__(self, in_dim, out_dim, p=(0, 1, 2), batchnorm=True):
        super().__init__()
        self.p, self.batchnorm = p, batchnorm
        self.bn = nn.BatchNorm1d(out_dim * len(p))
        self.weights = nn.ModuleDict({str(j): nn.Linear(in_dim, out_dim, bias=False) for j in p})

    def forward(self, graph, feats):
        with graph.local_scope():
            # assume that the graphs are undirected and graph.in_degrees() is the same as graph.out_degrees()
            degs = graph.in_degrees().float().clamp(min=1)
            norm = torch.pow(degs, -0.5).to(feats.device).unsqueeze(1)
            max_j = max(self.p) + 1
            outputs = []
            for j in range(max_j):
                if j in self.p:
                    output = self.weights[str(j)](feats)
                    outputs.append(output)
                feats = feats * norm
                graph.ndata["h"] = feats
                graph.update_all(fn.copy_u("h", "m"), fn.sum("m", "h"))
                feats = graph.ndata.pop("h")
                feats = feats * norm
            final = torch.cat(outputs, dim=1)
            if self.batchnorm:
                final = self.bn(final)
            return final


class GeniePath(nn.Module):
    def __init__(self, in_dim, out_dim, hid_dim, num_layers):
        super().__init__()
        self.hid_dim = hid_dim
        self.linear1, self.linear2 = nn.Linear(in_dim, hid_dim), nn.Linear(hid_dim, out_dim)
        self.breadth = nn.ModuleList(dnn.GATConv(hid_dim, hid_dim, num_heads=2) for _ in range(num_layers))
        self.depth = nn.ModuleList(nn.LSTM(hid_dim, hid_dim) for _ in range(num_layers))

    def forward(self, graph, x):
        h = torch.zeros(1, x.shape[0], self.hid_dim).to(x.device)
        c = torch.zeros(1, x.shape[0], self.hid_dim).to(x.device)
        x = self.linear1(x)
        for breadth_func, depth_func in zip(self.breadth, self.depth):
            x = breadth_func(graph, x)
            x = torch.tanh(x)
            x = torch.mean(x, dim=1)
            x, (h, c) = depth_func(x.unsqueeze(0), (h, c))
            x = x[0]
        x = self.linear2(x)
        return x


class DAGNN(nn.Module):
    def __init__(self, k, in_dim, hid_dim, out_dim):
        super().__init__()
        self.k = k
        self.mlp = nn.Sequential(nn.Linear(in_dim, hid_dim), nn.ReLU(), nn.Linear(hid_dim, out_dim))
        self.s = nn.Parameter(torch.rand(out_dim, 1))

    def forward(self, graph, feats):
        feats = self.mlp(feats)
        with graph.local_scope():
            results = [feats]
            degs = graph.in_degrees().float()
            norm = torch.pow(degs, -0.5)
            norm = norm.to(feats.device).unsqueeze(1)
            for _ in range(self.k):
                feats = feats * norm
                graph.ndata["h"] = feats
                graph.update_all(fn.copy_u("h", "m"), fn.sum("m", "h"))
                feats = graph.ndata["h"]
                feats = feats * norm
                results.append(feats)
            H = torch.stack(results, dim=1)
            S = F.sigmoid(torch.matmul(H, self.s))
            S = S.permute(0, 2, 1)
            H = torch.matmul(S, H).squeeze()
            return H


class GRAND(nn.Module):
    def __init__(self, in_dim, hid_dim, n_class, K=2, node_dropout=0.5):
        super().__init__()
        self.K, self.dropout = K, node_dropout
        self.mlp = nn.Sequential(nn.Linear(in_dim, hid_dim), nn.ReLU(), nn.Linear(hid_dim, n_class))

    def forward(self, graph, feats):
        n = feats.shape[0]
        drop_rates = torch.ones(n) * self.dropout
        if self.training:
            masks = torch.bernoulli(1.0 - drop_rates).unsqueeze(1)
            feats = masks.to(feats.device) * feats
        else:
            feats = feats * (1.0 - self.dropout)
        with graph.local_scope():
            degs = graph.in_degrees().to(feats).clamp(min=1)
            norm = torch.pow(degs, -0.5).to(feats.device).unsqueeze(1)
            graph.ndata["norm"] = norm
            graph.apply_edges(fn.u_mul_v("norm", "norm", "weight"))
            x = feats
            y = 0 + feats
            for _ in range(self.K):
                graph.ndata["h"] = x
                graph.update_all(fn.u_mul_e("h", "weight", "m"), fn.sum("m", "h"))
                x = graph.ndata.pop("h")
                y.add_(x)
        return torch.log_softmax(self.mlp(y / (self.K + 1)), dim=-1)


class HGTLayer(nn.Module):
    def __init__(self, in_dim, out_dim, node_dict, edge_dict, n_heads):
        super().__init__()
        self.in_dim, self.out_dim, self.n_heads = in_dim, out_dim, n_heads
        self.node_dict, self.edge_dict = node_dict, edge_dict
        self.d_k = out_dim // n_heads
        self.sqrt_dk = self.d_k**0.5
        linears = [nn.ModuleList(nn.Linear(in_dim, out_dim) for _ in node_dict) for _ in range(4)]
        self.k_linears, self.q_linears, self.v_linears, self.a_linears = linears
        self.norms = nn.ModuleList(nn.LayerNorm(out_dim) for _ in node_dict)
        self.relation_pri = nn.Parameter(torch.ones(len(edge_dict), n_heads))
        self.relation_att = nn.Parameter(torch.randn(len(edge_dict), n_heads, self.d_k, self.d_k))
        self.relation_msg = nn.Parameter(torch.randn(len(edge_dict), n_heads, self.d_k, self.d_k))
        self.skip = nn.Parameter(torch.ones(len(node_dict)))

    def forward(self, G, h):
        with G.local_scope():
            node_dict, edge_dict = self.node_dict, self.edge_dict
            for srctype, etype, dsttype in G.canonical_etypes:
                sub_graph = G[srctype, etype, dsttype]
                k_linear = self.k_linears[node_dict[srctype]]
                v_linear = self.v_linears[node_dict[srctype]]
                q_linear = self.q_linears[node_dict[dsttype]]
                k = k_linear(h[srctype]).view(-1, self.n_heads, self.d_k)
                v = v_linear(h[srctype]).view(-1, self.n_heads, self.d_k)
                q = q_linear(h[dsttype]).view(-1, self.n_heads, self.d_k)
                e_id = self.edge_dict[etype]
                relation_att = self.relation_att[e_id]
                relation_pri = self.relation_pri[e_id]
                relation_msg = self.relation_msg[e_id]
                k = torch.einsum("bij,ijk->bik", k, relation_att)
                v = torch.einsum("bij,ijk->bik", v, relation_msg)
                sub_graph.srcdata["k"] = k
                sub_graph.dstdata["q"] = q
                sub_graph.srcdata["v_%d" % e_id] = v
                sub_graph.apply_edges(fn.v_dot_u("q", "k", "t"))
                attn_score = sub_graph.edata.pop("t").sum(-1) * relation_pri / self.sqrt_dk
                attn_score = edge_softmax(sub_graph, attn_score, norm_by="dst")
                sub_graph.edata["t"] = attn_score.unsqueeze(-1)
            G.multi_update_all(
                {
                    etype: (fn.u_mul_e("v_%d" % e_id, "t", "m"), fn.sum("m", "t"))
                    for etype, e_id in edge_dict.items()
                },
                cross_reducer="mean",
            )
            new_h = {}
            for ntype in G.ntypes:
                n_id = node_dict[ntype]
                alpha = torch.sigmoid(self.skip[n_id])
                t = G.nodes[ntype].data["t"].view(-1, self.out_dim)
                trans_out = self.a_linears[n_id](t)
                trans_out = trans_out * alpha + h[ntype] * (1 - alpha)
                new_h[ntype] = self.norms[n_id](trans_out)
            return new_h


class HGT(nn.Module):
    def __init__(self, node_dict, edge_dict, n_inp, n_hid, n_out, n_layers, n_heads):
        super().__init__()
        self.node_dict = node_dict
        self.adapt_ws = nn.ModuleList(nn.Linear(n_inp, n_hid) for _ in node_dict)
        self.gcs = nn.ModuleList(HGTLayer(n_hid, n_hid, node_dict, edge_dict, n_heads) for _ in range(n_layers))
        self.out = nn.Linear(n_hid, n_out)

    def forward(self, G, out_key):
        h = {}
        for ntype in G.ntypes:
            n_id = self.node_dict[ntype]
            h[ntype] = F.gelu(self.adapt_ws[n_id](G.nodes[ntype].data["inp"]))
        for layer in self.gcs:
            h = layer(G, h)
        return self.out(h[out_key])


class RelGraphConvLayer(nn.Module):
    """Of the example rgcn-hetero."""

    def __init__(self, in_feat, out_feat, rel_names, num_bases):
        super().__init__()
        self.rel_names = rel_names
        convs = {rel: dnn.GraphConv(in_feat, out_feat, norm="right", weight=False, bias=False, allow_zero_in_degree=True) for rel in rel_names}
        self.conv = dnn.HeteroGraphConv(convs)
        self.basis = dnn.WeightBasis((in_feat, out_feat), num_bases, len(rel_names))
        self.h_bias = nn.Parameter(torch.zeros(out_feat))
        self.loop_weight = nn.Parameter(torch.randn(in_feat, out_feat))

    def forward(self, g, inputs):
        g = g.local_var()
        weight = self.basis()
        wdict = {self.rel_names[i]: {"weight": w.squeeze(0)} for i, w in enumerate(torch.split(weight, 1, dim=0))}
        if g.is_block:
            inputs_src = inputs
            inputs_dst = {k: v[: g.number_of_dst_nodes(k)] for k, v in inputs.items()}
        else:
            inputs_src = inputs_dst = inputs
        hs = self.conv(g, inputs_src, mod_kwargs=wdict)

        def _apply(ntype, h):
            h = h + torch.matmul(inputs_dst[ntype], self.loop_weight)
            h = h + self.h_bias
            return F.relu(h)

        return {ntype: _apply(ntype, h) for ntype, h in hs.items()}


class LabelPropagation(nn.Module):
    """Of the example correct_and_smooth."""

    def __init__(self, num_layers, alpha, adj):
        super().__init__()
        self.num_layers, self.alpha, self.adj = num_layers, alpha, adj

    @torch.no_grad()
    def forward(self, g, labels, mask=None, post_step=lambda y: y.clamp_(0.0, 1.0)):
        with g.local_scope():
            if labels.dtype == torch.long:
                labels = F.one_hot(labels.view(-1)).to(torch.float32)
            y = labels
            if mask is not None:
                y = torch.zeros_like(labels)
                y[mask] = labels[mask]
            last = (1 - self.alpha) * y
            degs = g.in_degrees().float().clamp(min=1)
            norm = torch.pow(degs, -0.5 if self.adj == "DAD" else -1).to(labels.device).unsqueeze(1)
            for _ in range(self.num_layers):
                # Assume the graphs to be undirected
                if self.adj in ["DAD", "AD"]:
                    y = norm * y
                g.ndata["h"] = y
                g.update_all(fn.copy_u("h", "m"), fn.sum("m", "h"))
                y = self.alpha * g.ndata.pop("h")
                if self.adj in ["DAD", "DA"]:
                    y = y * norm
                y = post_step(last + y)
            return y


class CorrectAndSmooth(nn.Module):
    def __init__(self, autoscale=True, scale=1.0):
        super().__init__()
        self.autoscale, self.scale = autoscale, scale
        self.prop1, self.prop2 = LabelPropagation(3, 0.8, "DAD"), LabelPropagation(3, 0.6, "AD")

    def correct(self, g, y_soft, y_true, mask):
        with g.local_scope():
            assert abs(float(y_soft.sum()) / y_soft.size(0) - 1.0) < 1e-2
            return self.scaled(g, y_soft, y_true, mask, 1)

    def scaled(self, g, y_soft, y_true, mask, numel):
        """What is left of `correct` without its assertions. All labels are given, those of `mask` are used."""
        with g.local_scope():
            error = torch.zeros_like(y_soft)
            error[mask] = (y_true - y_soft)[mask]
            if self.autoscale:
                smoothed_error = self.prop1(g, error, post_step=lambda x: x.clamp_(-1.0, 1.0))
                sigma = error[mask].abs().sum() / numel
                scale = sigma / smoothed_error.abs().sum(dim=1, keepdim=True)
                scale[scale.isinf() | (scale > 1000)] = 1.0
                result = y_soft + scale * smoothed_error
                result[result.isnan()] = y_soft[result.isnan()]
                return result
            else:

                def fix_input(x):
                    x[mask] = error[mask]
                    return x

                smoothed_error = self.prop1(g, error, post_step=fix_input)
                result = y_soft + self.scale * smoothed_error
                result[result.isnan()] = y_soft[result.isnan()]
                return result

    def smooth(self, g, y_soft, y_true, mask):
        with g.local_scope():
            y_soft[mask] = y_true[mask]
            return self.prop2(g, y_soft)


class SemanticAttention(nn.Module):
    def __init__(self, in_size, hidden_size=8):
        super().__init__()
        self.project = nn.Sequential(nn.Linear(in_size, hidden_size), nn.Tanh(), nn.Linear(hidden_size, 1, bias=False))

    def forward(self, z):
        w = self.project(z).mean(0)  # (M, 1)
        beta = torch.softmax(w, dim=0)  # (M, 1)
        beta = beta.expand((z.shape[0], *beta.shape))  # (N, M, 1)
        return (beta * z).sum(1)  # (N, D * K)


class HAN(nn.Module):
    """One layer, on one graph for each metapath."""

    def __init__(self, in_size, out_size, num_heads, num_meta_paths):
        super().__init__()
        self.gat_layers = nn.ModuleList(
            dnn.GATConv(in_size, out_size, num_heads, activation=F.elu, allow_zero_in_degree=True)
            for _ in range(num_meta_paths)
        )
        self.semantic_attention = SemanticAttention(out_size * num_heads)

    def forward(self, gs, h):
        semantic_embeddings = []
        for i, g in enumerate(gs):
            semantic_embeddings.append(self.gat_layers[i](g, h).flatten(1))
        semantic_embeddings = torch.stack(semantic_embeddings, dim=1)  # (N, M, D * K)
        return self.semantic_attention(semantic_embeddings)  # (N, D * K)


class Grace(nn.Module):
    def __init__(self, in_dim, hid_dim):
        super().__init__()
        self.encoder, self.proj = GCN(in_dim, hid_dim, hid_dim), nn.Linear(hid_dim, hid_dim)

    def sim(self, z1, z2):
        # normalize embeddings across feature dimension
        z1 = F.normalize(z1)
        z2 = F.normalize(z2)
        s = torch.mm(z1, z2.t())
        return s

    def forward(self, graph, feat):
        z = self.proj(self.encoder(graph, feat))
        refl_sim = torch.exp(self.sim(z, z))
        return -torch.log(refl_sim.diag() / refl_sim.sum(1))


class DGI(nn.Module):
    def __init__(self, g, in_feats, n_hidden):
        super().__init__()
        self.g, self.conv = g, GCN(in_feats, n_hidden, n_hidden)

    def forward(self, features):
        perm = torch.randperm(self.g.num_nodes())
        return self.conv(self.g, features) - self.conv(self.g, features[perm])


class TWIRLSLike(nn.Module):
    """Changes the graph in forward, as TWIRLS and DropEdge do."""

    def __init__(self, width):
        super().__init__()
        self.conv = dnn.GraphConv(width, width)

    def forward(self, g, x):
        return self.conv(dgl.add_self_loop(g), x)
