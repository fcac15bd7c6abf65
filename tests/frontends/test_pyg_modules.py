"""Every module class of torch_geometric.nn outside nn.conv and nn.models has a group, and is what its group says."""

import importlib
import inspect
import pkgutil

import pytest
import torch

pytest.importorskip("torch_geometric")

import torch_geometric.nn as gnn
from torch_geometric.utils import scatter

import shardpass as sp
from shardpass.errors import RefusedError
from shardpass.frontends.pyg import modules
from shardpass.frontends.pyg.norms import DISTRIBUTED
from shardpass.frontends.pyg.refusals import REFUSED, refuse_unsupported

from .one_by_one import assert_each_exact, refusals
from .pyg_cases import GRAPH

GROUPS = [
    modules.ROW_WISE,
    modules.NORMS,
    modules.ATTENTION,
    modules.READOUTS,
    modules.WHOLE_SETS,
    frozenset(modules.REFUSED),
]
ELSEWHERE = ("torch_geometric.nn.conv", "torch_geometric.nn.models")


def module_classes(inside):
    """The module classes defined under torch_geometric.nn, `inside` nn.conv and nn.models or outside them."""
    found = {}
    for info in pkgutil.walk_packages(gnn.__path__, "torch_geometric.nn."):
        if info.name.startswith(ELSEWHERE) is not inside:
            continue
        for name, kind in inspect.getmembers(importlib.import_module(info.name), inspect.isclass):
            if kind.__module__ == info.name and issubclass(kind, torch.nn.Module):
                found[name] = kind
    return found


def test_every_class_is_in_exactly_one_group():
    classes = module_classes(inside=False)
    assert len(classes) > 80
    for name in classes:
        assert sum(name in group for group in GROUPS) == 1, (
            f"{name}: say in frontends/pyg/modules.py what becomes of it"
        )
    grouped = frozenset().union(*GROUPS)
    assert not grouped - set(classes), "a class that this release of PyG does not have"


def test_no_refusal_hits_a_conv_or_a_model_of_the_same_name():
    assert not set(modules.REFUSED) & set(module_classes(inside=True))


def test_every_reason_says_what_to_do():
    for name, reason in modules.REFUSED.items():
        assert ";" in reason and REFUSED[name] == reason


@pytest.mark.parametrize("name", sorted(modules.REFUSED))
def test_refused_classes_are_refused_by_name(name):
    kind = module_classes(inside=False)[name]
    instance = kind.__new__(kind)
    torch.nn.Module.__init__(instance)
    with pytest.raises(RefusedError, match=f"^{name} \\(at '0'\\) cannot be exact on a sharded graph: "):
        refuse_unsupported(torch.nn.Sequential(instance))


def test_norms_are_swapped_or_hold_a_batch_norm_that_is():
    swapped = {kind.__name__ for kind in DISTRIBUTED}
    assert swapped <= modules.NORMS
    assert modules.NORMS - swapped == {"DiffGroupNorm"}


ROW_WISE = {
    "Linear": lambda: gnn.Linear(5, 3),
    "HeteroLinear": lambda: gnn.HeteroLinear(5, 3, 4),
    "PositionalEncoding": lambda: gnn.PositionalEncoding(6),
    "TemporalEncoding": lambda: gnn.TemporalEncoding(6),
    "HeteroLayerNorm": lambda: gnn.HeteroLayerNorm(5, 4),
    "MessageNorm": lambda: gnn.MessageNorm(),
    "Reshape": lambda: importlib.import_module("torch_geometric.nn.reshape").Reshape(-1, 5),
    "Sequential": lambda: gnn.Sequential("x", [(torch.nn.Linear(5, 4), "x -> x"), torch.nn.ReLU()]),
    "HeteroDictLinear": lambda: gnn.HeteroDictLinear({"a": 5}, 3),
}


def call_rows(name, module, x, kinds):
    if name in ("HeteroLinear", "HeteroLayerNorm"):
        return module(x, kinds)
    if name.endswith("Encoding"):
        return module(x[:, 0])
    if name == "MessageNorm":
        return module(x, x.flip(1))
    return module({"a": x})["a"] if name == "HeteroDictLinear" else module(x)


@pytest.mark.parametrize("name", ROW_WISE)
def test_row_wise_classes_give_each_row_what_it_gets_in_the_whole(name):
    torch.manual_seed(0)
    module = sp.pyg.wrap(ROW_WISE[name]().double(), sp.connect("local"))
    x, kinds = torch.randn(9, 5).double(), torch.tensor([2, 0, 1, 1, 3, 0, 2, 2, 1])
    whole = call_rows(name, module, x, kinds)
    parts = [call_rows(name, module, *part) for part in zip(x.split([4, 5]), kinds.split([4, 5]))]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=1e-12)


def _kinds(rows):
    return (rows.detach()[:, 0] > 0).long() + (rows.detach()[:, 1] > 0).long()


class Typed(torch.nn.Module):
    """A linear map for each type of row: of nodes, of picked nodes and of edges."""

    def __init__(self, is_sorted=False):
        super().__init__()
        self.lin = gnn.HeteroLinear(5, 5, 3, is_sorted=is_sorted)

    def forward(self, h, edge_index):
        chosen = h[:, 0] > 0
        picked = torch.zeros_like(h).masked_scatter(chosen.view(-1, 1), self.lin(h[chosen], _kinds(h[chosen])))
        ends = h[edge_index[0]]
        return self.lin(h, _kinds(h)) + picked + scatter(self.lin(ends, _kinds(ends)), edge_index[1], 0, h.size(0))


class Mixes(Typed):
    def forward(self, h, edge_index):
        chosen = h[:, 0] > 0
        return h + self.lin(h[chosen], _kinds(h[chosen])).mean(0)


@pytest.mark.parametrize("ranks", [1, 3])
def test_hetero_linear_is_exact_in_a_model_and_what_follows_it_is_followed(ranks):
    assert_each_exact({"typed": Typed()}, GRAPH, ranks)
    assert "`mean` puts rows together, over the picked nodes" in refusals({"mixes": Mixes()}, GRAPH, ranks)["mixes"]


def test_row_wise_classes_are_tested_or_containers():
    containers = {"ModuleDict", "ParameterDict"}
    of_several_types = {"ToHeteroLinear", "ToHeteroMessagePassing", "HeteroBasisConv", "LinearAlign"}
    assert set(ROW_WISE) | containers | of_several_types == modules.ROW_WISE
