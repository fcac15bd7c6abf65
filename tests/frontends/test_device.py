"""The engine with its tensors on a GPU, or on a device whose memory the host cannot touch."""

import copy

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.nn import GAT, GATv2Conv, TransformerConv
from torch_geometric.nn.models import GraphSAGE

import shardpass as sp
from shardpass.testing.run import run

from .device_callers import data as script_data
from .device_callers import different_of_pyg
from .device_everything import everything
from .device_program import CASES as MODELS
from .device_program import compare, train_on_both, whole_graph
from .fake_device import NAME

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU of CUDA")]
CASES = [
    *(pytest.param(NAME, 3, mode, marks=pytest.mark.long) for mode in ("sar", "keep", "halo")),
    pytest.param(NAME, 1, "sar", marks=pytest.mark.long),
    *(pytest.param("cuda", *case, marks=GPU) for case in ((1, "sar"), (2, "sar"), (2, "halo"))),
]


@pytest.mark.processes
def test_two_ranks_on_the_fake_device(tmp_path):
    """Some cases of each test below, of models and of a script, by processes that are started once."""
    sp.partition(whole_graph(), tmp_path / "store", 2, "random")
    sp.partition(script_data(), tmp_path / "script", 3, "random")
    trained_data(tmp_path / "train", 2)
    for compared, both, pyg, dgl in run(everything, 2, "processes", args=(str(tmp_path),)):
        assert_compared(*compared)
        assert_alike(*both)
        assert (pyg, dgl) == ({}, {})


@pytest.mark.processes
@pytest.mark.parametrize(("kind", "ranks", "mode"), CASES)
def test_models_equal_the_whole_graph_and_no_rows_go_over_the_host(tmp_path, kind, ranks, mode):
    sp.partition(whole_graph(), tmp_path / "store", ranks, "random")
    for found in run(compare, ranks, "processes", args=(kind, str(tmp_path / "store"), mode, tuple(MODELS))):
        assert_compared(*found)


def assert_compared(errors, copies):
    assert {name: error for name, error in errors.items() if not error < 1e-10} == {}
    assert copies == []


def trained_data(path, ranks):
    torch.manual_seed(0)
    x, edge_index = torch.randn(60, 6, dtype=torch.float64), torch.randint(0, 60, (2, 240))
    data = Data(x=x, edge_index=edge_index, y=torch.randint(0, 3, (60,)), train_mask=torch.rand(60) < 0.7)
    sp.partition(data, path, ranks, "random")


def assert_alike(on_cpu, on_device):
    for name, expected in on_cpu.items():
        torch.testing.assert_close(on_device[name], expected, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.processes
@pytest.mark.parametrize(("kind", "ranks"), [pytest.param("cuda", 2, marks=GPU)])
def test_a_run_is_that_of_cpus(tmp_path, kind, ranks):
    trained_data(tmp_path / "store", ranks)
    for both in run(train_on_both, ranks, "processes", args=(kind, str(tmp_path / "store"), str(tmp_path))):
        assert_alike(*both)


EVERY = [(NAME, 1, {}), (NAME, 3, {}), (NAME, 1, {"stream_structure": True}), (NAME, 2, {"stream_structure": True})]
CUDA = [("cuda", 1, {}), ("cuda", 2, {}), ("cuda", 2, {"mode": "keep"})]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "ranks", "options"),
    [*(pytest.param(*case, marks=pytest.mark.long) for case in EVERY), *(pytest.param(*c, marks=GPU) for c in CUDA)],
)
def test_any_tensor_of_a_script_gives_what_it_gives_on_cpus(tmp_path, kind, ranks, options):
    sp.partition(script_data(), tmp_path / "store", 3, "random")
    args = kind, str(tmp_path / "store"), sp.Options(**options), 1
    assert run(different_of_pyg, ranks, "processes", args=args) == [{}] * ranks


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("ranks", [1, 3])
def test_any_tensor_of_a_script_of_dgl_gives_what_it_gives_on_cpus(tmp_path, ranks):
    pytest.importorskip("dgl")
    from .device_callers_dgl import different_of_dgl

    sp.partition(script_data(), tmp_path / "store", 3, "random")
    args = NAME, str(tmp_path / "store"), sp.Options(), 1
    assert run(different_of_dgl, ranks, "processes", args=args) == [{}] * ranks


def on_the_gpu(tmp_path, num_nodes, degree, width, options=None):
    """Plain tensors of a random graph, and the same graph as one rank of shardpass, all on the GPU but the edges."""
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.randint(0, num_nodes, (2, num_nodes * degree), generator=generator)
    x = torch.randn(num_nodes, width, generator=generator)
    sp.partition(Data(x=x, edge_index=edge_index), tmp_path / "store", 1, "range")
    comm = sp.connect("local", device="cuda")
    return x.cuda(), edge_index, sp.load(tmp_path / "store", comm, options or sp.Options()), comm


def step(model, x, edges):
    """The output and all gradients."""
    model.zero_grad()
    x = x.detach().requires_grad_()
    out = model(x, edges)
    (out * torch.linspace(-1, 1, out.size(1), device=out.device)).sum().backward()
    return [out.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU of CUDA")
@pytest.mark.parametrize("make", [
    lambda: GAT(16, 32, 2, 8, heads=4), lambda: GAT(16, 32, 2, 8, heads=4, v2=True),
    lambda: TransformerConv(16, 8, 4), lambda: GATv2Conv(16, 8, 4, share_weights=True),
    lambda: GraphSAGE(16, 32, 2, 8, aggr="max"),
])  # fmt: skip
class TestOnAGpu:
    def test_a_hundred_runs_have_the_same_bits(self, tmp_path, make):
        x, _, graph, comm = on_the_gpu(tmp_path, 5_000, 30, 16)
        torch.manual_seed(0)
        model = sp.pyg.wrap(make().cuda(), comm)
        first = step(model, x, graph)
        for _ in range(100):
            for one, other in zip(first, step(model, x, graph)):
                assert torch.equal(one, other)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_autocast_is_that_of_the_whole_graph(self, tmp_path, make, dtype):
        x, edge_index, graph, comm = on_the_gpu(tmp_path, 2_000, 10, 16)
        torch.manual_seed(0)
        plain = make().cuda()
        exact = step(plain, x, edge_index.cuda())
        with torch.autocast("cuda", dtype):
            whole = step(plain, x, edge_index.cuda())
            mine = step(sp.pyg.wrap(copy.deepcopy(plain), comm), x, graph)
        for right, other, found in zip(exact, whole, mine):
            scale = right.float().abs().max()
            assert (found.float() - right).abs().max() <= 2 * (other.float() - right).abs().max() + 0.02 * scale


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU of CUDA")
def test_a_graph_of_which_plain_pyg_needs_three_times_the_memory(tmp_path):
    x, edge_index, graph, comm = on_the_gpu(tmp_path, 50_000, 60, 64, sp.Options(stream_structure=True))
    torch.manual_seed(0)
    plain = GAT(64, 64, 2, 16, heads=4).cuda()
    torch.cuda.reset_peak_memory_stats()
    step(plain, x, edge_index.cuda())
    needed, total = torch.cuda.max_memory_allocated(), torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(needed / 3 / total)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            step(plain, x, edge_index.cuda())
        torch.cuda.empty_cache()
        step(sp.pyg.wrap(plain, comm), x, graph)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
