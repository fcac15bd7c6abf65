"""SAR's documented names: scripts as its documentation has them, as processes, against one process with DGL."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

dgl = pytest.importorskip("dgl")

import dgl.function as fn  # noqa: E402
import dgl.nn.pytorch as dnn  # noqa: E402
from backends.launchers import needs_mpi  # noqa: E402
from filelock import FileLock  # noqa: E402  (a dependency of torch)

from frontends import sar_program as program  # noqa: E402
from frontends.sar_cases import (  # noqa: E402
    NODES,
    TESTS,
    alphabetical,
    close,
    free_port,
    homogeneous,
    of,
    read_results,
    start,
)
from shardpass.frontends import sar  # noqa: E402

ALL = [
    "training-sage", "training-gat", "mfgs", "mfgs_gat", "structure", "modes", "functions", "hetero", "rgcn",
    "branches", "absent", "dtypes", "extremes", "unready", "fails_in_forward", "misuse", "again",
]  # fmt: skip


@pytest.fixture(scope="module", params=[2, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 3, 4))])
def results(
    request: pytest.FixtureRequest, parts: Callable[[int], Path], tmp_path_factory: pytest.TempPathFactory
) -> list[Any]:
    """What every case gave on each of some ranks. Workers of pytest-xdist share one run, the longest of all tests."""
    worker = tmp_path_factory.getbasetemp()
    shared = worker.parent if "PYTEST_XDIST_WORKER" in os.environ else worker
    out = shared / f"sar on {request.param} ranks"
    with FileLock(f"{out}.lock"):
        if not out.exists():
            out.mkdir()
            env = {"PROGRAM_IP_FILE": str(out / "ip"), "SAR_SOCKET_NAME": "lo"}
            found, text = start(parts(request.param), out / "found", request.param, ALL, **env)
            assert None not in found, text
            assert not (out / "ip").exists(), "the file of the address is left"
    return read_results(out / "found", request.param)


def whole(parts: list[Tensor], ids: list[Tensor]) -> Tensor:
    """Rows of all ranks by original id."""
    return torch.cat(parts)[torch.cat(ids).argsort()]


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
        assert found["keys"] == sorted([dgl.NTYPE, *(f"_N/{name}" for name in g.ndata)])
        data = found["data"]
        assert isinstance(data, sar.PartitionData)
        assert len(data.node_ranges) == len(data.all_shard_edges) == len(results)
        assert data.node_ranges[rank][1] - data.node_ranges[rank][0] == found["nid"].numel()
        assert (data.node_type_names, data.edge_type_names) == (["_N"], [("_N", "_E", "_N")])
        for (first, end), shard in zip(data.node_ranges, data.all_shard_edges):
            src, dst = shard.edges
            assert not ((src < first) | (src >= end)).any()
            assert set(shard.edge_features) == {dgl.EID, dgl.ETYPE, "_N:_E:_N/w", "_N:_E:_N/orig_id"}
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
    found, text = start(parts(4), tmp_path / "out", 4, cases, by=by, PROGRAM_BACKEND=backend)
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
    texts = [child.communicate(timeout=480)[0] for child in children]
    losses = [float(line.split()[-1]) for line in texts[0].splitlines() if line.startswith("epoch")]
    assert len(losses) == 20 and losses[-1] < losses[0], texts


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize(
    "case, told",
    [("skips_backward", "sync_gradients"), ("config_differs", "sar.Config, which was changed to mode=keep")],
)
def test_a_rank_that_goes_its_own_way_ends_all(
    case: str, told: str, parts: Callable[[int], Path], tmp_path: Path
) -> None:
    found, text = start(parts(2), tmp_path / "out", 2, [case])
    assert found == [None, None], text
    assert "rank 0" in text and "rank 1" in text and told in text
    assert "has waited" not in text, "they end because of the divergence, not because of a time-out"


@pytest.mark.processes
def test_one_rank_is_wrong_and_all_are_told(results: list[Any]) -> None:
    told = of(results, "misuse")
    if len(told) == 1:
        return
    assert "ValueError: rank 1 holds part 0; load part 1 on it" in told[1]["part"]
    assert "PeerFailure: rank 1 could not construct the graph: rank 1 holds part 0" in told[0]["part"]
    for one in told:
        assert "DivergenceError: every rank must construct with the same Config: rank 0 has mode=sar" in one["Config"]
        assert "sar.Config.pipeline_depth is -1; expected an integer that is at least 1" in one["depth"]
        assert "rank 1 has no 'feat' of nodes of type '_N', which rank 0 has" in one["part lacks"]
    assert "3 of the seed nodes are not its own; expected ids in [" in told[1]["seeds"]
    assert "PeerFailure: rank 1 passed seed nodes" in told[0]["seeds"]
