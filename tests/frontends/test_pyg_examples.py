"""The models of PyG's ``examples/`` run unchanged with the graph in place of ``edge_index`` or ``data``."""

from __future__ import annotations

import pytest

pytest.importorskip("torch_geometric")

import shardpass as sp

from .example_models import EXAMPLES
from .how_much import SOME_OR_ALL, assert_case_exact
from .pyg_cases import GRAPH


@pytest.mark.parametrize(("ranks", "every_mode"), SOME_OR_ALL)
@pytest.mark.parametrize("name", EXAMPLES)
def test_example_equals_the_whole_graph(name, ranks, every_mode):
    assert_case_exact(EXAMPLES[name], GRAPH, sp.pyg.wrap, ranks, every_mode)
