"""Node-level models as the examples of DGL's repository write them.

Classes are in their published form, shortened where lines do not touch rows, such as the reading of options.
"""

import dgl
import dgl.function as fn
import dgl.nn.pytorch as dnn
import torch
import torch.nn.functional as F
from torch import nn


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
            self.pseudo_proj.append(nn.Sequential(nn.Linear(3, dim), nn.Tanh()))

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
        self.conv2 = dnn.RelGraphConv(
            h_dim, out_dim, num_rels, regularizer="basis", num_bases=num_rels, self_loop=False
        )

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
        self.layers = nn.ModuleList(
            [dnn.GraphConv(in_dim, hid_dim, activation=F.relu), dnn.GraphConv(hid_dim, hid_dim)]
        )
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
