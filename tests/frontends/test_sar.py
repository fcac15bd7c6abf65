"""SAR's documented names: scripts as its documentation has them, as processes, against one process with DGL."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

dgl = pytest.importorskip("dgl")

import dgl.function as fn  # noqa: E402
import dgl.nn.pytorch as dnn  # noqa: E402

from frontends import sar_meanings as meanings  # noqa: E402
from frontends import sar_program as program  # noqa: E402
from frontends.sar_cases import NODES, alphabetical, close, homogeneous, of, same_gradients, whole  # noqa: E402
from shardpass.frontends import sar  # noqa: E402

pytestmark = pytest.mark.processes

# ---- against the whole graph in one process

SAGE, GAT, ONE_GAT = (program.Sage, lambda n: nn.Identity()), (program.Gat, nn.Identity), (dnn.GATConv, 8, 3, 2)
NORMED = program.Sage, nn.BatchNorm1d
PARITY: dict[tuple[str, ...], tuple[Any, ...]] = {
    ("mfgs",): SAGE,
    ("mfgs_gat",): ONE_GAT,
    **{("modes", mode): GAT for mode in ("sr", "keep", "deep", "one shot", "short messages")},
    ("functions",): (program.EdgeScaled,),
    ("unready",): NORMED,
    ("fails_in_forward",): NORMED,
    ("patched", "synced"): ONE_GAT,
    ("rgcn",): (program.RelGcn, dnn.RelGraphConv, 3),
    ("patched", "rgcn"): (meanings.TypedOnce, dnn.RelGraphConv),
}
"""By the case, the model that gives the same on the whole graph. Those after ``rgcn`` are on typed edges."""
TYPED = (("rgcn",), ("patched", "rgcn"))


def merged_types() -> Any:
    return dgl.to_homogeneous(alphabetical(), ndata=["feat"], edata=["w"])


@pytest.mark.parametrize("path", PARITY, ids=" ".join)
def test_outputs_and_gradients(results: list[Any], path: tuple[str, ...]) -> None:
    every = of(results, path[0])
    every = [found[path[1]] for found in every] if path[1:] else every
    g = merged_types() if path in TYPED else homogeneous()
    model = program.seeded(*PARITY[path])
    x = g.ndata["feat"].clone().requires_grad_()
    out, ids, used = model(g, x), *(torch.cat([found[name] for found in every]) for name in ("ids", "inputs"))
    out[ids].pow(3).sum().backward()
    close(torch.cat([found["out"] for found in every]), out[ids].detach())
    close(torch.cat([found["x_grad"] for found in every]), x.grad[used])
    assert used.unique().numel() == used.numel()
    assert not x.grad[torch.ones(len(x), dtype=torch.bool).index_fill(0, used, False)].any()
    for found in every:
        same_gradients(found["grads"], model)


def test_layers_of_some_nodes(results: list[Any]) -> None:
    g, every = homogeneous(), of(results, "mfgs")
    for found in every:
        close(found["one_shot"], found["out"])
        assert torch.equal(found["seeds"][0], found["inputs"]) and torch.equal(found["seeds"][1], found["ids"])
        assert torch.equal(found["ids"], found["ids"].sort().values) or len(every) > 1
    expected = dgl.in_subgraph(g, torch.cat([found["ids"] for found in every])).num_edges()
    assert sum(found["edges"][-1] for found in every) == expected
    assert expected < sum(found["edges"][0] for found in every) <= g.num_edges()


def test_modes(results: list[Any]) -> None:
    for found in of(results, "modes"):
        assert {mode: run["options"] for mode, run in found.items() if "options" in run} == {
            "sr": ("sar", 1), "keep": ("keep", 1), "deep": ("sar", 3), "one shot": ("halo", "DistributedBlock")
        }  # fmt: skip


def test_edge_softmax(results: list[Any]) -> None:
    g, every = homogeneous(), of(results, "functions")
    logits = g.edata["w"].clone().requires_grad_()
    soft = dnn.edge_softmax(g, logits)
    (soft * g.edata["w"]).sum().backward()
    edges = [found["eid"] for found in every]
    close(whole([found["soft"] for found in every], edges), soft.detach())
    close(whole([found["soft_grad"] for found in every], edges), logits.grad)
    assert all(found["same"] for found in every)


def test_rgcn(results: list[Any]) -> None:
    g, every = merged_types(), of(results, "rgcn")
    out = program.seeded(program.RelGcn, dnn.RelGraphConv, 3)(g, g.ndata["feat"]).detach()
    for found in every:
        eid, etype, w = found["edges"]
        assert torch.equal(etype, g.edata[dgl.ETYPE][eid])
        assert torch.equal(w, g.edata["w"][eid])
        assert torch.equal(found["types"], g.ndata[dgl.NTYPE][found["ids"]])
        assert found["expanded"].shape == (found["ids"].numel(), 2)
        assert not found["expanded"][found["types"] == 0].any()  # items have no such feature
        close(found["presorted"], out[found["ids"]])
        close(found["mfgs"], out[found["ids"][found["seeds"]]])


def test_attention_patched_as_documented_in_a_model_that_was_never_synchronised(results: list[Any]) -> None:
    g, model = homogeneous(), program.seeded(dnn.GATConv, 8, 3, 2)
    F.elu(model(g, g.ndata["feat"])).pow(3).sum().backward()
    same_gradients(of(results, "patched")[0]["plain"], model)


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


def test_a_rank_may_leave_outputs_unused(results: list[Any]) -> None:
    g = homogeneous()
    every = of(results, "branches")
    model = program.seeded(program.TwoBranches)
    first, second = model(g, g.ndata["feat"])
    own = [found["ids"] for found in every]
    (sum(first[ids].pow(3).sum() for ids in own[:-1]) + second[own[-1]].pow(3).sum()).backward()
    for found in every:
        same_gradients(found["grads"], model)


def test_gradients_that_some_ranks_lack(results: list[Any]) -> None:
    for found in of(results, "absent"):
        assert found["weight"].item() == 27
        assert found.get("bias", torch.zeros(1)).item() == 9 * (len(results) - 1)


def test_backward_again(results: list[Any]) -> None:
    for rank, found in enumerate(of(results, "again")):
        for name, once in found["once"].items():
            close(found["twice"][name], 2 * once)
        told = "BatchNorm1d at 'norms.0' takes its statistics from the nodes of its own rank"
        assert [told in text for text in found["warned"]] == [True] * (rank == 0 and len(results) > 1)


def test_dtypes(results: list[Any]) -> None:
    g = homogeneous()
    every = of(results, "dtypes")
    g.ndata["h"] = (g.ndata["feat"] * 4).round()
    g.update_all(fn.copy_u("h", "m"), fn.sum("m", "h"))
    for dtype in every[0]["sums"]:
        found = whole([one["sums"][dtype] for one in every], [one["ids"] for one in every])
        assert found.dtype == dtype
        assert torch.equal(found, g.ndata["h"].to(dtype))  # small whole numbers are exact in every dtype


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
