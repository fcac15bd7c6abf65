"""Small programs: those that treat rows of nodes and edges one by one pass, those that mix them are refused."""

import math  # noqa: F401  (the programs use it)

import pytest
import torch
import torch.nn.functional as F  # noqa: F401  (the programs use it)
from torch import nn

from shardpass.core.following import FollowFunctions, FollowRows
from shardpass.core.ranks import RowSet
from shardpass.errors import RefusedError

N, E = 20, 57
NODES, EDGES = RowSet("nodes", N, ("nodes", "")), RowSet("edges", E, ("edges", 1))


class Parts(nn.Module):
    """What the programs call, and node and edge tensors."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.lin, self.gate, self.emb, self.ln = nn.Linear(8, 8), nn.Linear(4, 1), nn.Embedding(5, 8), nn.LayerNorm(8)
        self.lstm, self.gru, self.cell = (
            nn.LSTM(8, 8, batch_first=True),
            nn.GRU(4, 3, batch_first=True),
            nn.GRUCell(8, 8),
        )
        self.mha, self.conv, self.bil = nn.MultiheadAttention(8, 2), nn.Conv1d(1, 2, 3, padding=1), nn.Bilinear(8, 8, 3)
        self.bn = nn.BatchNorm1d(8).eval()
        self.scale, self.across = nn.Parameter(torch.ones(N, 1)), nn.Parameter(torch.ones(8, N))
        self.tensors = {
            "x": torch.randn(N, 8),
            "x3": torch.randn(3, N, 8),
            "ea": torch.randn(E, 4),
            "col": torch.randint(0, N, (E,)),
            "y": torch.randint(0, 5, (N,)),
            "m": torch.rand(N) > 0.5,
        }


def column_assignment(h):
    h = h.clone()
    h[:, 0] = 1
    h[:, 1] = h[:, 2]
    return h


def masked_assignment(h, x, m):
    h = h.clone()
    h[m] = 0.0
    h[m] = x[m]
    return h


def masked_layer(h, m, p):
    out = torch.zeros_like(h)
    out[m] = p.lin(h[m])
    return out


def gcn_norm(h, col):
    degree = torch.zeros(N).scatter_add_(0, col, torch.ones(E)).pow(-0.5)
    degree[degree == float("inf")] = 0
    return torch.zeros(N, 8).index_add_(0, col, (degree[col] * degree[col])[:, None] * h[col])


def filled_in_parts(h):
    out = torch.zeros(N, 8)
    out[:, :4] = h[:, :4]
    return out


def labels_given(h, y, at):
    labels = torch.zeros(h.shape[0], 5)
    labels[at, y[at]] = 1
    return torch.cat([h, labels], 1)


def columns_written(h):
    h = h.clone()
    h[:, [0, 2]] = torch.tensor([1.0, 2.0])
    return h


def written(h, at, values):
    out = torch.zeros_like(h)
    out[at] = values * 2
    return out


ROW_WISE = """
torch.where(h > 0, h, -h)
h.softmax(1)
h.view(h.size(0) * 2, 4).view(h.shape[0], 8)
h.view(len(h), 2, 4).flatten(1)
p.ln(h)
F.dropout(h)
h.view(N, 2, 4).transpose(1, 2).reshape(N, 8)
h.view(-1, 2, 4).sum(1)
torch.einsum("nd,dk->nk", h, p.lin.weight)
torch.bmm(h.view(N, 2, 4), h.view(N, 4, 2))
torch.stack([h, h * 2], 1).mean(1)
torch.stack([h, h * 2]).mean(0)
(h.T * 2).T
h.clone().mul_(2).relu_().add_(h)
h.new_zeros(N, 8) + h
column_assignment(h)
h + p.emb(y)
masked_assignment(h, x, m)
masked_layer(h, m, p)
h[m] + p.emb(y[m])
h.masked_fill(h > 0, 0)
h.masked_fill(m[:, None], 0)
p.lstm(h.view(N, 2, 4).repeat(1, 1, 2))[0].sum(1)
p.lstm(h.view(N, 1, 8))[1][0][0]
p.gru(h.view(N, 2, 4))[1][0]
p.cell(h, h)
p.lin(torch.stack([h, h], 1).view(-1, 8)).view(N, 2, 8).mean(1)
p.bn(h)
h + torch.zeros(N, 8).index_add(0, col, h[col])
h * torch.zeros(N).scatter_add_(0, col, torch.ones(E))[:, None]
gcn_norm(h, col)
h + torch.zeros(N, 1).index_add_(0, col, p.gate(ea).sigmoid())
h + torch.randn(N, 8) * 0.1
h + torch.randn_like(h)
h * torch.ones(N, 1)
h[torch.arange(N), y]
h.gather(1, y[:, None])
h.topk(3, 1).values
h.sort(1).values
F.normalize(h)
h.argmax(1)
torch.cat([h, x], 1)
torch.cat([h, torch.zeros(N, 2)], -1)
p.conv(h[:, None])
h.chunk(2, -1)[0]
h.view(N, 2, 4).unbind(1)[0]
h[:, None, :].squeeze(1)
h / h.size(1)
F.cross_entropy(h, y, reduction="none")
torch.zeros(N, 5).scatter_(1, y[:, None], 1.0)
F.scaled_dot_product_attention(*[h.view(N, 1, 2, 4)] * 3)
p.mha(*[h.view(N, 1, 8).transpose(0, 1)] * 3)[0]
filled_in_parts(h)
torch.empty(N, 8).copy_(h)
h + p.lin.bias
h[:, :, None] * h[:, None, :]
torch.fft.rfft(h, dim=1).abs()
F.prelu(h, torch.tensor(0.2))
F.glu(h)
torch.cdist(h.view(N, 2, 4), h.view(N, 2, 4))
h[m.nonzero().view(-1)]
h[torch.where(m)[0]]
h.masked_select(m[:, None])
h.flip(1)
h.nan_to_num()
h.cumsum(1)
F.pad(h, (1, 1))
h.view(N, 2, 4).tril()
(x3 @ p.lin.weight.T).relu().mean(0)
F.one_hot(y, 5)
F.gumbel_softmax(h, hard=True)
y[:, None].expand(-1, 8) + h
h.repeat(1, 2)
h.repeat_interleave(2, 1)
h.detach().requires_grad_() * 2
h.to(torch.float64).float()
torch.linalg.norm(h, dim=1, keepdim=True) * h
F.group_norm(h, 2)
h.var(1)
p.bil(h, h)
torch.cat([ea, torch.zeros(N, 4)]).relu()
h + torch.cat([h, x]).relu().chunk(2)[1]
h + p.lin(torch.cat([h, x, -h]))[h.size(0) : 2 * h.size(0)]
h + p.lin(torch.cat([h[m], h])).split([h[m].size(0), N])[1]
torch.cat([h[m], h]).tanh()[: h[m].size(0)] + h[m]
h.index_copy(0, m.nonzero().view(-1), p.lin(h[m]))
h.masked_scatter(h > 0, h[h > 0] * 2)
h.masked_scatter(m[:, None], p.lin(h[m]))
h * torch.zeros(N, 8).index_put((torch.arange(N)[:, None], h.topk(2, 1)[1]), torch.tensor(1.0))
h.index_put((torch.arange(N), y), x[:, 0])
h / torch.bincount(col, minlength=N)[:, None]
h * torch.bincount(col, ea[:, 0], N)[:, None]
F.embedding(col, h) * 2
h[col, 0]
h.view(N, 2, 4)[col, ea.argmax(1) % 2]
h * (p.lin.bias @ h.t())[:, None]
h * torch.matmul(p.lin.bias, h.T)[:, None]
(torch.ones(4) @ ea.mT).tanh()
h.masked_scatter(m[:, None].expand_as(h), p.lin(h[m]))
x[:, 0].new_zeros(x.size(0)).masked_scatter(m, h[m].sum(-1))
labels_given(h, y, m.nonzero().squeeze(1))
h.reshape(h.numel() // 8, 2, 4).sum(1)
torch.func.vmap(lambda r: (r * p.lin.bias).sum())(h)
h + p.lin.bias.expand(h.size(0), -1) * p.lin.bias[None].repeat(h.size(0), 1)
h + p.lin.bias.expand_as(h) + h.new_zeros(h.size(0), 8)
p.lin.bias.broadcast_to(h.shape).relu()
torch.ones(len(h), 8).cumsum(1)
torch.broadcast_tensors(p.lin.bias, h)[0].sum(1)
torch.isin(y, torch.tensor([0, 3]))
torch.zeros_like(h).index_add(0, m.nonzero().view(-1), p.lin(h[m]))
torch.zeros_like(h).index_put((torch.where(m)[0],), p.lin(h[m]))
written(h, m.nonzero().view(-1), p.lin(h[m]))
torch.zeros_like(h).scatter(0, m.nonzero().expand(-1, 8), h[m])
columns_written(h)
torch.addmm(h, h, p.lin.weight)
torch.bucketize(h[:, 0], torch.tensor([0.0, 1.0]))
F.scaled_dot_product_attention(*[h.view(N, 1, 4, 2)] * 3, attn_mask=torch.ones(4, 4).tril().bool())
F.pixel_shuffle(h.view(N, 8, 1, 1), 2)
torch.linalg.solve(h.view(N, 2, 4)[:, :, :2], h.view(N, 2, 4))
""".strip().splitlines()

MIXING = """
h[h.sum(1) > 0].sum(0) + h
h + h[gcn_norm(h, col).sum(1) > 3].sum(0)
h / h.norm(dim=0).clamp(min=12)
h if h.sum() > 0 else -h
h - h.quantile(0.9, dim=0)
h.softmax(0)
h.cumsum(0)
(h * 0).cumsum(0)
(y * 0).sort().values + h.sum(1)
h @ (h.T @ h)
h.roll(1, 0)
F.normalize(h, dim=0)
h - h[0]
h.sort(0).values
h.view(10, 16).relu().view(20, 8)
F.layer_norm(h, (N, 8))
h.flip(0)
torch.softmax(h @ h.T, 1) @ h
h + torch.arange(N)[:, None]
h[torch.randperm(N)]
h * p.scale
(h.T + p.across).T
h[:10].sum()
F.batch_norm(h, None, None, training=True)
h + (col + 0.0).mean()
h[col % 3]
h[m].relu() + h[~m][: m.sum()]
h + ea.mean(0).sum()
h * max(h[:, 0].tolist())
h * float(h.detach().numpy().mean())
p.mha(h, h, h)[0]
(h - h.mean()) / h.std()
h + filled_in_parts(h).sum(0)
h * float((h > 3).any())
h + torch.unique(y).numel()
(h[:, None] - h[None]).norm(dim=-1) @ h
torch.eye(N) @ h
h + torch.zeros(5).index_add(0, y, h[:, 0])[y][:, None]
h - h.max(0, keepdim=True)[0]
h + ea.cumsum(0).sum()
h[:, :1] + ea[:N, :1]
torch.where(h > h.mean(), h, 0)
h - h.kthvalue(3, 0).values
h - h.median(0).values
torch.einsum("nd,nk->dk", h, h)
h[y]
h.index_select(0, y)
h + torch.zeros(N, 5).scatter_(0, y[:, None], 1.0)[:, :1]
F.one_hot(y)
h.mean(0)
h / h.size(0)
h / len(h)
h / math.log(h.size(0))
h[torch.arange(h.size(0)).flip(0)]
h[(torch.arange(N) - 1).clamp(0)]
h.clip(max=h.size(0))
h + h.new_full((1,), h.size(0))
h if x.shape[0] > 1000 else -h
h * (1 / y.size(0))
h + torch.tensor(h.size(0)).log()
h * (h.size(0) + 1)
h * (2 * h.shape[0] - 3)
h / (1 - h.size(0))
h * -h.size(0)
h * (h.size(0) * 0.5)
h / h.numel()
torch.cat([h, x])[3 : 3 + h.size(0)]
torch.cat([h, x]).split(16)[0] + h[:16]
torch.cat([p.lin(part) for part in h.split(8)])
torch.cat([h[m], h])[h[m].size(0) :] + h[m].sum(0)
h.masked_scatter(h > 0, h[h.abs() < 9])
h.index_copy(0, m.nonzero().view(-1), h[torch.roll(m, 1)])
h.index_put((torch.arange(N).flip(0), y), x[:, 0])
h.index_put((torch.arange(N), y), torch.arange(N) + 0.0)
h[torch.arange(N), torch.arange(N) % 3]
h[col, torch.arange(E) % 3]
h + torch.bincount(col).sum()
h + torch.bincount(y, minlength=N)[:, None]
h * x[:, :1].expand(x.size(0), x.size(0)).sum(1)[:, None]
h * x[:, :1].repeat(1, x.size(0)).sum(1)[:, None]
h * torch.ones(x.size(0), x.size(0)).sum(1)[:, None]
h * p.lin.bias[:, None].expand(8, x.size(0)).sum(1)
h * p.lin.bias.repeat(x.size(0)).view(-1, 8).sum(0)
h * p.lin.bias.repeat_interleave(x.size(0)).view(8, -1).sum(1)
h * p.lin.bias.expand_as(h).sum(0)
h * p.lin.bias.broadcast_to(h.shape).sum(0)
h * torch.broadcast_tensors(p.lin.bias, h)[0].sum(0)
h * torch.meshgrid(x[:, 0], x[:, 1], indexing="ij")[0].sum(1)[:, None]
h * torch.meshgrid(x[:, 0], x[:, 1], indexing="xy")[0].mean(1)[:, None]
h * torch.eye(h.size(0)).sum()
h * torch.randint(3, (h.size(0), h.size(0))).sum(1)[:, None]
h * h.new_ones(h.size(0)).sum()
h * torch.ones(len(h)).sum()
h * torch.isin(y, y + 1)[:, None]
h * torch.isin(torch.arange(8), y)
h * torch.isin(y, y[m])[:, None]
h.numel() // 8 + h
h / (h.numel() // 4)
torch.func.vmap(lambda r: (r * p.lin.bias).sum() * r)(h)
torch.func.vmap(lambda c: c - c.mean(), in_dims=1, out_dims=1)(h)
torch.native_channel_shuffle(h.view(1, N, 2, 2, 2), 2)
h + torch.bucketize(torch.zeros(N), h[:, 0])[:, None]
p.bil(h, torch.linspace(0, 1, 800).view(100, 8)[: h.size(0)])
torch._weight_norm(h, torch.ones(1, 8), 1)
h + F.mse_loss(torch.ones(N, N) * h[:, :1], torch.ones(N, N) * h[:, 0], reduction="sum")
torch.linalg.solve(h.view(N, 2, 4)[:, :, :2], torch.linspace(0, 1, 2 * N).view(N, 2))
""".strip().splitlines()


def followed(program):
    """Where the result of a program holds rows."""
    p = Parts()
    follower = FollowRows(p)
    follower.marks.known = [NODES, EDGES]
    follower.mark(p.tensors["col"], EDGES, points_to=NODES)
    follower.marks.recognise(p.tensors)
    with follower, FollowFunctions(follower):
        out = eval(program, globals() | p.tensors | {"p": p, "h": p.lin(p.tensors["x"])})
    follower.marks.check_result(out)
    return follower.marks.rows.get(out)


@pytest.mark.parametrize("program", ROW_WISE)
def test_rows_are_followed_to_the_result(program):
    assert followed(program) is not None


@pytest.mark.parametrize("program", MIXING)
def test_what_mixes_rows_is_refused_at_its_line(program):
    with pytest.raises(RefusedError, match=r"test_programs\.py:\d+: "):
        followed(program)
