"""Programs that differentiate gradients and were wrong, or refused for a wrong reason."""

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn

pytest.importorskip("torch_geometric")

from torch_geometric.nn import GCNConv

import shardpass as sp
from shardpass.core.ranks import plain_of
from shardpass.errors import RefusedError
from tests.frontends import force_models as models

DATA = models.structures()
ALONE = torch.tensor([2, 3, *[0, 1] * 19])  # rank 4 has no nodes, and ranks 2 and 3 have one each


pytestmark = pytest.mark.usefixtures("doubles")


class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = GCNConv(3, 5), GCNConv(5, 3)

    def forward(self, pos, edge_index):
        return self.second(torch.tanh(self.first(pos, edge_index)), edge_index)


class Strained(models.Energies):
    """A strain of the edges alone, which a rank without edges does not use."""

    def forward(self, z, pos, edge_index, shifts, strain):
        return super().forward(z, pos, edge_index, shifts + shifts @ strain)


def made(kind):
    torch.manual_seed(0)
    return kind()


def on_ranks(run, kind, ranks=3, parts=None, **options):
    """What ``run(model, graph, comm)`` gives on rank 0."""
    copies = [made(kind) for _ in range(ranks)]

    def work(comm):
        graph = sp.shard(DATA, comm, parts=parts)
        return run(sp.pyg.wrap(copies[comm.rank], comm, **options), graph, comm)

    return sp.spawn(work, ranks)[0]


def slopes(model, graph, **options):
    """A loss, and its gradients by the parameters, which may be differentiated."""
    out = model(graph.pos, graph.edge_index)
    loss = (out - graph.y).square().sum()
    return out, loss, torch.autograd.grad(loss, [*model.parameters()], create_graph=True, **options)


def of_parameters(model):
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_penalty_on_gradients_counts_once_within_replicated_too(ranks):
    def run(model, graph, comm=None):
        penalty = sum(slope.square().sum() for slope in slopes(model, graph)[2])
        (penalty if comm is None else sp.replicated(penalty, comm)).backward()
        return of_parameters(model)

    torch.testing.assert_close(on_ranks(run, Rows, ranks), run(made(Rows), DATA), rtol=1e-10, atol=1e-10)


def test_a_penalty_on_gradients_is_differentiated_by_rows():
    def run(model, graph, comm=None):
        pos = graph.pos.clone().requires_grad_()
        loss = (model(pos, graph.edge_index) - graph.y).square().sum()
        penalty = sum(s.square().sum() for s in torch.autograd.grad(loss, [*model.parameters()], create_graph=True))
        (found,) = torch.autograd.grad(penalty, pos)
        return found if comm is None else graph.whole(plain_of(found))

    torch.testing.assert_close(on_ranks(run, Rows), run(made(Rows), DATA), rtol=1e-10, atol=1e-10)


def rows_weighed_by_slopes(model, graph, comm):
    out, _, found = slopes(model, graph)
    (out * found[0].sum()).sum().backward()


def slopes_in_a_mean(model, graph, comm):
    out, _, found = slopes(model, graph)
    sp.mean(out.sum(1) + found[0].sum(), None, comm).backward()


def slopes_summed_again(model, graph, comm):
    sp.all_reduce_sum(slopes(model, graph)[2][0].sum(), comm)


def slopes_that_wait(model, graph, comm):
    with sp.no_sync(model):
        slopes(model, graph)


def backward_that_waits(model, graph, comm):
    with sp.no_sync(model):
        model(graph.pos, graph.edge_index).square().sum().backward(create_graph=True)


def many_at_once(model, graph, comm):
    pos = graph.pos.clone().requires_grad_()
    out = model(pos, graph.edge_index)
    torch.autograd.grad(out, pos, torch.zeros(2, *plain_of(out).shape), is_grads_batched=True)


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (rows_weighed_by_slopes, "a gradient by one, to rows outside of the wrapped model"),
        (slopes_in_a_mean, "a gradient by one, to rows outside of the wrapped model"),
        (slopes_summed_again, "is made of parameters, which every rank has alike"),
        (slopes_that_wait, "torch.autograd.grad by parameters within no_sync"),
        (backward_that_waits, "with create_graph=True within no_sync"),
        (many_at_once, "is_grads_batched=True"),
    ],
)
def test_refused_by_name(run, reason):
    with pytest.raises(RefusedError, match=reason):
        on_ranks(run, Rows)


def test_many_at_once_on_one_rank():
    with pytest.raises(RefusedError, match="is_grads_batched=True"):
        on_ranks(many_at_once, Rows, ranks=1)


@pytest.mark.parametrize("parts", [None, ALONE])
def test_a_rank_without_edges_gets_zeros(parts):
    def run(model, graph, comm=None):
        pos, strain = graph.pos.clone().requires_grad_(), torch.zeros(3, 3, requires_grad=True)
        shifts = graph.shifts.clone().requires_grad_()
        energies = model(graph.z, pos, graph.edge_index, shifts, strain)
        by = [pos, shifts, strain]
        forces, of_edges, stress = torch.autograd.grad(energies.sum(), by, create_graph=True)
        total = stress if comm is None else sp.all_reduce_sum(stress, comm)
        alike = total.square().sum()
        loss = forces.square().sum() + of_edges.square().sum()
        (loss + (alike if comm is None else sp.replicated(alike, comm))).backward()
        return plain_of(total.detach()), of_parameters(model)

    found = on_ranks(run, Strained, 5, None if parts is None else parts.clone())
    torch.testing.assert_close(found, run(made(Strained), DATA), rtol=1e-10, atol=1e-10)


