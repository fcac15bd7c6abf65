"""The statements that random programs are made of: layers, what runs around them, and what mixes rows.

A ``#`` in a statement stands for a number that tells its modules from others.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """A statement of ``forward``.

    code: the statement; it reads and sets ``h``.
    made: statements of ``__init__``.
    """

    code: str
    made: str = ""


def _lines(*given: str | tuple[str, str]) -> list[Line]:
    return [Line(one) if isinstance(one, str) else Line(*one) for one in given]


ROWS = _lines(
    ("h = self.lin#(h).relu() + h", "self.lin# = nn.Linear(8, 8)"),
    ("h = self.ln#(h)", "self.ln# = nn.LayerNorm(8)"),
    ("h = self.bn#(h)", "self.bn# = nn.BatchNorm1d(8)"),
    ("h = self.gru#(h, h.tanh())", "self.gru# = nn.GRUCell(8, 8)"),
    (
        "h = self.att#(h.view(-1, 2, 4), h.view(-1, 2, 4), h.view(-1, 2, 4))[0].reshape(-1, 8)",
        "self.att# = nn.MultiheadAttention(4, 2, batch_first=True)",
    ),
    ("h = h + self.emb#(y)", "self.emb# = nn.Embedding(4, 8)"),
    ("h = h * self.scale#.sigmoid()", "self.scale# = nn.Parameter(torch.randn(8))"),
    ("h = h + self.shift#", "self.register_buffer('shift#', torch.linspace(-1, 1, 8))"),
    ("self.kept = h\n        h = self.lin#(h) - self.kept", "self.lin# = nn.Linear(8, 8)"),
    ("parts = {'a': h, 'b': [self.lin#(h), x]}\n        h = parts['a'] + parts['b'][0]", "self.lin# = nn.Linear(8, 8)"),
    ("h = checkpoint(self.lin#, h, use_reentrant=False)", "self.lin# = nn.Linear(8, 8)"),
    ("out = torch.zeros_like(h)\n        out[m] = self.lin#(h[m])\n        h = h + out", "self.lin# = nn.Linear(8, 8)"),
    ("h = torch.cat([h, self.lin#(x)], 1)[:, 2:10]", "self.lin# = nn.Linear(5, 2)"),
    ("gate = self.lin#(h).softmax(0 if h.dim() > 2 else 1)\n        h = gate * h", "self.lin# = nn.Linear(8, 8)"),
    "h = torch.where(h > 0, h, 0.1 * h)",
    "h = h * m.unsqueeze(1)",
    "h = h.masked_fill(~m.unsqueeze(1), 0.5)",
    "h = h.clone()\n        h[m] = 0.25",
    "h = h.clone()\n        h[:, 2:4] = h[:, 4:6] * 2",
    "h = torch.stack([h, h.tanh()], 0).mean(0)",
    "h = torch.stack([h, h.tanh(), -h], -1).amax(-1)",
    "h = F.normalize(h, dim=-1)",
    "h = h.softmax(1) + h.cumsum(-1).tanh()",
    "h = h.view(h.size(0), 2, -1).flatten(1)",
    "h = h.view(len(h), 2, 4).flatten(1)",
    "h = h.sort(1)[0] - h.flip(-1)",
    "h = h / h.norm(dim=1, keepdim=True).clamp(min=1)",
    "h = h.view(-1, 2, 4).transpose(1, 2).reshape(-1, 8)",
    "h = torch.einsum('nhc,ngc->nhg', h.view(-1, 2, 4), h.view(-1, 2, 4)).flatten(1).repeat(1, 2)",
    "h = h.T.contiguous().T",
    "h = h.unsqueeze(0).expand(3, -1, -1).sum(0)",
    "h = torch.add(h, x[:, :1], alpha=0.5)",
    "h = h - h.mean(1, keepdim=True)",
    "h = F.dropout(h, 0.0, self.training)",
    "h = (h.clamp(max=1.5).abs() + 0.1).sqrt()",
    "h, rest = h + 1, h.detach()",
    "top, at = h.topk(3, dim=1)\n        h = h.scatter(1, at, top / 2)",
    "h = h - F.one_hot(y, 4).to(h).repeat(1, 2)",
    "assert h.size(0) == x.size(0) and h.dim() == 2",
    "for step in range(2):\n            h = h + step * h.tanh()",
    "if self.training and h.size(1) > 4:\n            h = 2 * h",
    "h = (h, h.relu())[1]",
    "h = h + torch.fft.rfft(h, dim=1).abs().sum(1, keepdim=True)",
    "h = h - h.quantile(0.3, dim=1, keepdim=True)",
    ("h = self.mix#(h.t()[None]).squeeze(0).t()", "self.mix# = nn.Conv1d(8, 8, 1)"),
    ("a, b = self.lin#(torch.cat([h, h.tanh()])).chunk(2)\n        h = a * b", "self.lin# = nn.Linear(8, 8)"),
    ("a = self.lin#(torch.cat([h, -h]))\n        h = a[:h.size(0)] - a[h.size(0):]", "self.lin# = nn.Linear(8, 8)"),
    "at = m.nonzero().view(-1)\n        h = h.index_copy(0, at, h[at].tanh())",
    "h = h.masked_scatter(h > 0, h[h > 0] / 2)",
    "top = torch.zeros_like(h)\n        top[torch.arange(len(h))[:, None], h.topk(3, 1)[1]] = 1\n        h = h * top",
)

MIXED_ROWS = _lines(
    "h = h + h.mean(0)",
    "h = h - h.max(0)[0]",
    "h = h.softmax(0)",
    "p = torch.zeros(2, 8)\n        p[0] = h.mean(0)\n        h = h + p[0]",
    "h = h + h[torch.arange(h.size(0)).flip(0)]",
    "h = h / math.sqrt(h.size(0))",
    "h = h / len(h)",
    (
        "self.mu#.data.mul_(0.9).add_(0.1 * h.detach().mean(0))\n        h = h - self.mu#",
        "self.register_buffer('mu#', torch.zeros(8))",
    ),
    "h = h.cumsum(0)",
    "h = h[torch.argsort(h[:, 0])]",
    "h = h.flip(0)",
    "h = torch.cat([h, -h])[3 : 3 + h.size(0)]",
    "h = torch.roll(h, 1, 0)",
    "h = h @ (h.T @ h).softmax(-1)",
    "h = h / h.norm()",
    "h = h if h.sum() > 0 else 2 * h",
    "h = h + h[m].mean(0, keepdim=True)",
    "h = F.batch_norm(h, None, None, training=True)",
    "h = F.normalize(h, dim=0)",
    "h = h + h[0]",
    "h = h * (h[:3].sum() + 1)",
    "h = h + h.sort(0)[0]",
    "h = h + h.var(0) + h.median(0)[0]",
    "h = h * torch.arange(h.size(0)).unsqueeze(1).to(h)",
    "h = (h @ h.T).softmax(-1) @ h",
    "h = h * float(h.abs().max())",
    "h = h / h.size(0)",
    "h = h + 0.5 * torch.cdist(h, h)[:, :8]",
    "h = h + torch.bmm(h.unsqueeze(0), h.T.unsqueeze(0) @ h.unsqueeze(0)).squeeze(0)",
    ("h = h * self.each#.unsqueeze(1)", "self.each# = nn.Parameter(torch.ones(NODES))"),
    ("h = h + self.table#.T", "self.register_buffer('table#', torch.randn(8, NODES))"),
    ("h = h + self.nodes#.weight", "self.nodes# = nn.Embedding(NODES, 8)"),
    ("h = self.deep#(h)", "self.deep# = nn.Sequential(nn.Linear(8, 8), Centred())"),
    ("h = self.lin#(h.T).T", "self.lin# = nn.Linear(NODES, NODES)"),
)

PYG_LAYERS = _lines(
    ("h = self.conv#(h, ei)", "self.conv# = gnn.GCNConv(8, 8)"),
    ("h = self.conv#(h, ei, w)", "self.conv# = gnn.GCNConv(8, 8, improved=True)"),
    ("h = self.conv#(h, ei).relu()", "self.conv# = gnn.SAGEConv(8, 8, aggr='max')"),
    ("h = self.conv#((h, h), ei)", "self.conv# = gnn.SAGEConv(8, 8, project=True)"),
    ("h = F.elu(self.conv#(h, ei, ea))", "self.conv# = gnn.GATConv(8, 4, heads=2, edge_dim=3)"),
    ("h = self.conv#(h, ei)", "self.conv# = gnn.GATv2Conv(8, 8, heads=2, concat=False)"),
    ("h = self.conv#(h, ei)", "self.conv# = gnn.GINConv(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))"),
    ("h = h + self.conv#(h, ei, ea)", "self.conv# = gnn.TransformerConv(8, 4, heads=2, edge_dim=3, beta=True)"),
    ("h = self.conv#(h, ei, kind)", "self.conv# = gnn.RGCNConv(8, 8, 3)"),
    (
        "h = self.conv#(h, ei)",
        "self.conv# = gnn.PNAConv(8, 8, ['mean', 'std', 'max'], ['identity'], torch.ones(9).long())",
    ),
    ("h = self.conv#(torch.stack([h, h.tanh()]), ei).mean(0)", "self.conv# = gnn.GraphConv(8, 8)"),
    ("h = self.conv#(h, ei)", "self.conv# = Own(lambda a, b, e: torch.cat([a, b], -1).relu())"),
    (
        "h = self.conv#(h, ei, ea)",
        "self.conv# = Own(lambda a, b, e: F.normalize(a + b, dim=-1).repeat(1, 2) * e.sum(-1, keepdim=True))",
    ),
)

PYG_LINES = _lines(
    ("h = self.conv#(h, ei)", "self.conv# = gnn.SAGEConv(8, 8, aggr=Weighted())"),
    ("h = self.gn#(h, batch)", "self.gn# = gnn.GraphNorm(8)"),
    ("h = self.pn#(h)", "self.pn# = gnn.PairNorm()"),
    "deg = degree(ei[1], h.size(0), dtype=h.dtype)\n        h = h / deg.clamp(min=1).unsqueeze(-1)",
    "hub = degree(ei[1], x.size(0)) > 6\n        h = torch.where(hub.unsqueeze(1), h, h.tanh())",
    "h = h + scatter(h[ei[0]] * w.unsqueeze(1), ei[1], dim=0, dim_size=h.size(0), reduce='mean')",
    "h = h + torch.zeros_like(h).index_add_(0, ei[1], h[ei[0]] * ea[:, :1])",
    "alpha = softmax((h[ei[0]] * h[ei[1]]).sum(-1), ei[1], num_nodes=h.size(0))\n"
    "        h = scatter(alpha.unsqueeze(-1) * h[ei[0]], ei[1], 0, h.size(0))",
    "ends = h[ei]\n        h = h + scatter(ends[0] * ends[1], ei[1], 0, h.size(0))",
    "alpha = softmax(h[ei[0], 0] * h.t()[1, ei[1]], ei[1])\n"
    "        h = scatter(alpha[:, None] * F.embedding(ei[0], h), ei[1], 0, h.size(0))",
    "h = h + scatter(torch.stack([h, h.tanh(), -h], 1)[ei[0], kind], ei[1], 0, h.size(0))",
    "h = h + scatter(torch.gather(h, 0, ei[0][:, None].expand(-1, 8)), ei[1], 0, h.size(0))",
    "h = h + scatter(h.t()[:, ei[0]], ei[1], 1, h.size(0)).t()",
    "h = h / torch.bincount(ei[1], minlength=h.size(0)).clamp(min=1)[:, None]",
    "h = h + torch.bincount(ei[1], w.detach(), h.size(0))[:, None]",
    "h = h + global_mean_pool(h, batch)",
    "h = h * (1 + global_max_pool(h, batch).tanh())",
)
PYG_EDGES = _lines(
    "ei, w = ei[:, kind < 2], w[kind < 2]\n        ea, kind = ea[kind < 2], kind[kind < 2]",
    "loops, _ = remove_self_loops(ei)\n        h = h + scatter(h[loops[0]], loops[1], 0, h.size(0))",
    ("h = h + self.up#(h, add_self_loops(ei, num_nodes=h.size(0))[0])", "self.up# = gnn.SimpleConv(aggr='sum')"),
    ("w = self.edge#(torch.cat([h[ei[0]], h[ei[1]], ea], 1)).sigmoid().squeeze(-1)", "self.edge# = nn.Linear(19, 1)"),
    "ea = ea * w.unsqueeze(1) + kind.unsqueeze(1)",
)

PYG_MIXING = _lines(
    "h = h / math.sqrt(ei.size(1))",
    (
        "h = self.conv#(h, ei)",
        "self.conv# = gnn.GCNConv(8, 8)\n        self.conv#.register_forward_hook(lambda m, i, o: o - o.mean(0))",
    ),
    ("h = self.conv#(h, ei)", "self.conv# = gnn.AntiSymmetricConv(8, act=lambda h: h - h.mean(0))"),
    (
        "h = h + scatter(h[ei[0]] * self.each#.unsqueeze(1), ei[1], 0, h.size(0))",
        "self.each# = nn.Parameter(torch.ones(EDGES))",
    ),
    (
        "h = self.conv#(h, ei, self.each#)",
        "self.conv#, self.each# = gnn.GCNConv(8, 8), nn.Parameter(torch.rand(EDGES))",
    ),
    "h = h + h[degree(ei[1], h.size(0)) > 6].sum(0)",
    "h = h + scatter(h.softmax(0)[ei[0]], ei[1], 0, h.size(0))",
    "h = h + scatter(h[ei].softmax(1)[0], ei[1], 0, h.size(0))",
    "h = h + scatter(h[ei[0], torch.arange(ei.size(1)) % 8], ei[1], 0, h.size(0))[:, None]",
    "h = h + h[torch.arange(len(h)), torch.arange(len(h)) % 8][:, None]",
    "h = h + scatter(w.softmax(0), ei[0], 0, h.size(0))[:, None]",
    "h = h + scatter(torch.arange(ei.size(1)).to(h), ei[0], 0, h.size(0))[:, None]",
    "some = ei[:, torch.arange(ei.size(1)) % 2 == 0]\n        h = h + scatter(h[some[0]], some[1], 0, h.size(0))",
    "some = ei[:, w.cumsum(0) > 2]\n        h = h + scatter(h[some[0]], some[1], 0, h.size(0))",
    "some = ei[:, torch.arange(3)]\n        h = h + scatter(h[some[0]], some[1], 0, h.size(0))",
    "h = h + degree(ei[1]).sum()",
    "h = h + torch.bincount(ei[1]).sum()",
    "w = w / w.sum()\n        h = h + scatter(h[ei[0]] * w.unsqueeze(1), ei[1], 0, h.size(0))",
    "h = h + scatter(h[ei[0]] * (ea / ea.norm(dim=0))[:, :1], ei[1], 0, h.size(0))",
    ("h = self.conv#(h, ei)", "self.conv# = Own(lambda a, b, e: torch.cat([a, b / b.norm(dim=0).clamp(min=2)], -1))"),
    ("h = self.conv#(h, ei)", "self.conv# = Own(lambda a, b, e: torch.cat([a, b - b.mean(0)], -1))"),
)

DGL_LAYERS = _lines(
    ("h = self.conv#(g, h)", "self.conv# = dnn.GraphConv(8, 8, allow_zero_in_degree=True)"),
    ("h = self.conv#(g, h, edge_weight=w)", "self.conv# = dnn.GraphConv(8, 8, 'right', allow_zero_in_degree=True)"),
    ("h = self.conv#(g, h).relu()", "self.conv# = dnn.SAGEConv(8, 8, 'pool')"),
    ("h = self.conv#(g, (h, h))", "self.conv# = dnn.SAGEConv(8, 8, 'mean', bias=False)"),
    ("h = self.conv#(g, h).flatten(1)", "self.conv# = dnn.GATConv(8, 4, 2, allow_zero_in_degree=True)"),
    ("h = self.conv#(g, h).mean(1)", "self.conv# = dnn.GATv2Conv(8, 8, 2, allow_zero_in_degree=True)"),
    ("h = self.conv#(g, h)", "self.conv# = dnn.GINConv(nn.Linear(8, 8), 'max')"),
    ("h = self.conv#(g, h)", "self.conv# = dnn.TAGConv(8, 8, k=2)"),
    ("h = self.conv#(g, h, kind)", "self.conv# = dnn.RelGraphConv(8, 8, 3)"),
    ("h = self.conv#(g, h)", "self.conv# = dnn.EdgeConv(8, 8, allow_zero_in_degree=True)"),
    "g.ndata['h'] = h\n        g.update_all(fn.copy_u('h', 'm'), fn.mean('m', 'n'))\n        h = h + g.ndata['n']",
    "g.edata['w'] = w\n        g.ndata['h'] = h\n        g.update_all(fn.u_mul_e('h', 'w', 'm'), fn.sum('m', 'h'))\n"
    "        h = g.ndata.pop('h')",
    "g.srcdata['a'], g.dstdata['b'] = h, h.tanh()\n        g.apply_edges(fn.u_add_v('a', 'b', 's'))\n"
    "        g.edata['p'] = edge_softmax(g, g.edata['s'].sum(1, keepdim=True))\n"
    "        g.update_all(fn.u_mul_e('a', 'p', 'm'), fn.sum('m', 'a'))\n        h = g.dstdata['a']",
    "g.ndata['h'] = h\n        g.update_all(lambda e: {'m': e.src['h'] * e.dst['h'].sigmoid()}, fn.max('m', 'n'))\n"
    "        h = h + g.ndata['n']",
    "g.ndata['h'] = h\n        g.edata['e'] = ea\n"
    "        g.update_all(lambda e: {'m': torch.cat([e.src['h'][:, 3:], e.data['e']], 1)}, fn.sum('m', 'n'))\n"
    "        h = h + g.ndata['n']",
)

DGL_LINES = _lines(
    "deg = g.in_degrees().to(h).clamp(min=1).unsqueeze(-1)\n        h = h / deg",
    "h = torch.where((g.in_degrees() > 6).unsqueeze(1), h, h.tanh())",
    "g.ndata['q'] = h\n        g.apply_nodes(lambda n: {'q': n.data['q'].tanh()})\n        h = g.ndata['q']",
    "with g.local_scope():\n            g.ndata['h'] = 2 * h\n            h = g.ndata['h'] + 1",
    ("h = h + self.pool#(g, h)", "self.pool# = dnn.AvgPooling()"),
)
DGL_EDGES = _lines(
    "w = w * (kind > 0)",
    "g.edata['f'] = ea\n        g.apply_edges(lambda e: {'f': e.data['f'].tanh()})\n        ea = g.edata['f']",
)

DGL_MIXING = _lines(
    (
        "h = self.conv#(g, h)",
        "self.conv# = dnn.GraphConv(8, 8, allow_zero_in_degree=True, activation=lambda h: h - h.mean(0))",
    ),
    (
        "h = self.conv#(g, h, edge_weight=self.each#)",
        "self.conv# = dnn.GraphConv(8, 8, 'right', allow_zero_in_degree=True)\n"
        "        self.each# = nn.Parameter(torch.rand(EDGES))",
    ),
    (
        "g.edata['e'] = self.each#\n        g.ndata['h'] = h\n"
        "        g.update_all(fn.u_mul_e('h', 'e', 'm'), fn.sum('m', 'h'))\n        h = g.ndata['h']",
        "self.each# = nn.Parameter(torch.rand(EDGES))",
    ),
    "g.ndata['h'] = h\n        h = h + g.ndata['h'].sum(0).tanh()",
    "w = w / w.sum()\n        h = self.last.weight.sum() + h\n        g.edata['w'] = w\n        g.ndata['h'] = h\n"
    "        g.update_all(fn.u_mul_e('h', 'w', 'm'), fn.sum('m', 'n'))\n        h = h + g.ndata['n']",
    "h = h / g.num_nodes()",
    "g.ndata['h'] = h\n        g.update_all(lambda e: {'m': e.src['h'] - e.src['h'].mean(0)}, fn.sum('m', 'n'))\n"
    "        h = h + g.ndata['n']",
    "h = h * (g.in_degrees().max() - 1)",
    "h = h + h[g.in_degrees() > 6].sum(0)",
)
