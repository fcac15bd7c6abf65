"""What we use of DGL beyond its documented interface is there; where it is not, the test says which name vanished."""

from __future__ import annotations

import ast
import inspect
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("dgl")

import dgl
import dgl.function as fn
import dgl.nn.pytorch as dnn
import torch

import shardpass.frontends.dgl as frontend
from shardpass.core.wrapping import with_names
from shardpass.frontends import sar
from shardpass.frontends.dgl import private
from shardpass.frontends.dgl.layers import ADAPTED

RELEASE = f"DGL {dgl.__version__}"


@pytest.mark.parametrize("name", sorted(private.GLOBALS))
def test_global_names_of_layers(name):
    tree = ast.parse(textwrap.dedent(inspect.getsource(getattr(dnn, name).forward)))
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    missing = private.GLOBALS[name] - used
    assert not missing, f"{RELEASE}: {name}.forward does not use {sorted(missing)} any more"
    assert getattr(dnn, name) in ADAPTED


MADE = {
    "GatedGraphConv": lambda: dnn.GatedGraphConv(3, 4, 2, 3),
    "GroupRevRes": lambda: dnn.GroupRevRes(dnn.GraphConv(2, 2), 2),
}


@pytest.mark.parametrize("name", sorted(private.ATTRIBUTES))
def test_attributes_of_layers(name):
    missing = [attribute for attribute in private.ATTRIBUTES[name] if not hasattr(MADE[name](), attribute)]
    assert not missing, f"{RELEASE}: {name} has no {missing} any more"


def test_message_functions_say_what_they_read():
    copied, mixed, summed = fn.copy_u("h", "m"), fn.u_mul_e("h", "w", "m"), fn.sum("m", "o")
    assert isinstance(copied, private.CopyMessageFunction) and isinstance(copied, private.BuiltinFunction)
    assert (copied.target, copied.in_field, copied.out_field) == (private.TargetCode.SRC, "h", "m")
    assert isinstance(mixed, private.BinaryMessageFunction) and (mixed.binary_op, mixed.name) == ("mul", "u_mul_e")
    assert (mixed.lhs, mixed.lhs_field) == (private.TargetCode.SRC, "h")
    assert (mixed.rhs, mixed.rhs_field, mixed.out_field) == (private.TargetCode.EDGE, "w", "m")
    assert isinstance(summed, private.BuiltinFunction)
    assert (summed.name, summed.msg_field, summed.out_field) == ("sum", "m", "o")


def test_batches_of_user_defined_functions():
    rows = {"h": torch.ones(2, 1)}
    edges = private.EdgeBatch(None, torch.arange(2), ("a", "b", "c"), rows, {}, rows)
    assert edges.src["h"] is edges.dst["h"] is rows["h"] and not edges.data and edges.batch_size() == 2
    nodes = private.NodeBatch(None, torch.arange(2), "a", rows, msgs=rows)
    assert nodes.data["h"] is nodes.mailbox["h"] is rows["h"] and nodes.batch_size() == 2


def test_the_kernel_of_edge_softmax_takes_an_index():
    index = private.local_index(torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1]), 3, 2)
    assert isinstance(index, private.HeteroGraphIndex) and index.number_of_etypes() == 1
    found = private.softmax_kernel(index, torch.zeros(3, 1))
    assert found.view(-1).tolist() == [0.5, 0.5, 1.0]
    assert private.is_all(private.ALL) and not private.is_all(torch.arange(2))


def test_a_copy_of_a_function_with_other_names():
    def original(value: int = 2, *, factor: int = 3) -> int:
        return len("four") * value * factor

    copied = with_names(original, len=lambda text: 10)
    assert copied() == 60 and copied(1, factor=1) == 10 and original() == 24
    assert copied.__qualname__ == original.__qualname__


@pytest.mark.parametrize("package", [frontend, sar], ids=lambda package: package.__name__)
def test_no_frames_and_no_bytecode(package):
    for path in Path(package.__file__).parent.glob("*.py"):
        words = [word for word in ("_getframe", "currentframe", "import dis", "co_names") if word in path.read_text()]
        assert not words, f"{path.name} uses {words}"


def test_private_modules_of_dgl_are_imported_in_one_place():
    public = {"dgl", "dgl.function", "dgl.nn.pytorch", "dgl.dataloading", "dgl.distributed", "dgl.nn.functional"}
    for package in (frontend, sar):
        for path in Path(package.__file__).parent.glob("*.py"):
            nodes = list(ast.walk(ast.parse(path.read_text())))
            names = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
            names |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
            used = {name for name in names if name.split(".")[0] == "dgl"} - public
            assert not used or path.name == "private.py", f"{path.name}: move {sorted(used)} to private.py"
