"""SAR's documented names: scripts as its documentation has them, as processes, against one process with DGL."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardpass as sp
from shardpass.errors import CommunicationError, RefusedError, ShardpassError

dgl = pytest.importorskip("dgl")
sys.path.insert(0, str(Path(__file__).parent))

import dgl.function as fn  # noqa: E402
import dgl.nn.pytorch as dnn  # noqa: E402
import sar_program as program  # noqa: E402

from shardpass.frontends import sar  # noqa: E402
from shardpass.frontends.sar._state import STATE  # noqa: E402

TESTS = Path(__file__).parent.parent
sys.path.insert(0, str(TESTS / "backends"))
from launchers import free_port, mpirun, needs_mpi  # noqa: E402

NODES, EDGES = 60, 420
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")
RANKS = 3

DOCUMENTED = """
initialize_comms nfs_ip_init rank world_size comm_device is_initialized sync_params gather_grads load_dgl_partition_data
construct_full_graph construct_mfgs convert_dist_graph GraphShardManager message_has_parameters edge_softmax
patched_edge_softmax DistributedBN1D patch_dgl RelGraphConv Config suffix_key_lookup logging_setup PartitionData
ShardEdgesAndFeatures comm core
""".split()


# ---- graphs


def homogeneous(self_loops: bool = True) -> Any:
    torch.manual_seed(0)
    src, dst = torch.randint(NODES - 5, (2, EDGES))
    g = dgl.graph((src, dst), num_nodes=NODES)
    g = dgl.add_self_loop(g) if self_loops else g
    g.ndata["feat"] = torch.randn(NODES, 8, dtype=torch.float64)
    g.ndata["xfeat"] = torch.arange(NODES)
    g.ndata["label"] = torch.randint(3, (NODES,))
    g.ndata["train_mask"] = torch.arange(NODES) % 3 == 0
    g.ndata["test_mask"] = torch.arange(NODES) % 3 == 1
    g.ndata["orig_id"] = torch.arange(NODES)
    g.edata["w"] = torch.rand(g.num_edges(), dtype=torch.float64)
    g.edata["orig_id"] = torch.arange(g.num_edges())
    return g


def heterogeneous() -> Any:
    torch.manual_seed(1)
    sizes = {"user": 30, "item": 24}
    kinds = [("user", "buys", "item"), ("item", "sold to", "user"), ("user", "knows", "user")]
    g = dgl.heterograph(
        {k: (torch.randint(sizes[k[0]], (90,)), torch.randint(sizes[k[2]], (90,))) for k in kinds}, sizes
    )
    for kind in g.ntypes:
        g.nodes[kind].data["feat"] = torch.randn(sizes[kind], 8, dtype=torch.float64)
        g.nodes[kind].data["orig_id"] = torch.arange(sizes[kind])
    g.nodes["user"].data["only"] = torch.rand(30, 2)
    for kind in g.canonical_etypes:
        g.edges[kind].data["w"] = torch.rand(90)
        g.edges[kind].data["orig_id"] = torch.arange(90)
    return g


def alphabetical() -> Any:
    """The heterogeneous graph with its types in the order in which DGL's partitions have them."""
    g = heterogeneous()
    kinds = sorted(g.canonical_etypes)
    nodes = sorted(g.ntypes)
    ordered = dgl.heterograph({k: g.edges(etype=k) for k in kinds}, {k: g.num_nodes(k) for k in nodes})
    for kind in kinds:
        ordered.edges[kind].data["w"] = g.edges[kind].data["w"]
    for kind in nodes:
        ordered.nodes[kind].data["feat"] = g.nodes[kind].data["feat"]
    return ordered


def write(directory: Path, parts: int) -> Path:
    for name, graph in (("homo", homogeneous()), ("bare", homogeneous(False)), ("het", heterogeneous())):
        dgl.distributed.partition_graph(graph, name, parts, str(directory / name), part_method="random")
    return directory


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    made: dict[int, Path] = {}

    def of(count: int) -> Path:
        if count not in made:
            made[count] = write(tmp_path_factory.mktemp(f"parts{count}"), count)
        return made[count]

    return of


@pytest.fixture
def one_rank() -> Iterator[None]:
    STATE.comm = sp.connect("local")
    yield
    STATE.comm = None


# ---- processes


