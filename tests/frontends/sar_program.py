"""Scripts as SAR's documentation has them, one process per rank: ``sar_program.py RANK WORLD PORT DIR OUT CASE...``.

DIR holds partitions made by ``test_sar.py``. What each case returns goes to ``OUT.RANK``.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import dgl
import dgl.function as fn
import dgl.nn.pytorch as dnn
import torch
import torch.nn.functional as F
from torch import nn

from frontends.sar_meanings import collectives, graphs, loader, norms, patched  # noqa: F401
from frontends.sar_models import (
    EdgeScaled,
    Gat,
    Hetero,
    RelGcn,
    Results,
    Sage,
    TwoBranches,
    gradients,
    loaded,
    part_of,
    seeded,
    told,
    trained_once,
    without,
)
from shardpass.frontends import sar

EPOCHS = 4

# ---- cases


def training(model: str, directory: Path, device: str = "cpu") -> Results:
    """SAR's quick start."""
    sar.patch_dgl()
    partition_data = sar.load_dgl_partition_data(part_of(directory, "homo"), sar.rank(), torch.device(device))
    masks = {}
    for name in ("train_mask", "test_mask"):
        mask = sar.suffix_key_lookup(partition_data.node_features, name)
        masks[name] = mask.nonzero(as_tuple=False).view(-1).to(device)
    labels = sar.suffix_key_lookup(partition_data.node_features, "label").long().to(device)
    features = sar.suffix_key_lookup(partition_data.node_features, "feat").to(device)
    full_graph_manager = sar.construct_full_graph(partition_data).to(device)
    del partition_data
    num_labels = labels.max() + 1
    sar.comm.all_reduce(num_labels, torch.distributed.ReduceOp.MAX, move_to_comm_device=True)
    n_train = torch.LongTensor([masks["train_mask"].numel()])
    sar.comm.all_reduce(n_train, op=torch.distributed.ReduceOp.SUM, move_to_comm_device=True)
    gnn = seeded({"sage": Sage, "gat": Gat}[model], sar.DistributedBN1D, features.size(1), num_labels.item()).to(device)
    sar.sync_params(gnn)
    optimizer = torch.optim.Adam(gnn.parameters(), lr=0.02)
    losses = []
    for _ in range(EPOCHS):
        gnn.train()
        logits = gnn(full_graph_manager, features)
        train = masks["train_mask"]
        loss = F.nll_loss(F.log_softmax(logits[train], 1), labels[train], reduction="sum") / n_train.item()
        optimizer.zero_grad()
        loss.backward()
        sar.gather_grads(gnn)
        optimizer.step()
        total = loss.detach().clone()
        sar.comm.all_reduce(total)
        losses.append(total.item())
    gnn.eval()
    with torch.no_grad():
        logits = gnn(full_graph_manager, features)
    correct = (logits[masks["test_mask"]].argmax(1) == labels[masks["test_mask"]]).sum()
    sar.comm.all_reduce(correct)
    return {"losses": losses, "correct": correct.item(), "logits": logits, "ids": full_graph_manager.ndata["orig_id"]}


def mfgs(directory: Path) -> Results:
    """Layers of some nodes; rank 1 has none."""
    data, features = loaded(directory)
    rank = sar.rank()
    start, end = data.node_ranges[rank]
    seeds = torch.arange(start, end)[::4].flip(0) if rank != 1 else torch.zeros(0, dtype=torch.int64)
    blocks = [block.to("cpu") for block in sar.construct_mfgs(data, seeds, 3, True)]
    model = seeded(Sage, lambda n: nn.Identity())
    ids = data.node_features["_N/orig_id"]
    found = trained_once(model, blocks, features[blocks[0].input_nodes])
    return found | {
        "seeds": (ids[blocks[0].input_nodes], ids[blocks[-1].seeds]),
        "edges": [int(block.num_edges()) for block in blocks],
        "one_shot": seeded(Sage, lambda n: nn.Identity())(
            [block.get_full_partition_graph() for block in blocks], features[blocks[0].input_nodes]
        ).detach(),
    }


