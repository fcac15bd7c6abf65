"""`assert_exact`: a model gives the same numbers on a sharded graph as on the whole graph in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from shardpass.core.ranks import MODES, Mode, Options, Ranks
from shardpass.testing.graphs import WholeGraph, assignments
from shardpass.testing.hetero import WholeHeteroGraph, hetero_assignments
from shardpass.testing.parity import Caller, HeteroCaller, Outcome, differences, evaluate_sharded, evaluate_whole

BOUND = 1e-10


def assert_exact(
    model: nn.Module,
    graph: WholeGraph | WholeHeteroGraph,
    call: Caller | HeteroCaller,
    wrap: Callable[[nn.Module, Ranks], nn.Module],
    *,
    ranks: int | Iterable[int] = (1, 2, 3, 4),
    modes: Iterable[Mode] = MODES,
    owners: Mapping[str, Any] | None = None,
    options: Options | None = None,
    bound: float = BOUND,
    relative: bool = False,
    order: int = 1,
) -> None:
    """Raise unless `model` gives the same numbers sharded, on every number of ranks and in every mode, as whole.

    Outputs, gradients of node fields, edge fields and parameters, and buffers are compared element by element. Use
    float64, in which differences of rounding stay far below the bound. The ranks are threads of this process.

    Args:
        model: as built, not wrapped. It is not changed; every run has a copy.
        graph: in one piece, with the node and edge fields that `call` reads.
        call: ``call(model, fields, edges)`` calls the model and returns its output. `fields` are tensors by name, and
            `edges` is an ``edge_index`` or the sharded graph. With a `WholeHeteroGraph`, fields are by type, `edges`
            is a dict of ``edge_index`` or the sharded graph, and the output is a dict of rows by node type.
        wrap: prepares a copy of the model for a sharded graph, as `shardpass.pyg.wrap` does.
        ranks: numbers of ranks.
        modes: see `Options`.
        owners: owners of nodes by a name for messages, in place of those of `assignments` or `hetero_assignments`.
        options: all but the mode.
        bound: the largest error allowed.
        relative: divide errors of a tensor by its largest entry, if that is above 1.
        order: of the derivatives. With 2, the loss has a part that is made of its gradients by the fields, as forces
            are; with 3, of the gradients of that, too.

    Raises:
        AssertionError: naming ranks, owners, mode, and the tensors that differ.
    """
    whole, modes = evaluate_whole(model, graph, call, order), tuple(modes)
    for count in (ranks,) if isinstance(ranks, int) else ranks:
        for name, owner in (_owners_of(graph, count) if owners is None else owners).items():
            for mode in modes:
                chosen = replace(options or Options(), mode=mode)
                sharded = evaluate_sharded(model, graph, call, owner, count, wrap, chosen, whole, order)
                where = f"{type(model).__name__} on {count} ranks, owners {name!r}, mode {mode!r}"
                assert_same(whole, sharded, where, bound=bound, relative=relative)


def assert_same(
    whole: Outcome, sharded: Outcome, where: str = "the sharded run", *, bound: float = BOUND, relative: bool = False
) -> None:
    """Raise unless every tensor of `sharded` equals that of `whole` up to `bound`.

    Args:
        where: what ran, for the message.
        bound, relative: as in `assert_exact`.

    Raises:
        AssertionError: naming the tensors that differ.
    """
    wrong = {name: error for name, error in differences(whole, sharded, relative).items() if not error <= bound}
    if wrong:
        found = ", ".join(f"{name} by {error:.1e}" for name, error in wrong.items())
        raise AssertionError(f"{where} differs from the whole graph: {found}; at most {bound:.0e} is expected")


def _owners_of(graph: WholeGraph | WholeHeteroGraph, ranks: int) -> Mapping[str, Any]:
    if isinstance(graph, WholeHeteroGraph):
        return hetero_assignments(graph, ranks)
    return assignments(graph.num_nodes, ranks, graph.edge_index)
