"""Every layer of `dgl.nn` is exact on a sharded graph: outputs, gradients of inputs, edges and parameters, buffers."""

from __future__ import annotations

import pytest

pytest.importorskip("dgl")

from .dgl_cases import CONVS, FLOAT32, graph_of
from .dgl_parity import BOUND, EVERY_MODE, assert_dgl_exact, float64  # noqa: F401


def bound(name):
    return 1e-5 if name.split()[0] in FLOAT32 else BOUND


@pytest.mark.parametrize("name", CONVS)
def test_layer_equals_the_whole_graph(name):
    assert_dgl_exact(CONVS[name], graph_of(name), bound=bound(name))


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", CONVS)
def test_layer_equals_the_whole_graph_in_every_mode(name, ranks):
    assert_dgl_exact(CONVS[name], graph_of(name), ranks, EVERY_MODE, bound(name))
