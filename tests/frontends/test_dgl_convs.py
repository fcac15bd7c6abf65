"""Every layer of `dgl.nn` is exact on a sharded graph: outputs, gradients of inputs, edges and parameters, buffers."""

import pytest

pytest.importorskip("dgl")

from .dgl_cases import CONVS, FLOAT32, graph_of
from .dgl_parity import BOUND, assert_dgl_exact, float64  # noqa: F401
from .how_much import in_turn


@pytest.mark.parametrize(("name", "ranks", "modes"), in_turn(CONVS))
def test_layer_equals_the_whole_graph(name, ranks, modes):
    assert_dgl_exact(CONVS[name], graph_of(name), ranks, modes, 1e-5 if name.split()[0] in FLOAT32 else BOUND)