def mfgs_gat(directory: Path) -> Results:
    """GATConv views its rows with a -1, on a rank without rows."""
    data, features = loaded(directory)
    start, end = data.node_ranges[sar.rank()]
    seeds = torch.arange(start, end)[: 5 * (sar.rank() != 1)]
    (block,) = sar.construct_mfgs(data, seeds, 1)
    model = seeded(dnn.GATConv, 8, 3, 2)
    return trained_once(model, block, features[block.input_nodes])


def structure(directory: Path) -> Results:
    """Edge features and original ids, as loaded and in the graph."""
    data, _ = loaded(directory)
    graph = sar.construct_full_graph(data)
    return {
        "w": graph.edata["w"], "eid": graph.edata[dgl.EID], "nid": graph.ndata["orig_id"],
        "mask": graph.ndata["train_mask"],
        "in": graph.in_degrees(), "out": graph.out_degrees(), "keys": sorted(data.node_features), "data": data,
        "mode": graph.edges_of(None).plan.options,
    }  # fmt: skip


def modes(directory: Path) -> Results:
    """`Config` is followed from the next forward; the one-shot block gives the same."""
    data, features = loaded(directory)
    found = {}
    graph = sar.construct_full_graph(data)
    for name, attributes in {"sr": {}, "keep": {"disable_sr": True}, "deep": {"pipeline_depth": 3}}.items():
        for attribute, value in attributes.items():
            setattr(sar.Config, attribute, value)
        options = graph.edges_of(None).plan.options
        found[name] = trained_once(seeded(Gat, nn.Identity), graph, features)
        found[name]["options"] = (options.mode, options.prefetch)
        sar.Config.disable_sr, sar.Config.pipeline_depth = False, 1
    block = sar.construct_full_graph(data).get_full_partition_graph()
    found["one shot"] = trained_once(seeded(Gat, nn.Identity), block, features)
    options = block.edges_of(None).plan.options
    found["one shot"]["options"] = (options.mode, type(block).__name__)
    sar.Config.max_collective_size = 7
    found["short messages"] = trained_once(seeded(Gat, nn.Identity), graph, features)
    sar.Config.max_collective_size = 0
    return found


def functions(directory: Path) -> Results:
    """A decorated message function, and a softmax over in-edges."""
    data, features = loaded(directory)
    graph = sar.construct_full_graph(data)
    found = trained_once(seeded(EdgeScaled), graph, features)
    logits = graph.edata["w"].clone().requires_grad_()
    soft = sar.edge_softmax(graph, logits)
    (soft * graph.edata["w"]).sum().backward()
    same = torch.equal(soft, sar.patched_edge_softmax(graph, logits))
    return found | {"soft": soft.detach(), "soft_grad": logits.grad, "eid": graph.edata[dgl.EID], "same": same}


def hetero(directory: Path) -> Results:
    """Types are kept."""
    data = sar.load_dgl_partition_data(part_of(directory, "het"), sar.rank(), "cpu")
    graph = sar.construct_full_graph(data)
    model = seeded(Hetero, graph.canonical_etypes)
    sar.sync_params(model)
    h = {kind: data.node_features[f"{kind}/feat"].clone().requires_grad_() for kind in graph.ntypes}
    out = model(graph, h)
    sum(rows.pow(3).sum() for rows in out.values()).backward()
    sar.gather_grads(model)
    seeds = torch.arange(*data.node_ranges[sar.rank()])
    blocks = sar.construct_mfgs(data, seeds[seeds % 3 == 0], 1)
    rows = {kind: data.node_features[f"{kind}/feat"][blocks[0].input_nodes[kind]] for kind in graph.ntypes}
    part = model(blocks[0], rows)
    return {
        "types": (graph.ntypes, graph.canonical_etypes, data.node_type_names, data.edge_type_names),
        "out": {k: v.detach() for k, v in out.items()},
        "x_grad": {k: v.grad for k, v in h.items()},
        "grads": gradients(model),
        "ids": {k: graph.nodes[k].data["orig_id"] for k in graph.ntypes},
        "w": {kind: (graph.edges[kind].data[dgl.EID], graph.edges[kind].data["w"]) for kind in graph.canonical_etypes},
        "part": {k: (blocks[0].seeds[k], v.detach()) for k, v in part.items()},
    }


