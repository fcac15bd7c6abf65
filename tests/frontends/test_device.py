"""The engine with its tensors on a GPU, or on a device whose memory the host cannot touch."""

import copy

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.nn import GAT, GATv2Conv, TransformerConv
from torch_geometric.nn.models import GraphSAGE

import shardpass as sp
from shardpass.testing.run import run

from .device_callers import data, different_of_pyg
from .device_program import CASES as MODELS
from .device_program import SOME, compare, train_on_both, whole_graph
from .fake_device import NAME

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU of CUDA")]
LATER = [(3, "sar"), (3, "keep"), (3, "halo"), (1, "sar")]
CASES = [
    pytest.param(NAME, 3, "sar", SOME),
    *(pytest.param(NAME, *case, tuple(MODELS), marks=pytest.mark.long) for case in LATER),
    *(pytest.param("cuda", *case, tuple(MODELS), marks=GPU) for case in ((1, "sar"), (2, "sar"), (2, "halo"))),
]


@pytest.mark.processes
@pytest.mark.parametrize(("kind", "ranks", "mode", "names"), CASES)
def test_models_equal_the_whole_graph_and_no_rows_go_over_the_host(tmp_path, kind, ranks, mode, names):
    sp.partition(whole_graph(), tmp_path / "store", ranks, "random")
    for errors, copies in run(compare, ranks, "processes", args=(kind, str(tmp_path / "store"), mode, names)):
        assert {name: error for name, error in errors.items() if not error < 1e-10} == {}
        assert copies == []


@pytest.mark.processes
@pytest.mark.parametrize(("kind", "ranks"), [(NAME, 2), pytest.param("cuda", 2, marks=GPU)])
def test_a_run_is_that_of_cpus(tmp_path, kind, ranks):
    torch.manual_seed(0)
    x, edge_index = torch.randn(60, 6, dtype=torch.float64), torch.randint(0, 60, (2, 240))
    data = Data(x=x, edge_index=edge_index, y=torch.randint(0, 3, (60,)), train_mask=torch.rand(60) < 0.7)
    sp.partition(data, tmp_path / "store", ranks, "random")
    for on_cpu, on_device in run(
        train_on_both, ranks, "processes", args=(kind, str(tmp_path / "store"), str(tmp_path))
    ):
        for name, expected in on_cpu.items():
            torch.testing.assert_close(on_device[name], expected, rtol=1e-10, atol=1e-10, msg=name)


EVERY = pytest.param(NAME, 3, 1, {}, marks=pytest.mark.long)
STREAMED = [pytest.param(NAME, ranks, 1, {"stream_structure": True}, marks=pytest.mark.long) for ranks in (1, 2)]
CUDA = [pytest.param("cuda", *case, marks=GPU) for case in ((1, 1, {}), (2, 1, {}), (2, 1, {"mode": "keep"}))]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "ranks", "step", "options"), [(NAME, 1, 1, {}), (NAME, 2, 3, {}), EVERY, *STREAMED, *CUDA]
)
def test_any_tensor_of_a_script_gives_what_it_gives_on_cpus(tmp_path, kind, ranks, step, options):
    sp.partition(data(), tmp_path / "store", 3, "random")
    args = kind, str(tmp_path / "store"), sp.Options(**options), step
    assert run(different_of_pyg, ranks, "processes", args=args) == [{}] * ranks


@pytest.mark.processes
@pytest.mark.parametrize(("ranks", "step"), [(1, 1), (2, 3), pytest.param(3, 1, marks=pytest.mark.long)])
def test_any_tensor_of_a_script_of_dgl_gives_what_it_gives_on_cpus(tmp_path, ranks, step):
    pytest.importorskip("dgl")
    from .device_callers_dgl import different_of_dgl

    sp.partition(data(), tmp_path / "store", 3, "random")
    args = NAME, str(tmp_path / "store"), sp.Options(), step
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