class Switched(nn.Module):
    """Takes gradients in later calls only."""

    def __init__(self):
        super().__init__()
        self.rows, self.is_on = Rows(), False

    def forward(self, pos, edge_index):
        pos = pos.clone().requires_grad_()
        out = self.rows(pos, edge_index)
        return torch.autograd.grad(out.sum(), pos, create_graph=True)[0] if self.is_on else out


class Backward(Switched):
    def forward(self, pos, edge_index):
        self.rows(pos, edge_index).sum().backward()
        return pos


def test_gradients_in_a_call_that_is_not_followed_are_refused_and_the_next_is_followed():
    def run(model, graph, comm=None):
        for _ in range(2):
            model(graph.pos, graph.edge_index)
        model.is_on = True
        with pytest.raises(RefusedError, match=r"forward takes gradients in a call .* not followed.*first call"):
            model(graph.pos, graph.edge_index)
        model(graph.pos, graph.edge_index).square().sum().backward()
        return of_parameters(model)

    whole = made(Switched)
    whole.is_on = True
    whole(DATA.pos, DATA.edge_index).square().sum().backward()
    torch.testing.assert_close(on_ranks(run, Switched), of_parameters(whole), rtol=1e-10, atol=1e-10)


def test_backward_within_a_model():
    def run(model, graph, comm):
        model(graph.pos, graph.edge_index)

    with pytest.raises(RefusedError, match=r"calls backward within its forward.*Use torch\.autograd\.grad"):
        on_ranks(run, Backward)


def test_gradients_by_fields_of_a_model_that_is_not_followed():
    def run(model, graph, comm=None):
        pos = graph.pos.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(pos, graph.edge_index).square().sum(), pos, create_graph=True)
        slope.square().sum().backward()
        return of_parameters(model)

    torch.testing.assert_close(on_ranks(run, Rows, check=False), run(made(Rows), DATA), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("by_backward", [False, True])
def test_nothing_keeps_the_graph_of_autograd(by_backward):
    def run(model, graph, comm):
        pos = graph.pos.clone().requires_grad_()
        out = model(pos, graph.edge_index).square().sum()
        if by_backward:
            out.backward(create_graph=True, inputs=[pos])
            pos.grad = None
        else:
            torch.autograd.grad(out, pos, create_graph=True)
        held = weakref.ref(pos)
        del pos, out
        return held() is None

    gc.disable()
    try:
        assert on_ranks(run, Rows, 1)
        assert by_backward or on_ranks(run, Rows, 3)
    finally:
        gc.enable()


def attention(by_dgl):
    import dgl.function as fn
    from dgl.nn.functional import edge_softmax

    class Attention(nn.Module):
        def forward(self, graph, x):
            with graph.local_scope():
                graph.ndata["x"] = x
                graph.apply_edges(fn.u_sub_v("x", "x", "d"))
                scores = torch.tanh(graph.edata["d"].sum(1, keepdim=True))
                if by_dgl:
                    graph.edata["a"] = edge_softmax(graph, scores)
                else:
                    graph.edata["e"] = scores.exp()
                    graph.update_all(fn.copy_e("e", "m"), fn.sum("m", "sum"))
                    graph.apply_edges(fn.e_div_v("e", "sum", "a"))
                graph.update_all(fn.u_mul_e("x", "a", "m"), fn.sum("m", "out"))
                return graph.ndata["out"]

    return Attention


@pytest.mark.parametrize("by_dgl", [True, False])
def test_a_softmax_of_dgl_is_refused_and_what_the_refusal_says_is_exact(by_dgl):
    dgl = pytest.importorskip("dgl")
    whole = dgl.graph((DATA.edge_index[0], DATA.edge_index[1]), num_nodes=40)

    def work(comm):
        graph = sp.shard(whole, comm)
        model = sp.dgl.wrap(models_of[comm.rank], comm)
        x = graph.own(DATA.pos).requires_grad_()
        (slope,) = torch.autograd.grad(model(graph, x).square().sum(), x, create_graph=True)
        return graph.whole(plain_of(torch.autograd.grad(slope.square().sum(), x)[0]))

    models_of = [attention(by_dgl)() for _ in range(3)]
    with pytest.raises(RefusedError, match=r"edge_softmax is wrong.*e_div_v") if by_dgl else nullcontext():
        found = sp.spawn(work, 3)[0]
        x, (row, col) = DATA.pos.clone().requires_grad_(), DATA.edge_index
        scores = torch.tanh((x[row] - x[col]).sum(1, keepdim=True)).exp()
        weights = scores / torch.zeros(40, 1).index_add(0, col, scores)[col]
        out = torch.zeros(40, 3).index_add(0, col, x[row] * weights)
        (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        torch.testing.assert_close(found, torch.autograd.grad(slope.square().sum(), x)[0], rtol=1e-10, atol=1e-10)