def rgcn(directory: Path) -> Results:
    """R-GCN on the graph of one type, the library's class and DGL's own, with the message flow graphs too."""
    data = sar.load_dgl_partition_data(part_of(directory, "het"), sar.rank(), "cpu")
    features = sar.suffix_key_lookup(data.node_features, "feat", type_list=data.node_type_names)
    expanded = sar.suffix_key_lookup(data.node_features, "only", True, data.node_type_names)
    graph = sar.construct_full_graph(data, homogeneous=True)
    sar.patch_dgl()
    num_types = len(data.edge_type_names)
    found = trained_once(seeded(RelGcn, sar.RelGraphConv, num_types), graph, features)
    model = seeded(RelGcn, dnn.RelGraphConv, num_types)
    sar.sync_params(model)
    seeds = torch.arange(*data.node_ranges[sar.rank()])[::5]
    blocks = sar.construct_mfgs(data, seeds, 2, homogeneous=True)
    return found | {
        "presorted": model(graph, features, presorted=True).detach(),
        "types": graph.ndata[dgl.NTYPE],
        "edges": (graph.edata[dgl.EID], graph.edata[dgl.ETYPE], graph.edata["w"]),
        "expanded": expanded,
        "seeds": blocks[-1].seeds,
        "mfgs": model(blocks, features[blocks[0].input_nodes]).detach(),
    }


def branches(directory: Path) -> Results:
    """The last rank uses another output than the others, and has no gradient of the first layer."""
    data, features = loaded(directory)
    graph = sar.construct_full_graph(data)
    model = seeded(TwoBranches)
    sar.sync_params(model)
    first, second = model(graph, features)
    (first if sar.rank() + 1 < sar.world_size() else second).pow(3).sum().backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None]
    sar.gather_grads(model)
    return {"grads": gradients(model), "ids": graph.ndata["orig_id"], "missing": missing}


def absent(directory: Path) -> Results:
    """Gradients that some ranks lack."""
    model = nn.Linear(1, 1).double()
    sar.sync_params(model)
    if sar.rank() == 0:
        model.weight.grad = torch.full_like(model.weight, 27.0)
    else:
        model.bias.grad = torch.full_like(model.bias, 9.0)
    sar.gather_grads(model)
    return gradients(model)


