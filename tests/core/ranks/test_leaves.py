"""`leaves_within`: what a value holds, however it is put together."""

import collections
import dataclasses
import types

import pytest
import torch
from torch import nn

from shardpass.core.ranks import leaves_within

ROWS = torch.arange(3.0)


@dataclasses.dataclass
class Output:
    rows: object
    name: str = "name"


Pair = collections.namedtuple("Pair", "rows other")
HOLDERS = {
    "list": [ROWS],
    "dict": {"x": ROWS},
    "named tuple": Pair(ROWS, None),
    "ParameterDict": nn.ParameterDict({"x": nn.Parameter(ROWS)}),
    "ParameterList": nn.ParameterList([nn.Parameter(ROWS)]),
    "UserDict": collections.UserDict(x=ROWS),
    "ChainMap": collections.ChainMap({}, {"x": ROWS}),
    "MappingProxyType": types.MappingProxyType({"x": ROWS}),
    "SimpleNamespace": types.SimpleNamespace(x=ROWS),
    "dataclass": Output(ROWS),
    "one in another": [collections.UserDict(x=(1, {"y": Output(types.SimpleNamespace(z=ROWS))}))],
}


@pytest.mark.parametrize("name", HOLDERS)
def test_tensors_are_found(name):
    assert [leaf for leaf in leaves_within(HOLDERS[name]) if isinstance(leaf, torch.Tensor) and leaf.equal(ROWS)]


def test_other_values_are_leaves():
    layer, made = nn.Linear(1, 1), object()
    assert leaves_within([layer, made, Output, "text", 3, None]) == [layer, made, Output, "text", 3, None]


def test_what_holds_itself_is_opened_once():
    box = types.SimpleNamespace(rows=ROWS)
    box.me = box
    assert len(leaves_within(box)) == 1
    assert len(leaves_within([box, box])) == 2
