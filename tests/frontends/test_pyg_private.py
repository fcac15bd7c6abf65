"""What we use of PyG beyond its documented interface is there; where it is not, the test says which name vanished."""

import importlib
import re
from pathlib import Path

import pytest

pytest.importorskip("torch_geometric")

import torch_geometric
import torch_geometric.nn as gnn
from torch import nn
from torch_geometric.nn import attention

import shardpass.frontends.pyg as frontend
from shardpass.frontends.pyg import private

from .model_cases import Variational
from .pyg_cases import GRAPH

RELEASE = f"PyG {torch_geometric.__version__}"


@pytest.mark.parametrize("name", sorted(private.MESSAGE_PASSING))
def test_layers(name):
    assert hasattr(gnn.GATConv(3, 4), name), f"{RELEASE}: MessagePassing has no {name!r} any more"


@pytest.mark.parametrize("name", sorted(private.INSPECTOR))
def test_inspector(name):
    assert callable(getattr(gnn.GATConv(3, 4).inspector, name, None)), f"{RELEASE}: its inspector has no {name!r}"


def encoded():
    model = gnn.VGAE(Variational()).double()
    model.encode(GRAPH.node["x"], GRAPH.edge_index)
    return model


EXAMPLES = {
    "Sequential": lambda: gnn.Sequential("x", [(nn.ReLU(), "x -> x")]),
    "GraphNorm": lambda: gnn.GraphNorm(3),
    "InstanceNorm": lambda: gnn.InstanceNorm(3),
    "LayerNorm": lambda: gnn.LayerNorm(3),
    "PairNorm": lambda: gnn.PairNorm(),
    "BatchNorm": lambda: gnn.BatchNorm(3),
    "HeteroBatchNorm": lambda: gnn.HeteroBatchNorm(3, 2),
    "GPSConv": lambda: gnn.GPSConv(4, None),
    "HGTConv": lambda: gnn.HGTConv(3, 4, (["a"], [("a", "to", "a")])),
    "RGCNConv": lambda: gnn.RGCNConv(3, 4, 2),
    "GATConv": lambda: gnn.GATConv(3, 4),
    "PerformerAttention": lambda: attention.PerformerAttention(4, 2),
    "PerformerProjection": lambda: attention.PerformerAttention(4, 2).fast_attn,
    "SGFormerAttention": lambda: attention.SGFormerAttention(4),
    "PolynormerAttention": lambda: attention.PolynormerAttention(4, 2, qk_shared=False),
    "AttentiveFP": lambda: gnn.AttentiveFP(3, 4, 2, 2, 2, 2),
    "CorrectAndSmooth": lambda: gnn.CorrectAndSmooth(2, 0.5, 2, 0.5),
    "VGAE": encoded,
    "ARGA": lambda: gnn.ARGA(nn.Linear(3, 4), nn.Linear(4, 1)),
    "GroupAddRev": lambda: gnn.GroupAddRev(gnn.GCNConv(2, 2), num_groups=2),
    "DeepGCNLayer": lambda: gnn.DeepGCNLayer(gnn.GCNConv(3, 3)),
}


@pytest.mark.parametrize("name", private.ATTRIBUTES)
def test_attributes(name):
    instance = EXAMPLES[name]()
    assert type(instance).__name__ == name
    missing = [attribute for attribute in private.ATTRIBUTES[name].split() if not hasattr(instance, attribute)]
    assert not missing, f"{RELEASE}: {name} has no {missing} any more"


@pytest.mark.parametrize("module", private.FUNCTIONS)
def test_functions(module):
    missing = [name for name in private.FUNCTIONS[module].split() if not hasattr(importlib.import_module(module), name)]
    assert not missing, f"{RELEASE}: {module} has no {missing} any more"


def found(path):
    module, _, names = path.partition(":")
    value = importlib.import_module(module)
    for name in names.split("."):
        value = getattr(value, name)
    return value


@pytest.mark.parametrize("path", private.METHODS)
def test_methods(path):
    missing = [name for name in private.METHODS[path] if name not in vars(found(path))]
    assert not missing, f"{RELEASE}: {path} has no {missing} any more"


@pytest.mark.parametrize("path", private.GLOBALS)
def test_global_names(path):
    missing = [name for name in private.GLOBALS[path] if name not in found(path).__code__.co_names]
    assert not missing, f"{RELEASE}: {path} does not use {missing} any more"


def test_caches():
    layer = gnn.GCNConv(3, 4, cached=True)
    assert set(private.CACHES) & set(vars(layer)) == {"_cached_edge_index", "_cached_adj_t"}
    assert "_cached_x" in vars(gnn.SGConv(3, 4)) and "_cached_h" in vars(gnn.SSGConv(3, 4, 0.1))


FILES = sorted(Path(frontend.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_other_private_names_are_used(path):
    """In the code of the frontend: attributes of a layer, called `conv` or `module` there, that begin with one _."""
    ours = {"_shardpass_wrapped"}
    of_torch = {"_register_deepcopy_hook", "_buffers"}
    used = set(re.findall(r"\b(?:conv|module|model|layer)\.(_[a-z]\w*)", path.read_text()))
    unlisted = used - private.MESSAGE_PASSING - ours - of_torch
    assert not unlisted, f"{path.name}: add {sorted(unlisted)} to private.py"


def test_only_listed_globals_are_exchanged():
    listed = frozenset().union(*private.GLOBALS.values())
    used = {name for path in FILES for name in re.findall(r"with_names\(\w+, (\w+)=", path.read_text())}
    assert used == listed