def again(directory: Path) -> Results:
    """Two backwards through one forward; a norm over own nodes only."""
    data, features = loaded(directory)
    graph = sar.construct_full_graph(data)
    model = seeded(Gat, sar.DistributedBN1D)
    sar.sync_params(model)
    loss = model(graph, features).pow(2).sum()
    loss.backward(retain_graph=True)
    once = gradients(model)
    loss.backward()
    twice = gradients(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sar.sync_params(seeded(Sage, nn.BatchNorm1d))
    return {"once": once, "twice": twice, "warned": [str(w.message) for w in caught]}


def dtypes(directory: Path) -> Results:
    """Rows of every dtype, summed over neighbours."""
    data, features = loaded(directory)
    graph = sar.construct_full_graph(data)
    found = {}
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        with graph.local_scope():
            graph.srcdata["h"] = (features * 4).round().to(dtype)
            graph.update_all(fn.copy_u("h", "m"), fn.sum("m", "h"))
            found[dtype] = graph.dstdata["h"]
    return {"sums": found, "ids": graph.ndata["orig_id"]}


def extremes(directory: Path) -> Results:
    """Ties, and nodes without in-edges, under max."""
    data, features = loaded(directory, "bare")
    graph = sar.construct_full_graph(data)
    h = torch.ones_like(features, requires_grad=True)
    with graph.local_scope():
        graph.srcdata["h"] = h
        graph.update_all(fn.copy_u("h", "m"), fn.max("m", "h"))
        out = graph.dstdata["h"]
    out.sum().backward()
    return {"out": out.detach(), "x_grad": h.grad, "ids": graph.ndata["orig_id"]}


def unready(directory: Path) -> Results:
    """A model that `sync_params` never saw."""
    data, features = loaded(directory)
    return trained_once(seeded(Sage, sar.DistributedBN1D), sar.construct_full_graph(data), features, ready=False)


def skips_backward(directory: Path) -> Results:
    """Rank 1 has no loss, and so does not call backward."""
    data, features = loaded(directory)
    model = seeded(Sage, sar.DistributedBN1D)
    sar.sync_params(model)
    out = model(sar.construct_full_graph(data), features)
    if sar.rank() != 1:
        out.sum().backward()
    sar.gather_grads(model)
    return {}


def config_differs(directory: Path) -> Results:
    """Rank 1 changes `Config` after the graph was made, the others do not."""
    data, features = loaded(directory)
    graph = sar.construct_full_graph(data)
    sar.Config.disable_sr = sar.rank() == 1
    return trained_once(seeded(Gat, nn.Identity), graph, features)


def misuse(directory: Path) -> Results:
    """Rank 1 has the part of another rank, another `Config`, and passes rows of its part instead of ids."""
    data, _ = loaded(directory)
    mine, odd = sar.rank(), sar.rank() == 1
    other = sar.load_dgl_partition_data(part_of(directory, "homo"), 0 if odd else mine, "cpu")
    found = {"part": told(lambda: sar.construct_full_graph(other))}
    sar.Config.disable_sr = odd
    found["Config"] = told(lambda: sar.construct_full_graph(data))
    sar.Config.disable_sr, sar.Config.pipeline_depth = False, -1 if odd else 1
    found["depth"] = told(lambda: sar.construct_full_graph(data))
    sar.Config.pipeline_depth = 1
    seeds = torch.arange(3) + (0 if odd else data.node_ranges[mine][0])
    found["seeds"] = told(lambda: sar.construct_mfgs(data, seeds, 2))
    found["part lacks"] = told(lambda: sar.construct_full_graph(without(data, "_N/feat") if odd else data))
    return found


def fails_in_forward(directory: Path) -> Results:
    """A model that raises on one rank, and is called again."""
    data, features = loaded(directory)
    graph = sar.construct_full_graph(data)
    model = seeded(Sage, sar.DistributedBN1D)
    sar.sync_params(model)
    hook = model.register_forward_hook(lambda *_: 1 / 0)
    try:
        model(graph, features)
    except ZeroDivisionError:
        hook.remove()
    return trained_once(model, graph, features)


def dist_graph(directory: Path) -> Results:
    """A DistGraph without servers, which has one part."""
    dgl.distributed.initialize("")
    found = {}
    for name in ("homo", "het"):
        graph = dgl.distributed.DistGraph(name, part_config=part_of(directory, name))
        manager = sar.convert_dist_graph(graph)
        kinds = manager.canonical_etypes
        found[name] = {
            "nodes": {kind: dict(manager.nodes[kind].data) for kind in manager.ntypes},
            "edges": {kind: dict(manager.edges[kind].data) for kind in kinds},
            "degrees": {kind: one.in_degrees() for kind, one in manager.graph_shard_managers.items()},
        }
    return found


CASES = {
    name: function
    for name, function in list(globals().items())
    if callable(function) and getattr(function, "__annotations__", {}).get("return") == "Results"
}


def main() -> None:
    rank, world, port, directory, out, *cases = sys.argv[1:]
    torch.set_num_threads(1)
    ip = "127.0.0.1"
    if os.environ.get("PROGRAM_IP_FILE"):
        ip = sar.nfs_ip_init(int(rank), os.environ["PROGRAM_IP_FILE"])
    sar.initialize_comms(int(rank), int(world), ip, "gloo", torch.device("cpu"), int(port))
    sar.logging_setup("WARNING", sar.rank(), sar.world_size())
    found: Results = {}
    for case in cases:
        name, *arguments = case.split("-")
        found[case] = CASES[name](*arguments, directory=Path(directory))
    torch.save(found, f"{out}.{rank}")


if __name__ == "__main__":
    main()