def start(
    directory: Path, out: Path, ranks: int, cases: list[str], limit: float = 120.0, by: str = "hand", **env: str
) -> tuple[list[Any], str, float]:
    """What the cases gave on each rank (None: it failed), all that was printed, and seconds."""
    environ = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES} | {"OMP_NUM_THREADS": "1"} | env
    environ["PYTHONPATH"] = str(TESTS.parent)
    file, port, begun = str(TESTS / "frontends" / "sar_program.py"), str(free_port()), time.monotonic()
    arguments = [str(ranks), port, str(directory), str(out), *cases]
    if by == "hand":
        commands = [[sys.executable, file, str(rank), *arguments] for rank in range(ranks)]
    elif by == "torchrun":
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        commands = [[*launcher, "--master-port", str(free_port()), file, "?", *arguments]]
    else:
        launcher = [str(mpirun()), "--oversubscribe", "--allow-run-as-root", "-n", str(ranks)]
        commands = [[*launcher, sys.executable, file, "?", *arguments]]
    children = [
        subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command in commands
    ]
    texts = []
    for child in children:
        try:
            texts.append(child.communicate(timeout=limit)[0])
        except subprocess.TimeoutExpired:
            for other in children:
                other.kill()
            pytest.fail(f"it hangs: {child.communicate()[0]}")
    files = [Path(f"{out}.{rank}") for rank in range(ranks)]
    results = [torch.load(file, weights_only=False) if file.exists() else None for file in files]
    return results, "\n".join(texts), time.monotonic() - begun


ALL = [
    "training-sage", "training-gat", "mfgs", "mfgs_gat", "structure", "modes", "functions", "hetero", "rgcn",
    "branches",
    "absent", "dtypes", "extremes", "unready", "fails_in_forward", "misuse", "again",
]  # fmt: skip


@pytest.fixture(scope="module", params=[RANKS, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2, 4))])
def results(
    request: pytest.FixtureRequest, parts: Callable[[int], Path], tmp_path_factory: pytest.TempPathFactory
) -> list[Any]:
    """What every case gave on each of some ranks."""
    out = tmp_path_factory.mktemp("out")
    found, text, _ = start(parts(request.param), out / "found", request.param, ALL, PROGRAM_IP_FILE=str(out / "ip"))
    assert None not in found, text
    assert not (out / "ip").exists(), "the file of the address is left"
    return found


def of(results: list[Any], case: str) -> list[Any]:
    return [found[case] for found in results]


def whole(parts: list[Tensor], ids: list[Tensor]) -> Tensor:
    """Rows of all ranks by original id."""
    return torch.cat(parts)[torch.cat(ids).argsort()]


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert torch.allclose(found, expected, rtol=tolerance, atol=tolerance), float((found - expected).abs().max())


def same_gradients(found: dict[str, Tensor], model: nn.Module) -> None:
    """Backward visits every call, so what the loss does not use has zeros instead of None."""
    expected = program.gradients(model)
    assert expected.keys() <= found.keys()
    assert not any(found[name].any() for name in found.keys() - expected.keys())
    for name, gradient in expected.items():
        close(found[name], gradient)


# ---- against the whole graph in one process


@pytest.mark.processes
@pytest.mark.parametrize("model", ["sage", "gat"])
def test_training_is_that_of_one_process(results: list[Any], model: str) -> None:
    expected = one_process(model)
    for found in of(results, f"training-{model}"):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-9)
        assert found["correct"] == expected["correct"]
    every = of(results, f"training-{model}")
    close(whole([r["logits"] for r in every], [r["ids"] for r in every]), expected["logits"], 1e-6)


def one_process(name: str) -> dict[str, Any]:
    """SAR's quick start without SAR: the same model with `nn.BatchNorm1d`."""
    g = homogeneous()
    model = program.seeded({"sage": program.Sage, "gat": program.Gat}[name], nn.BatchNorm1d)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    train, labels = g.ndata["train_mask"], g.ndata["label"]
    losses = []
    for _ in range(program.EPOCHS):
        loss = F.cross_entropy(model(g, g.ndata["feat"])[train], labels[train])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        logits = model(g, g.ndata["feat"])
    test = g.ndata["test_mask"]
    return {
        "losses": losses, "logits": logits, "correct": int((logits[test].argmax(1) == labels[test]).sum())
    }  # fmt: skip


@pytest.mark.processes
def test_layers_of_some_nodes(results: list[Any]) -> None:
    g = homogeneous()
    every = of(results, "mfgs")
    seeds = torch.cat([found["seeds"] for found in every])
    model = program.seeded(program.Sage, lambda n: nn.Identity())
    x = g.ndata["feat"].clone().requires_grad_()
    out = model(g, x)[seeds]
    out.pow(3).sum().backward()
    close(torch.cat([found["out"] for found in every]), out.detach())
    close(torch.cat([found["one_shot"] for found in every]), out.detach())
    used = torch.cat([found["inputs"] for found in every])
    assert used.unique().numel() == used.numel()
    close(torch.cat([found["x_grad"] for found in every]), x.grad[used])
    left = torch.ones(NODES, dtype=torch.bool).index_fill(0, used, False)
    assert not x.grad[left].any()
    for found in every:
        same_gradients(found["grads"], model)
        assert torch.equal(found["seeds"], found["last"])
        assert torch.equal(found["seeds"], found["seeds"].sort().values) or len(every) > 1
    expected = dgl.in_subgraph(g, seeds).num_edges()
    assert sum(found["edges"][-1] for found in every) == expected
    assert expected < sum(found["edges"][0] for found in every) <= g.num_edges()


