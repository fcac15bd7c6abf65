"""Models with attention or of several types as the examples of DGL's repository write them; see dgl_models.py."""

import dgl.function as fn
import dgl.nn.pytorch as dnn
import torch
import torch.nn.functional as F
from dgl.nn.functional import edge_softmax
from torch import nn


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
                sub_graph.srcdata[f"v_{e_id}"] = v
                sub_graph.apply_edges(fn.v_dot_u("q", "k", "t"))
                attn_score = sub_graph.edata.pop("t").sum(-1) * relation_pri / self.sqrt_dk
                attn_score = edge_softmax(sub_graph, attn_score, norm_by="dst")
                sub_graph.edata["t"] = attn_score.unsqueeze(-1)
            G.multi_update_all(
                {etype: (fn.u_mul_e(f"v_{e_id}", "t", "m"), fn.sum("m", "t")) for etype, e_id in edge_dict.items()},
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


class RelGraphConvLayer(nn.Module):
    """Of the example rgcn-hetero."""

    def __init__(self, in_feat, out_feat, rel_names, num_bases):
        super().__init__()
        self.rel_names = rel_names
        convs = {
            rel: dnn.GraphConv(in_feat, out_feat, norm="right", weight=False, bias=False, allow_zero_in_degree=True)
            for rel in rel_names
        }
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
