"""The engine with its tensors on a device whose memory the host cannot touch."""

import pytest
import torch
from torch_geometric.data import Data

import shardpass as sp
from shardpass.testing.run import run

from .device_program import compare, train_on_both, whole_graph

pytestmark = pytest.mark.processes
LATER = [(3, "keep"), (3, "halo"), (1, "sar")]


@pytest.mark.parametrize(
    ("ranks", "mode"), [(3, "sar"), *(pytest.param(*case, marks=pytest.mark.long) for case in LATER)]
)
def test_models_equal_the_whole_graph_and_no_rows_go_over_the_host(tmp_path, ranks, mode):
    sp.partition(whole_graph(), tmp_path / "store", ranks, "random")
    for errors, copies in run(compare, ranks, "processes", args=(str(tmp_path / "store"), mode)):
        assert {name: error for name, error in errors.items() if not error < 1e-10} == {}
        assert copies == []


def test_a_run_is_that_of_cpus(tmp_path):
    torch.manual_seed(0)
    x, edge_index = torch.randn(60, 6, dtype=torch.float64), torch.randint(0, 60, (2, 240))
    data = Data(x=x, edge_index=edge_index, y=torch.randint(0, 3, (60,)), train_mask=torch.rand(60) < 0.7)
    sp.partition(data, tmp_path / "store", 3, "random")
    for on_cpu, on_device in run(train_on_both, 3, "processes", args=(str(tmp_path / "store"), str(tmp_path))):
        for name, expected in on_cpu.items():
            torch.testing.assert_close(on_device[name], expected, rtol=1e-10, atol=1e-10, msg=name)
