"""Losses and steps around a wrapped model: exact on every number of ranks, or refused at the user's line."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("torch_geometric")

import torch_geometric.utils as pyg

import shardpass as sp
from shardpass.errors import RefusedError
from shardpass.testing import run

from .around_model import COUNTS, MASKED, MODEL, OTHER, Task, dummy_scale, holding, scale_gradient
from .how_much import one_each, some_by_default
from .inside_model import GRAPH


def hooked(t, hook):
    t.z.register_hook(hook)
    return t.loss(t.z)


class Tanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (1 - x.tanh().square())


class SameRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        return -grad


class Centred(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad - grad.mean(0)


def centre(t):
    if t.comm is None:
        return t.z.mean(0)
    return sp.all_reduce_sum(t.z.sum(0), t.comm) / sp.total(t.x.size(0), t.comm)


def columns(t, rows, mask=None, of=sp.mean):
    if t.comm is None:
        chosen = rows if mask is None else rows[mask]
        return chosen.mean(0) if of is sp.mean else chosen.sum(0)
    return of(rows, mask, t.comm, dim=0)


def covariance(t):
    centred = t.z - columns(t, t.z)
    return columns(t, centred[:, :, None] * centred[:, None, :])


def class_centres(t):
    ids = F.one_hot(t.y.remainder(4), 4).double()
    sums = columns(t, ids[:, :, None] * t.z[:, None, :], t.m, sp.sum)
    return sums / columns(t, ids, t.m, sp.sum).clamp(min=1)[:, None]


def in_place(t):
    z = t.z
    z += 1
    return t.loss(z.mul_(2))


def kept(t, value):
    memory = torch.zeros_like(t.x[:, :1]).expand(-1, 8).clone()
    memory.mul_(0.9).add_(value.detach())
    return t.mean((t.z - memory).square())


def written(t):
    buffer = torch.zeros(t.z.shape).double()
    buffer[:] = t.z
    return buffer.square().mean()


def counted(y):
    counts = torch.zeros(int(GRAPH.node["y"].max()) + 1).double()
    return counts.index_add_(0, y, torch.ones(len(y)).double())


def with_scaler(t):
    return torch.amp.GradScaler("cpu", init_scale=2.0).scale(t.loss(t.z)) / 2


def gram(t, by=lambda term, comm: term):
    own = t.z.t() @ t.z
    if t.comm is None:
        return own.norm()
    return by(sp.all_reduce_sum(own, t.comm).norm(), t.comm)


def class_sums(t):
    own = F.one_hot(t.y.remainder(4), 4).double().t() @ t.z
    return own if t.comm is None else sp.all_reduce_sum(own, t.comm)


def adversarial(t, step):
    x = t.x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(t.loss(t.model(x, t.graph)), x)
    return t.loss(t.model(t.x + step(slope), t.graph))


def to_prototypes(t, count):
    prototypes = torch.linspace(-1, 1, count * 8).double().view(count, 8)
    near = (t.z[:, None] - prototypes).square().sum(2).amin(1)
    return t.mean((t.z @ prototypes.t()).logsumexp(1) + near)


def by_label(t, count):
    table = torch.linspace(-1, 1, count * 8).double().view(count, 8)
    return t.mean((t.z - table[t.y % count]).square() + F.embedding(t.y % count, table))


def degrees(t):
    return pyg.degree(t.graph[1] if t.comm is None else t.graph.edge_index[1], t.x.size(0)).double()


def degrees_by_hand(t):
    index, found = t.graph[1] if t.comm is None else t.graph.edge_index[1], torch.zeros(t.x.size(0))
    found.index_add_(0, index, torch.ones(index.size(0)))
    return found / found.max()


def edges_of(t):
    return t.graph if t.comm is None else t.graph.edge_index


def of_all(t, own, op):
    return own if t.comm is None else t.comm.all_reduce(own, op)


def at_ids(t, dim):
    ids = torch.arange(0, 36, 3).view(4, 3)
    if t.comm is None:
        return t.z[ids if dim == 0 else ids.t()]
    ids = ids[t.comm.rank :: t.comm.size]
    return t.z[sp.node_ids(t.graph, ids if dim == 0 else ids.t(), dim=dim)]


def pairs_of_labels(t):
    found, y = torch.zeros(4, 4).double(), t.y.remainder(4)
    found.index_put_((y, y), torch.ones(y.size(0)).double(), accumulate=True)
    return found / found.sum()


def statistics(t):
    norm = nn.BatchNorm1d(6, affine=False).double()
    norm(t.x)
    return t.mean(t.z[:, :6] * norm.eval()(t.x))


def normal(z):
    return torch.distributions.Independent(torch.distributions.Normal(z, 1.0), 1)


def to_candidates(t):
    ids = torch.arange(0, 12, 3)
    candidates = t.z[ids] if t.comm is None else sp.rows(t.graph, t.z, ids)
    return t.mean((t.z @ candidates.t()).logsumexp(1))


def reduced(t, own):
    return own if t.comm is None else t.comm.all_reduce(own, "sum") / t.comm.size


def caught(t, names, loss):
    """A loss of what forward hooks of modules have caught."""
    found = {}
    for name in names:
        getattr(t.model, name).register_forward_hook(lambda module, given, out, name=name: found.update({name: out}))
    return t.loss(t.model(t.x, t.graph)) + loss(*(found[name] for name in names))


def in_third_call(t, loss):
    t.model(t.x, t.graph)
    return loss(t.model(t.x, t.graph))


def teacher(t):
    other = copy.deepcopy(MODEL)
    if t.comm is not None:
        other = sp.pyg.wrap(other, t.comm)
    with torch.no_grad():
        return other(t.x, t.graph) * 0.5


EXACT = {
    "a loss of ours": lambda t: t.loss(t.z),
    "a part outside": lambda t: t.loss(t.model.head(t.z)),
    "a learned weight of a loss": lambda t: torch.exp(-t.model.rate) * t.loss(t.z) + t.model.rate,
    "a root of a loss": lambda t: (t.loss(t.z) + 1).sqrt(),
    "a penalty": lambda t: t.loss(t.z) + 0.1 * sum(p.square().sum() for p in t.model.parameters()),
    "an auxiliary mean": lambda t: t.loss(t.z) + t.mean(t.z.abs()),
    "a sum over own rows": lambda t: t.z.square().sum() + 3,
    "losses of rows": lambda t: t.mean(F.mse_loss(t.z, torch.zeros(t.x.size(0), 8).double(), reduction="none")),
    "beside a mean without gradient": lambda t: t.mean((t.z / (t.mean(t.z.abs()).detach() + 1)).tanh()),
    "a soft target": lambda t: t.mean(
        F.kl_div(F.log_softmax(t.z / 2, 1), F.softmax(t.z.detach(), 1), reduction="none")
    ),
    "a hook that clips": lambda t: hooked(t, lambda g: g.clamp(-0.001, 0.001)),
    "labels of its own": lambda t: t.mean(t.z[:, 0] * torch.arange(t.x.size(0)).remainder(1)),
    "a function that keeps its rows": lambda t: t.mean(Tanh.apply(t.z).square()),
    "a function that returns its rows": lambda t: t.mean(SameRows.apply(t.z).square()),
    "distances to the mean of all": lambda t: t.mean((t.z - centre(t)).square()),
    "a term of sums over all ranks": lambda t: t.loss(t.z) + gram(t, sp.replicated),
    "the norm of the mean": lambda t: t.loss(t.z) + t.alike(columns(t, t.z).pow(2).sum()),
    "the norm of a mean over a mask": lambda t: t.alike(columns(t, t.z, t.m).norm()),
    "the norm of a sum over a mask": lambda t: t.alike(columns(t, t.z, t.m, sp.sum).norm()),
    "columns apart": lambda t: t.loss(t.z) + t.alike(covariance(t).fill_diagonal_(0).square().sum()),
    "columns that vary": lambda t: t.alike(F.relu(1 - covariance(t).diagonal().sqrt()).mean()),
    "distances to the centres of classes": lambda t: t.mean((t.z - class_centres(t)[t.y.remainder(4)]).square()),
    "rows beside their mean and its norm": lambda t: (
        t.mean((t.z - columns(t, t.z)).tanh()) + t.alike(columns(t, t.z).square().sum())
    ),
    "sums of classes": lambda t: t.mean((t.z @ class_sums(t).t()).tanh()),
    "a sum of losses": lambda t: F.cross_entropy(t.z, t.y, reduction="sum") / 50,
    "a copy": lambda t: t.mean((t.z - copy.deepcopy(t.z.detach()).sigmoid()).square()),
    "a penalty beside a sum over own rows": lambda t: (
        F.cross_entropy(t.z[t.m], t.y[t.m], reduction="sum") / MASKED
        + 0.1 * sum(p.abs().sum() for p in t.model.parameters())
    ),
    "rows by the numbers of a mask": lambda t: (
        F.cross_entropy(t.z[t.m.nonzero().view(-1)], t.y[t.m.nonzero().view(-1)], reduction="sum") / MASKED
    ),
    "labels that were picked before": lambda t: F.cross_entropy(t.z[t.m], t.labels, reduction="sum") / MASKED,
    "a mask of its own": lambda t: (t.z[t.m & (t.y > 1)].square().sum(1) * t.y[t.m & (t.y > 1)]).sum(),
    "a penalty that the model returns": lambda t: t.loss(t.z) + (t.alike(t.model.penalised(t.x, t.graph)[1])),
    "rows times a value of all": lambda t: t.mean((t.z / gram(t)).tanh()),
    "a step against a loss": lambda t: adversarial(t, torch.sign),
    "another model": lambda t: t.mean((t.z - teacher(t)).square()),
    "rows in a memory": lambda t: kept(t, t.z),
    "in place": in_place,
    "a scaled loss": with_scaler,
    "as many prototypes as own rows": lambda t: sum(to_prototypes(t, count) for count in COUNTS),
    "candidates of all ranks": to_candidates,
    "volumes": lambda t: t.mean(t.z * t.added(t.x[:, 0].exp() @ t.z).detach()),
    "a dummy scale that ranks add up": dummy_scale,
    "the entry of a label": lambda t: -t.mean(t.z.log_softmax(1)[torch.arange(t.z.size(0)), t.y % 8]),
    "a size and the rest": lambda t: t.mean(
        t.z.view(t.z.size(0), -1) * t.z.reshape((*t.z.shape[:-1], 2, -1)).sum(1)[:, :1]
    ),
    "a distribution of each node": lambda t: t.mean(-normal(t.z).log_prob(t.z.detach())),
    "the largest of all ranks": lambda t: t.mean(t.z * of_all(t, t.x.double().amax(0).max(), "max")),
    "candidates of each node": lambda t: t.mean(at_ids(t, 0).square().logsumexp((1, 2))),
    "triples": lambda t: t.mean(sum(at_ids(t, 1).unbind(0))),
    "tables with as many entries as own rows": lambda t: sum(by_label(t, count) for count in COUNTS),
    "weights by degree": lambda t: t.mean(t.z * degrees(t).log1p()[:, None]),
    "weights by degree and its mean": lambda t: t.mean(t.z[:, 0] * degrees(t) / t.mean(degrees(t)).detach()),
    "sums of classes that are added": lambda t: (
        t.loss(t.z) + t.alike(t.added(torch.zeros(4, 8).double().index_add(0, t.y.remainder(4), t.z)).square().sum())
    ),
    "a loss times the value of another": lambda t: t.loss(t.z) + t.mean(t.z.square()) * t.loss(t.z).detach(),
    "what the model keeps": lambda t: t.loss(t.z) + t.mean(t.model.hidden.abs()) + t.model.layers[0].square().sum(),
    "what hooks catch": lambda t: caught(t, ["first", "last"], lambda a, b: t.mean((a * b).abs())),
    "the third call": lambda t: in_third_call(t, lambda z: t.mean(z.square())),
    "what a method makes of rows": lambda t: t.mean(t.model.decode(t.z)),
    "differences along edges": lambda t: (t.z[t.graph[0] if t.comm is None else t.graph.edge_index[0]]).square().sum(),
}
CENTRES = nn.Parameter(torch.zeros(4, 8).double())
SCALE = nn.Parameter(torch.ones(6).double())


class Weigh(nn.Module):
    def __init__(self):
        super().__init__()
        self.rate = nn.Parameter(torch.zeros(()).double())

    def forward(self, loss):
        return self.rate.exp() * loss + self.rate


REFUSED = {
    "a term of sums that counts for each rank": lambda t: gram(t),
    "a penalty that the model returns and that counts for each rank": lambda t: (
        t.loss(t.z) + t.model.penalised(t.x, t.graph)[1]
    ),
    "a loss that a method weighs": lambda t: t.model.weighed(t.loss(t.z)),
    "the norm of a mean that counts for each rank": lambda t: columns(t, t.z).pow(2).sum(),
    "such a norm beside a loss": lambda t: t.loss(t.z) + columns(t, t.z).pow(2).sum(),
    "a mean of a loss over nodes": lambda t: t.alike(columns(t, t.loss(t.z)[None]).sum()),
    "a sum of a mean of columns": lambda t: t.alike(columns(t, columns(t, t.z)[None], of=sp.sum).sum()),
    "a mean of a loss": lambda t: t.mean(t.loss(t.z)[None]),
    "a mean that is replicated": lambda t: t.alike(t.mean(t.z.square())),
    "a mean over rows of another model": lambda t: t.mean((t.z - teacher(t).mean(0)).square()),
    "rows by their places of another model": lambda t: t.mean((t.z @ teacher(t)[:4].t()).square()),
    "a mean in a memory": lambda t: kept(t, t.z.mean(0)),
    "rows in a tensor of its own": written,
    "half over how many rows": lambda t: t.mean(t.z.square()) * (0.5 / t.z.size(0)),
    "a mean over how many edges": lambda t: t.mean(t.z.square()) * (2.0 / edges_of(t).size(1)),
    "a mean over how many classes": lambda t: t.mean(t.z.square()) / t.y.unique().size(0),
    "a largest mean": lambda t: t.mean(t.z * of_all(t, t.x.mean(), "max")),
    "a largest maximum less one": lambda t: t.mean(t.z * of_all(t, 1 - t.x.max(), "max")),
    "a sum of sums": lambda t: t.alike(t.added(t.added(t.z.square().sum(0))).sum()),
    "weights by degree over its maximum": lambda t: t.mean(t.z[:, 0] * degrees(t) / degrees(t).max()),
    "counts of pairs in a tensor of its own": lambda t: t.mean(t.z[:, :4] @ pairs_of_labels(t)),
    "a product in its own tensor": lambda t: t.mean(t.z @ torch.zeros(8, 6).double().addmm_(t.z.detach().t(), t.x)),
    "a mean put out": lambda t: t.mean(t.z[:, :6] * torch.mean(t.x, 0, out=torch.empty(6).double())),
    "statistics of a norm": statistics,
    "a gradient by a dummy scale": lambda t: t.mean(t.z) * scale_gradient(t).square(),
    "a mean that a model holds": lambda t: t.loss(holding(t, t.x.mean(0))(t.x, t.graph)),
    "degrees in a tensor of its own": lambda t: t.mean(t.z[:, 0] * degrees_by_hand(t)),
    "such a term beside a loss": lambda t: t.loss(t.z) + gram(t),
    "such a term in a sum over ranks": lambda t: gram(t) if t.comm is None else sp.sum(gram(t)[None], None, t.comm),
    "centres that are parameters": lambda t: (t.z - CENTRES[t.y.remainder(4)]).square().sum(),
    "a parameter before the model": lambda t: t.loss(t.model(t.x * SCALE, t.graph)),
    "a loss in a wrapped module": lambda t: (Weigh() if t.comm is None else sp.pyg.wrap(Weigh(), t.comm))(t.loss(t.z)),
    "a step by a norm": lambda t: adversarial(t, lambda slope: slope / slope.norm()),
    "a mean over own rows": lambda t: F.cross_entropy(t.z[t.m], t.y[t.m]),
    "a mean of squares": lambda t: t.z.square().mean(),
    "a contrast of own rows": lambda t: t.mean(
        F.cross_entropy(t.z @ t.z.t(), torch.arange(len(t.x)), reduction="none")
    ),
    "centred by own rows": lambda t: t.mean((t.z - t.z.mean(0)).square()),
    "a deviation of own rows": lambda t: F.relu(1 - t.z.std(0)).sum(),
    "divided by a mean": lambda t: t.mean((t.z / (t.mean(t.z.abs()) + 1)).tanh()),
    "a penalty in a sum over ranks": lambda t: t.added(t.z.square().sum() + t.model.head.weight.square().sum()),
    "a sum times one over their number": lambda t: t.z.square().sum() * (1 / t.y.shape[0]),
    "features by their own mean": lambda t: t.loss(t.model(t.x - t.x.mean(0), t.graph)),
    "weights by their own sum": lambda t: t.mean(t.z.square().sum(1) * t.x[:, 0] / t.x[:, 0].sum()),
    "features in another order": lambda t: t.loss(t.model(t.x[torch.arange(len(t.x)).flip(0)], t.graph)),
    "classes by their own counts": lambda t: t.mean(t.z.square().sum(1) * (1 + torch.bincount(t.y))[t.y]),
    "counts written into a tensor": lambda t: t.mean(t.z.square().sum(1) * counted(t.y)[t.y]),
    "a sum times a parameter": lambda t: t.model.rate * t.z.square().sum(),
    "rows times a parameter": lambda t: t.mean((t.model.rate * t.z).square()),
    "an auxiliary mean of own rows": lambda t: t.loss(t.z) + t.z.abs().mean(),
    "a hook that divides by a norm": lambda t: hooked(t, lambda g: g / g.norm()),
    "a mean of a batch": lambda t: F.kl_div(
        F.log_softmax(t.z / 2, 1), F.softmax(t.z.detach(), 1), reduction="batchmean"
    ),
    "the largest losses": lambda t: F.cross_entropy(t.z, t.y, reduction="none").topk(3).values.mean(),
    "rows by numbers": lambda t: t.mean(t.z[torch.arange(3)].sum(1)),
    "a mean that a function returns": lambda t: SameRows.apply(t.z.mean(0)).square().sum(),
    "a function whose gradient mixes rows": lambda t: t.mean(Centred.apply(t.z).square()),
    "another module": lambda t: t.mean(OTHER(t.z).square()),
    "what the model keeps, in a mean": lambda t: t.loss(t.z) + t.model.hidden.mean(0).square().sum(),
    "a list that the model keeps, in a mean": lambda t: t.loss(t.z) + t.model.layers[0].mean(0).square().sum(),
    "what a hook catches, in a mean": lambda t: caught(t, ["first"], lambda h: h.mean(0).square().sum()),
    "a mean in the third call": lambda t: in_third_call(t, lambda z: z.mean(0).square().sum()),
    "what a method makes of rows, in a mean": lambda t: t.model.decode(t.z).mean(),
    "a sum over columns by vmap": lambda t: torch.vmap(lambda c: c.square().mean(), in_dims=1)(t.z).sum(),
    "weights by a mean of means": lambda t: t.mean(t.z.square().sum(1) * reduced(t, t.x[:, 0].mean())),
    "a sum of ours over one more than own rows": lambda t: (
        (t.z.square().sum() if t.comm is None else sp.sum(t.z.square().sum(1), None, t.comm)) / (t.z.size(0) + 1)
    ),
    "a mean times a root of their number": lambda t: t.mean(t.z.square()) * t.z.shape[0] ** 0.5,
    "a mean over a floating point number of them": lambda t: t.mean(t.z.square()) * (1.0 / len(t.z)),
    "divided by the largest": lambda t: t.mean(t.z / t.z.abs().max()),
}


def gradients(t, loss):
    loss(t).backward()
    return [parameter.grad for parameter in t.model.parameters()]


@pytest.mark.parametrize(("name", "ranks"), one_each(EXACT, (3, 4, 1)))
def test_what_takes_in_all_rows_is_exact_without_a_warning(name, ranks):
    expected = gradients(Task(), EXACT[name])

    def work(comm):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return gradients(Task(comm), EXACT[name])

    for found in run(work, ranks):
        for mine, want in zip(found, expected):
            torch.testing.assert_close(mine, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", some_by_default(REFUSED, *[*REFUSED][::4]))
def test_one_rank_has_all_rows(name):
    expected = gradients(Task(), REFUSED[name])
    found = gradients(Task(sp.connect("local")), REFUSED[name])
    for mine, want in zip(found, expected):
        torch.testing.assert_close(mine, want, rtol=1e-10, atol=1e-10)


@pytest.mark.ranks
@pytest.mark.parametrize(("name", "ranks"), one_each(REFUSED, (3, 4)))
def test_what_takes_in_own_rows_alone_is_refused_at_its_line(comm, name, ranks):
    with pytest.raises(RefusedError, match=r"around_model\.py:\d+: "):
        gradients(Task(comm), REFUSED[name])


@pytest.mark.ranks(3)
def test_a_mean_of_columns_is_told_how_it_is_written(comm):
    task = Task(comm)
    with pytest.raises(RefusedError, match=r"`mean` .* use shardpass\.mean\(rows, None, comm, dim=0\), and shardpass"):
        task.z.mean(0).pow(2).sum().backward()
    with pytest.raises(RefusedError, match=r"`mean` .* use shardpass\.cross_entropy, or shardpass\.mean of a value"):
        task.z.mean().backward()
