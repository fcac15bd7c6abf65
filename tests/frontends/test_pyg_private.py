"""What we use of PyG beyond its documented interface is there; where it is not, the test says which name vanished."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

pytest.importorskip("torch_geometric")

import torch_geometric
import torch_geometric.nn as gnn

import shardpass.frontends.pyg as frontend
from shardpass.frontends.pyg import private

RELEASE = f"PyG {torch_geometric.__version__}"


@pytest.mark.parametrize("name", sorted(private.MESSAGE_PASSING))
def test_layers(name):
    assert hasattr(gnn.GATConv(3, 4), name), f"{RELEASE}: MessagePassing has no {name!r} any more"


@pytest.mark.parametrize("name", sorted(private.INSPECTOR))
def test_inspector(name):
    assert callable(getattr(gnn.GATConv(3, 4).inspector, name, None)), f"{RELEASE}: its inspector has no {name!r}"


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


def test_no_other_private_names_are_used():
    """In the code of the frontend: attributes of a layer, called `conv` or `module` there, that begin with one _."""
    import re

    allowed = private.MESSAGE_PASSING | {
        "_shardpass_wrapped",
        "_register_deepcopy_hook",
        "_buffers",
    }  # the last are torch's
    for path in Path(frontend.__file__).parent.glob("*.py"):
        used = set(re.findall(r"\b(?:conv|module|model|layer)\.(_[a-z]\w*)", path.read_text()))
        assert used <= allowed, f"{path.name}: add {sorted(used - allowed)} to private.py"