@pytest.mark.processes
def test_a_rank_without_seeds_runs_attention(results: list[Any]) -> None:
    g = homogeneous()
    every = of(results, "mfgs_gat")
    model = program.seeded(dnn.GATConv, 8, 3, 2)
    out = model(g, g.ndata["feat"])[torch.cat([found["seeds"] for found in every])]
    out.pow(3).sum().backward()
    close(torch.cat([found["out"] for found in every]), out.detach())
    for found in every:
        same_gradients(found["grads"], model)


@pytest.mark.processes
def test_features_and_ids_are_kept(results: list[Any]) -> None:
    g = homogeneous()
    seen = []
    for rank, found in enumerate(of(results, "structure")):
        assert torch.equal(found["w"], g.edata["w"][found["eid"]])
        assert torch.equal(found["mask"], g.ndata["train_mask"][found["nid"]])
        assert found["mask"].dtype == torch.bool
        assert torch.equal(found["in"], g.in_degrees()[found["nid"]])
        assert torch.equal(found["out"], g.out_degrees()[found["nid"]])
        assert set(g.edges()[1][found["eid"]].tolist()) <= set(found["nid"].tolist())
        assert found["keys"] == sorted(f"_N/{name}" for name in g.ndata)
        data = found["data"]
        assert isinstance(data, sar.PartitionData)
        assert len(data.node_ranges) == len(data.shard_edges_and_features) == len(results)
        assert data.node_ranges[rank][1] - data.node_ranges[rank][0] == found["nid"].numel()
        assert (data.node_type_names, data.edge_type_names) == (["_N"], [("_N", "_E", "_N")])
        for (first, end), shard in zip(data.node_ranges, data.shard_edges_and_features):
            src, dst = shard.edges
            assert not ((src < first) | (src >= end)).any()
            assert set(shard.edge_features) == {dgl.EID, "_N:_E:_N/w", "_N:_E:_N/orig_id"}
            assert src.shape == dst.shape == shard.edge_features["_N:_E:_N/w"].shape
        seen.append(found["eid"])
    assert torch.equal(torch.cat(seen).sort().values, torch.arange(g.num_edges()))


@pytest.mark.processes
def test_modes_give_the_same(results: list[Any]) -> None:
    g = homogeneous()
    model = program.seeded(program.Gat, nn.Identity)
    x = g.ndata["feat"].clone().requires_grad_()
    out = model(g, x)
    out.pow(3).sum().backward()
    every = of(results, "modes")
    ids = [torch.tensor(found["one shot"]["options"][2]) for found in every]
    for mode in every[0]:
        runs = [found[mode] for found in every]
        close(whole([run["out"] for run in runs], ids), out.detach())
        close(whole([run["x_grad"] for run in runs], ids), x.grad)
        same_gradients(runs[-1]["grads"], model)
    options = {mode: found["options"][:2] for mode, found in every[0].items() if "options" in found}
    assert options == {
        "sr": ("sar", 1), "keep": ("keep", 1), "deep": ("sar", 3), "one shot": ("halo", "DistributedBlock")
    }  # fmt: skip


@pytest.mark.processes
def test_decorated_messages_and_edge_softmax(results: list[Any]) -> None:
    g = homogeneous()
    model = program.seeded(program.EdgeScaled)
    x = g.ndata["feat"].clone().requires_grad_()
    out = model(g, x)
    out.pow(3).sum().backward()
    logits = g.edata["w"].clone().requires_grad_()
    soft = dnn.edge_softmax(g, logits)
    (soft * g.edata["w"]).sum().backward()
    every = of(results, "functions")
    ids = [found["ids"] for found in of(results, "branches")]
    close(whole([found["out"] for found in every], ids), out.detach())
    close(whole([found["x_grad"] for found in every], ids), x.grad)
    edges = [found["eid"] for found in every]
    close(whole([found["soft"] for found in every], edges), soft.detach())
    close(whole([found["soft_grad"] for found in every], edges), logits.grad)
    for found in every:
        same_gradients(found["grads"], model)
        assert found["same"]


@pytest.mark.processes
def test_types_are_kept(results: list[Any]) -> None:
    g = alphabetical()
    model = program.seeded(program.Hetero, g.canonical_etypes)
    h = {kind: g.nodes[kind].data["feat"].clone().requires_grad_() for kind in g.ntypes}
    out = model(g, h)
    sum(rows.pow(3).sum() for rows in out.values()).backward()
    every = of(results, "hetero")
    for kind in g.ntypes:
        ids = [found["ids"][kind] for found in every]
        close(whole([found["out"][kind] for found in every], ids), out[kind].detach())
        close(whole([found["x_grad"][kind] for found in every], ids), h[kind].grad)
        for found in every:
            rows, part = found["part"][kind]
            close(part, out[kind].detach()[found["ids"][kind][rows]])
    for found in every:
        same_gradients(found["grads"], model)
        assert found["types"] == (g.ntypes, g.canonical_etypes) * 2
        for kind, (ids, w) in found["w"].items():
            assert torch.equal(w, g.edges[kind].data["w"][ids])


@pytest.mark.processes
def test_rgcn(results: list[Any]) -> None:
    typed = alphabetical()
    g = dgl.to_homogeneous(typed, ndata=["feat"], edata=["w"])
    model = program.seeded(program.RelGcn, dnn.RelGraphConv, 3)
    x = g.ndata["feat"].clone().requires_grad_()
    out = model(g, x)
    out.pow(3).sum().backward()
    every = of(results, "rgcn")
    ids = [found["ids"] for found in every]
    close(whole([found["out"] for found in every], ids), out.detach())
    close(whole([found["x_grad"] for found in every], ids), x.grad)
    close(whole([found["presorted"] for found in every], ids), out.detach())
    for found in every:
        same_gradients(found["grads"], model)
        eid, etype, w = found["edges"]
        assert torch.equal(etype, g.edata[dgl.ETYPE][eid])
        assert torch.equal(w, g.edata["w"][eid])
        assert torch.equal(found["types"], g.ndata[dgl.NTYPE][found["ids"]])
        assert found["expanded"].shape == (found["ids"].numel(), 2)
        assert not found["expanded"][found["types"] == 0].any()  # items have no such feature
        close(found["mfgs"], out.detach()[found["ids"][found["seeds"]]])


@pytest.mark.processes
def test_a_rank_may_leave_outputs_unused(results: list[Any]) -> None:
    g = homogeneous()
    every = of(results, "branches")
    model = program.seeded(program.TwoBranches)
    first, second = model(g, g.ndata["feat"])
    own = [found["ids"] for found in every]
    (sum(first[ids].pow(3).sum() for ids in own[:-1]) + second[own[-1]].pow(3).sum()).backward()
    for found in every:
        same_gradients(found["grads"], model)


@pytest.mark.processes
def test_gradients_that_some_ranks_lack(results: list[Any]) -> None:
    for found in of(results, "absent"):
        assert found["weight"].item() == 27
        assert found.get("bias", torch.zeros(1)).item() == 9 * (len(results) - 1)


@pytest.mark.processes
def test_backward_again(results: list[Any]) -> None:
    for rank, found in enumerate(of(results, "again")):
        for name, once in found["once"].items():
            close(found["twice"][name], 2 * once)
        assert found["double"].startswith("RefusedError: double backward through a sharded call is not supported")
        told = "BatchNorm1d at 'norms.0' takes its statistics from the nodes of its own rank"
        assert [told in text for text in found["warned"]] == [True] * (rank == 0 and len(results) > 1)


@pytest.mark.processes
def test_dtypes(results: list[Any]) -> None:
    g = homogeneous()
    every = of(results, "dtypes")
    g.ndata["h"] = (g.ndata["feat"] * 4).round()
    g.update_all(fn.copy_u("h", "m"), fn.sum("m", "h"))
    for dtype in every[0]["sums"]:
        found = whole([one["sums"][dtype] for one in every], [one["ids"] for one in every])
        assert found.dtype == dtype
        assert torch.equal(found, g.ndata["h"].to(dtype))  # small whole numbers are exact in every dtype


@pytest.mark.processes
def test_ties_and_lonely_nodes(results: list[Any]) -> None:
    g = homogeneous(False)
    h = torch.ones(NODES, 8, dtype=torch.float64, requires_grad=True)
    g.ndata["h"] = h
    g.update_all(fn.copy_u("h", "m"), fn.max("m", "out"))
    g.ndata["out"].sum().backward()
    every = of(results, "extremes")
    ids = [found["ids"] for found in every]
    assert (g.in_degrees() == 0).any()
    close(whole([found["out"] for found in every], ids), g.ndata["out"].detach())
    assert sum(found["x_grad"].sum() for found in every) == h.grad.sum()


@pytest.mark.processes
def test_a_model_that_was_never_synchronised(results: list[Any]) -> None:
    g = homogeneous()
    model = program.seeded(program.Sage, nn.BatchNorm1d)
    model(g, g.ndata["feat"]).pow(3).sum().backward()
    for found in of(results, "unready"):
        same_gradients(found, model)


@pytest.mark.processes
def test_a_model_is_called_again_after_an_exception(results: list[Any]) -> None:
    g = homogeneous()
    model = program.seeded(program.Sage, nn.BatchNorm1d)
    model(g, g.ndata["feat"])
    model.zero_grad()
    model(g, g.ndata["feat"]).pow(3).sum().backward()
    for found in of(results, "fails_in_forward"):
        same_gradients(found["grads"], model)


# ---- starting and failing


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.parametrize("by", ["torchrun", pytest.param("mpi", marks=[needs_mpi, pytest.mark.mpi])])
def test_launchers(by: str, parts: Callable[[int], Path], tmp_path: Path) -> None:
    backend = "mpi" if by == "mpi" else "gloo"
    cases = ["training-sage", "training-gat", "mfgs"]
    found, text, _ = start(parts(4), tmp_path / "out", 4, cases, by=by, PROGRAM_BACKEND=backend)
    assert None not in found, text
    for model in ("sage", "gat"):
        assert found[0][f"training-{model}"]["losses"] == pytest.approx(one_process(model)["losses"], rel=1e-9)


@pytest.mark.processes
def test_the_documented_script(tmp_path: Path) -> None:
    page = (TESTS.parent / "docs" / "migrating-from-sar.md").read_text(encoding="utf-8")
    code = page.split("<!-- script: quick start -->\n```python\n")[1].split("```")[0]
    assert code.count('"gloo")') == 1
    code = code.replace('"gloo")', f'"gloo", master_port_number={free_port()})')
    (tmp_path / "train.py").write_text(code)
    g = homogeneous()
    g.ndata["feat"] = g.ndata["feat"].float()
    dgl.distributed.partition_graph(g, "mygraph", 2, str(tmp_path / "parts"), num_hops=1)
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS.parent)}
    children = [
        subprocess.Popen(
            [sys.executable, "train.py", "--rank", str(rank), "--world-size", "2"],
            cwd=tmp_path, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    texts = [child.communicate(timeout=120)[0] for child in children]
    losses = [float(line.split()[-1]) for line in texts[0].splitlines() if line.startswith("epoch")]
    assert len(losses) == 20 and losses[-1] < losses[0], texts


@pytest.mark.processes
def test_a_rank_that_skips_backward_ends_all(parts: Callable[[int], Path], tmp_path: Path) -> None:
    found, text, seconds = start(parts(2), tmp_path / "out", 2, ["skips_backward"], limit=60)
    assert found == [None, None], text
    assert "rank 0" in text and "rank 1" in text and "sync_gradients" in text
    assert seconds < 45


@pytest.mark.processes
def test_one_rank_is_wrong_and_all_are_told(results: list[Any]) -> None:
    told = of(results, "misuse")
    if len(told) == 1:
        return
    assert "ValueError: rank 1 holds part 0; load part 1 on it" in told[1]["part"]
    assert "PeerFailure: rank 1 could not construct the graph: rank 1 holds part 0" in told[0]["part"]
    for one in told:
        assert (
            "DivergenceError: every rank must construct with the same Config: rank 0 has Options(mode='"
            in one["Config"]
        )
        assert "sar.Config.pipeline_depth is -1; expected an integer that is at least 1" in one["depth"]
        assert "rank 1 has no 'feat' of nodes of type '_N', which rank 0 has" in one["part lacks"]
    assert "3 of the seed nodes are not its own; expected ids in [" in told[1]["seeds"]
    assert "PeerFailure: rank 1 passed seed nodes" in told[0]["seeds"]


def test_a_dist_graph(parts: Callable[[int], Path], one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DGL_DIST_MODE", "standalone")
    found = program.dist_graph(parts(1))
    for name, g in (("homo", homogeneous()), ("het", heterogeneous())):
        one = found[name]
        assert sorted(one["nodes"]) == sorted(g.ntypes)
        for kind, fields in one["nodes"].items():
            assert set(fields) - {dgl.NID} == set(g.nodes[kind].data)
            for field, rows in fields.items():
                if field != dgl.NID:
                    assert torch.equal(rows, g.nodes[kind].data[field][fields[dgl.NID]])
        for kind, fields in one["edges"].items():
            assert torch.equal(fields["w"], g.edges[kind].data["w"][fields[dgl.EID]])
            assert torch.equal(one["degrees"][kind], g.in_degrees(etype=kind)[one["nodes"][kind[2]][dgl.NID]])


# ---- in this process, with one rank


def test_every_documented_name_is_there() -> None:
    missing = [name for name in DOCUMENTED if not hasattr(sar, name)]
    assert not missing
    assert set(DOCUMENTED) <= set(sar.__all__)
    assert {"disable_sr", "max_collective_size", "pipeline_depth"} <= set(vars(sar.Config))
    assert sar.core.GraphShardManager is sar.GraphShardManager
    assert sar.comm.initialize_comms is sar.initialize_comms
    assert callable(sar.GraphShardManager.get_full_partition_graph)


@pytest.mark.parametrize("name", ["DataLoader", "DistNeighborSampler"])
def test_sampling_is_refused_in_a_sentence(name: str) -> None:
    with pytest.raises(RefusedError, match=f"sar.{name}: sampling over a sharded graph is not there yet"):
        getattr(sar, name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = sar.nothing


def test_before_joining() -> None:
    assert not sar.is_initialized()
    for ask in (sar.rank, sar.world_size, sar.comm_device, lambda: sar.gather_grads(nn.Linear(1, 1))):
        with pytest.raises(ShardpassError, match=r"call sar\.initialize_comms\(rank, world_size"):
            ask()
    with pytest.raises(ValueError, match=r"rank 2 of 2; expected integers, 0 <= rank < world_size"):
        sar.initialize_comms(2, 2, "127.0.0.1", "gloo")
    with pytest.raises(ValueError, match="the backend is 'smoke'; expected one of gloo, mpi, nccl, ccl"):
        sar.initialize_comms(0, 1, "127.0.0.1", "smoke")


def test_socket_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAR_SOCKET_NAME", "eth99")
    with pytest.raises(ValueError, match=r"SAR_SOCKET_NAME='eth99' is no network interface of .*, which has: .*lo"):
        sar.initialize_comms(0, 1, "127.0.0.1", "gloo")


def test_a_second_initialisation(one_rank: None) -> None:
    sar.initialize_comms(0, 1, "127.0.0.1", "gloo")
    assert (sar.rank(), sar.world_size(), sar.comm_device()) == (0, 1, torch.device("cpu"))
    with pytest.raises(ValueError, match="this process is to be rank 1 of 2, but initialize_comms was called before"):
        sar.initialize_comms(1, 2, "127.0.0.1", "gloo")


def test_all_reduce(one_rank: None) -> None:
    for op in (torch.distributed.ReduceOp.SUM, "max", torch.distributed.ReduceOp.PRODUCT):
        values = torch.tensor([2.0, 3.0])
        sar.comm.all_reduce(values, op)
        assert values.tolist() == [2, 3]
    with pytest.raises(ValueError, match="expected SUM, MAX, MIN or PRODUCT"):
        sar.comm.all_reduce(torch.ones(1), torch.distributed.ReduceOp.BAND)


def test_a_stale_file_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAR_SOCKET_NAME", "lo")
    path = tmp_path / "ip"
    path.write_text(f"127.0.0.1\n{free_port()} 00ff\n")
    found: list[str] = []
    waiting = threading.Thread(target=lambda: found.append(sar.nfs_ip_init(1, str(path))))
    waiting.start()
    time.sleep(0.4)
    assert not found
    assert sar.nfs_ip_init(0, str(path)) == "127.0.0.1"
    waiting.join(10)
    assert found == ["127.0.0.1"]
    STATE.on_connected.pop()()
    assert not path.exists()
    assert "shardpass nfs_ip_init" not in [thread.name for thread in threading.enumerate() if thread.is_alive()]


@pytest.mark.parametrize(
    "content, told",
    [
        (None, "does not exist"),
        ("10.0.0.7", "was written by something else"),
        ("127.0.0.1\n{port} 00ff\n", "names 127.0.0.1, where no starting rank 0 answers"),
    ],
)
def test_no_address_is_an_error(
    content: str | None, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDPASS_CONNECT_TIMEOUT", "0.3")
    path = tmp_path / "ip"
    if content is not None:
        path.write_text(content.format(port=free_port()))
    with pytest.raises(CommunicationError, match=told):
        sar.nfs_ip_init(3, str(path))


def test_another_program_on_the_port_is_not_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDPASS_CONNECT_TIMEOUT", "0.5")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=lambda: listener.accept()[0].sendall(b"SSH"), daemon=True).start()
        (tmp_path / "ip").write_text(f"127.0.0.1\n{listener.getsockname()[1]} {'0' * 32}\n")
        with pytest.raises(CommunicationError, match="left by an earlier run"):
            sar.nfs_ip_init(1, str(tmp_path / "ip"))


def test_suffix_key_lookup() -> None:
    feat, other = torch.ones(3, 2), torch.zeros(2, 2)
    features = {"a/feat": feat, "a/xfeat": torch.zeros(3), "b/label": torch.arange(2)}
    assert sar.suffix_key_lookup(features, "feat") is feat
    assert sar.suffix_key_lookup(features, "a/feat") is feat
    expanded = sar.suffix_key_lookup(features, "feat", type_list=["b", "a"])
    assert torch.equal(expanded, torch.cat([other, feat]))
    assert sar.suffix_key_lookup(features, "feat", expand_to_all=False, type_list=["b", "a"]).shape == (3, 2)
    with pytest.raises(KeyError, match="no feature is called 'eat'; there are: a/feat, a/xfeat, b/label"):
        sar.suffix_key_lookup(features, "eat")
    with pytest.raises(KeyError, match="none of the types"):
        sar.suffix_key_lookup(features, "feat", type_list=["b"])
    both = features | {"b/feat": other}
    with pytest.raises(ValueError, match="'feat' means a/feat, b/feat: pass one of them, or the type_list"):
        sar.suffix_key_lookup(both, "feat")
    assert torch.equal(sar.suffix_key_lookup(both, "feat", type_list=["a", "b"]), torch.cat([feat, other]))
    with pytest.raises(ValueError, match=r"float32 rows of shape \[2\] and float32 rows of shape \[5\]"):
        sar.suffix_key_lookup(both | {"b/feat": torch.zeros(2, 5)}, "feat", type_list=["a", "b"])
    with pytest.raises(ValueError, match="the number of nodes of type 'c' is not known"):
        sar.suffix_key_lookup(features, "feat", type_list=["a", "c"])
    typed = {"a/feat": feat, dgl.NTYPE: torch.tensor([0, 0, 0, 1])}
    assert sar.suffix_key_lookup(typed, "feat", type_list=["a", "c"]).shape == (4, 2)
    edges = {"a:r:b/w": feat}
    assert sar.suffix_key_lookup(edges, "w", type_list=[("a", "r", "b")]).shape == (3, 2)


def test_wrong_partitions(parts: Callable[[int], Path], one_rank: None, tmp_path: Path) -> None:
    config = program.part_of(parts(2), "homo")
    with pytest.raises(ValueError, match=r"has the parts 0 to 1, no part 2; pass the rank"):
        sar.load_dgl_partition_data(config, 2, "cpu")
    data = sar.load_dgl_partition_data(config, 0, "cpu")
    with pytest.raises(ValueError, match=r"2 parts, but there are 1 ranks: start 2 ranks, or partition it into 1"):
        sar.construct_full_graph(data)
    with pytest.raises(ValueError, match=r"nothing\.json cannot be read"):
        sar.load_dgl_partition_data(str(tmp_path / "nothing.json"), 0, "cpu")
    torn = tmp_path / "torn"
    dgl.distributed.partition_graph(homogeneous(), "homo", 2, str(torn), part_method="random")
    for name in ("graph.dgl", "node_feat.dgl", "edge_feat.dgl"):
        file = torn / "part1" / name
        whole_file = file.read_bytes()
        file.write_bytes(whole_file[: len(whole_file) // 2])
        with pytest.raises(ValueError, match=f"{name} is cut short or altered"):
            sar.load_dgl_partition_data(str(torn / "homo.json"), 1, "cpu")
        sar.load_dgl_partition_data(str(torn / "homo.json"), 0, "cpu")  # reads nothing of part 1
        file.write_bytes(whole_file)
    (torn / "part0").rename(torn / "kept")
    (torn / "part1").rename(torn / "part0")
    with pytest.raises(ValueError, match=r"edge_feat\.dgl is altered: .* expected \d+ rows"):
        sar.load_dgl_partition_data(str(torn / "homo.json"), 0, "cpu")


def test_original_ids_in_files_of_their_own(one_rank: None, tmp_path: Path) -> None:
    g = heterogeneous()
    for kind in g.ntypes:
        g.nodes[kind].data.pop("orig_id")
    for kind in g.canonical_etypes:
        g.edges[kind].data.pop("orig_id")
    nodes, edges = dgl.distributed.partition_graph(
        g, "het", 1, str(tmp_path), part_method="random", return_mapping=True
    )
    save = dgl.data.utils.save_tensors
    save(str(tmp_path / "part0" / "orig_nids.dgl"), nodes)
    save(str(tmp_path / "part0" / "orig_eids.dgl"), {":".join(kind): ids for kind, ids in edges.items()})
    graph = sar.construct_full_graph(sar.load_dgl_partition_data(str(tmp_path / "het.json"), 0, "cpu"))
    for kind in g.ntypes:
        rows = graph.nodes[kind].data
        assert torch.equal(rows["feat"], g.nodes[kind].data["feat"][rows[dgl.NID]])
    for kind in g.canonical_etypes:
        rows = graph.edges[kind].data
        assert torch.equal(rows["w"], g.edges[kind].data["w"][rows[dgl.EID]])


def plain(parts: Callable[[int], Path]) -> sar.PartitionData:
    return sar.load_dgl_partition_data(program.part_of(parts(1), "homo"), 0, "cpu")


def test_data_made_by_hand(parts: Callable[[int], Path], one_rank: None) -> None:
    shard = sar.ShardEdgesAndFeatures((torch.tensor([0, 1, 3]), torch.tensor([1, 2, 2])), {"w": torch.rand(3)})
    data = sar.PartitionData([(0, 4)], [shard], {"feat": torch.rand(4, 2)}, ["_N"], [("_N", "_E", "_N")])
    graph = sar.construct_full_graph(data)
    assert graph.in_degrees().tolist() == [0, 1, 2, 0]
    assert set(graph.edata) == {"w", dgl.EID}
    assert set(graph.ndata) == {"feat", dgl.NID}
    wrong = shard._replace(edges=(torch.tensor([0, 1, 4]), torch.tensor([1, 2, 2])))
    with pytest.raises(ValueError, match=r"an edge ends at node 4, which is outside \[0, 4\)"):
        sar.construct_full_graph(data._replace(shard_edges_and_features=[wrong]))
    with pytest.raises(ValueError, match="node feature 'feat' has 3 rows; this rank has 4 such nodes"):
        sar.construct_full_graph(data._replace(node_features={"feat": torch.rand(3, 2)}))
    with pytest.raises(ValueError, match="feature 'w' of edges _N:_E:_N from part 0 has 2 rows for 3 edges"):
        short = shard._replace(edge_features={"w": torch.rand(2)})
        sar.construct_full_graph(data._replace(shard_edges_and_features=[short]))
    with pytest.raises(ValueError, match="rank 0: 1 of the seed nodes are not its own"):
        sar.construct_mfgs(data, torch.tensor([1, 4]), 1)


def test_the_device_of_a_graph(parts: Callable[[int], Path], one_rank: None) -> None:
    graph = sar.construct_full_graph(plain(parts))
    assert graph.to("cpu") is graph
    with pytest.raises(RefusedError, match=r"cannot move to cuda:0: pass the device to load_dgl_partition_data"):
        graph.to("cuda:0")
    assert torch.equal(graph.input_nodes, torch.arange(NODES))


@pytest.mark.parametrize("name, value", [("pipeline_depth", 0), ("max_collective_size", -1), ("pipeline_depth", 1.5)])
def test_config_is_checked(
    name: str, value: Any, parts: Callable[[int], Path], one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sar.Config, name, value)
    with pytest.raises(ValueError, match=rf"sar\.Config\.{name} is {value}; expected an integer that is at least"):
        sar.construct_full_graph(plain(parts))


def test_edge_softmax_over_out_edges_is_refused(parts: Callable[[int], Path], one_rank: None) -> None:
    graph = sar.construct_full_graph(plain(parts))
    logits = torch.rand(graph.num_edges())
    with pytest.raises(RefusedError, match="the softmax is over all in-edges of a node"):
        sar.edge_softmax(graph, logits, norm_by="src")
    with pytest.raises(RefusedError, match="over some edges"):
        sar.edge_softmax(graph, logits[:3], eids=torch.arange(3))
    g = homogeneous()
    logits = torch.rand(g.num_edges())
    assert torch.equal(
        sar.patched_edge_softmax(g, logits, norm_by="src"), dgl.nn.functional.edge_softmax(g, logits, norm_by="src")
    )


def test_message_has_parameters_takes_a_function() -> None:
    with pytest.raises(TypeError, match=r"write @sar\.message_has_parameters\(lambda self"):
        sar.message_has_parameters([nn.Parameter(torch.ones(1))])


def test_synchronised_models_stay_ordinary(parts: Callable[[int], Path], one_rank: None) -> None:
    model = program.seeded(program.Sage, sar.DistributedBN1D)
    names = list(model.state_dict())
    sar.sync_params(model)
    sar.sync_params(model)
    assert len(model._forward_pre_hooks) == len(model._forward_hooks) == 1
    assert list(model.state_dict()) == names == list(program.seeded(program.Sage, nn.BatchNorm1d).state_dict())
    graph, x = sar.construct_full_graph(plain(parts)), torch.rand(NODES, 8, dtype=torch.float64)
    expected = model(graph, x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        close(other(graph, x), expected)
    with torch.no_grad():
        assert not model(graph, x).requires_grad
    assert not STATE.forwards
    with pytest.raises(RefusedError, match="SortPooling cannot be exact"):
        sar.sync_params(dnn.SortPooling(2))


def test_norms(one_rank: None) -> None:
    torch.manual_seed(0)
    x = torch.randn(50, 4, dtype=torch.float64) + 1e6
    for options in ({}, {"affine": False}, {"eps": 0.1}, {"distributed": False}, {"track_running_stats": False}):
        ours = sar.DistributedBN1D(4, **options).double()
        theirs = nn.BatchNorm1d(4, **{k: v for k, v in options.items() if k != "distributed"}).double()
        close(ours(x), theirs(x))
        close(ours.eval()(x), theirs.eval()(x))
    assert torch.isfinite(sar.DistributedBN1D(2)(torch.ones(5, 2))).all()


def test_logging(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("shardpass")
    before = logger.level, logger.propagate, list(logger.handlers)
    try:
        sar.logging_setup(logging.INFO, 1, 4)
        sar.logging_setup("INFO", 2, 4)
        logging.getLogger("shardpass.sar").info("hello")
        logging.getLogger("shardpass.sar").debug("quiet")
        assert capsys.readouterr().err == "rank 2 of 4: INFO: shardpass.sar: hello\n"
    finally:
        logger.level, logger.propagate, logger.handlers[:] = before
