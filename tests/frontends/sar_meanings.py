"""What SAR's names mean, as cases of ``sar_program.py``: which ids, which order, when a setting counts."""

from __future__ import annotations

import warnings
from pathlib import Path

import dgl
import dgl.nn.pytorch as dnn
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frontends.sar_models import Results, gradients, loaded, part_of, seeded, told, trained_once
from shardpass.frontends import sar

EARLY = sar.DistributedBN1D(8)  # made before initialize_comms


def collectives(directory: Path) -> Results:
    """Tensors between ranks, in place."""
    rank, size = sar.rank(), sar.world_size()
    sent = [torch.full((other + 1, 2), 10.0 * rank + other) for other in range(size)]
    received = [torch.zeros(rank + 1, 2) for _ in range(size)]
    found: Results = {}
    for exchange in (sar.comm.all_to_all, sar.comm.all_to_all_rounds, sar.comm.all_to_all_gloo_support):
        for into in received:
            into.zero_()
        exchange(received, sent)
        found[exchange.__name__] = [into.clone() for into in received]
    found["exchange_tensors"] = sar.comm.exchange_tensors(sent)
    found["with sizes"] = sar.comm.exchange_tensors(sent, recv_sizes=[rank + 1] * size)
    single = torch.zeros(3)
    sar.comm.exchange_single_tensor((rank - 1) % size, (rank + 1) % size, single, torch.arange(3.0) + rank)
    found["single"] = single
    found["told"] = told(lambda: sar.comm.exchange_tensors(sent, recv_sizes=[7] * size))
    place = sar.comm.backend(), sar.comm.master_ip(), sar.comm.get_socket().ip_addr
    return found | {"place": place, "initialized": sar.comm.is_initialized()}


def norms(directory: Path) -> Results:
    """A norm that was made before ranks met, and the statistics it needs."""
    data, features = loaded(directory)
    found: Results = {"orig_id": data.node_features["_N/orig_id"]}
    x = features.clone().requires_grad_()
    EARLY.double()(x).pow(3).sum().backward()
    found["bn"] = x.grad
    for name, statistic in (("mean", sar.distributed_bn.MeanOp), ("var", sar.distributed_bn.VarOp)):
        x = features.clone().requires_grad_()
        value = statistic.apply(x)
        (value * torch.arange(8.0)).sum().backward()
        found[name] = value.detach(), x.grad
    alone = sar.DistributedBN1D(8, distributed=False).double()
    return found | {"alone": alone(features).detach(), "features": features}


def loader(directory: Path) -> Results:
    """Seeds are node ids of the whole graph; they keep their order, and stay on their rank."""
    data, features = loaded(directory)
    graph = sar.construct_full_graph(data)
    rank = sar.rank()
    start, end = data.node_ranges[rank]
    seeds = torch.arange(start, end).flip(0)[rank:]  # in another order than the ids, and not equally many
    labels = sar.suffix_key_lookup(data.node_features, "label")
    sampler = sar.DistNeighborSampler([3, -1], input_node_features={"f": features}, output_node_features={"f": labels})
    found: Results = {"seeds": seeds, "range": (start, end), "orig_id": data.node_features["_N/orig_id"]}
    for name, options in {"order": {}, "drop": {"drop_last": True}, "shuffle": {"shuffle": True}}.items():
        batches = sar.DataLoader(graph, seeds, sampler, 7, **options)
        found[name] = [[seen(block) for block in blocks] for blocks in batches]
    found["length"] = len(batches)
    found["epoch 2"] = [seen(blocks[-1])["dst"] for blocks in batches]
    one = sar.DataLoader(graph, seeds[:2], sar.DistNeighborSampler([2], copy_edata=False, output_device="cpu"))
    found["default"] = [seen(block) for (block,) in one]
    heavy = sar.DistNeighborSampler([1], "heavy")  # by position: weights, as in SAR
    graph.edata["heavy"] = (graph.edata[dgl.EID] % 3 == 0).double()
    found["weighted"] = [seen(block) for block in heavy.sample(graph, seeds)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        foreign = sar.DataLoader(graph, (seeds[:5] + 30) % 60, sampler, 5)
    found["foreign"] = [seen(blocks[-1])["dst"] for blocks in foreign], [str(one.message) for one in caught]
    typed_data = sar.load_dgl_partition_data(part_of(directory, "het"), rank, "cpu")
    typed = sar.construct_full_graph(typed_data)
    first, last = typed.tgt_node_range
    (block,) = sar.DistNeighborSampler([-1]).sample(typed, torch.arange(first, last))
    kinds = typed_data.node_features[dgl.NTYPE]
    found["typed"] = [
        (block.dstnodes[kind].data[dgl.NID], torch.arange(first, last)[kinds == number])
        for number, kind in enumerate(typed.ntypes)
    ] + [(block.in_degrees(etype=kind), typed.in_degrees(etype=kind)) for kind in typed.canonical_etypes]
    found["told"] = [
        told(lambda: sar.DataLoader(graph, torch.arange(3) + (data.node_ranges[-1][1] if rank == 0 else 0), sampler)),
        told(lambda: sar.DataLoader(graph, seeds[:1] if rank == 0 else seeds, sampler, 5)),
    ]
    return found


def seen(block: dgl.DGLGraph) -> Results:
    """The data of one block."""
    src, dst = block.edges()
    ids = block.srcdata[dgl.NID]
    return {
        "src": ids, "dst": block.dstdata[dgl.NID], "edges": (ids[src], block.dstdata[dgl.NID][dst]),
        "eid": block.edata[dgl.EID], "names": sorted(block.edata),
        "f": (block.srcdata.get("f"), block.dstdata.get("f")),
    }  # fmt: skip


def graphs(directory: Path) -> Results:
    """What a graph knows of the partition, and its counts."""
    data, _ = loaded(directory)
    graph, rank = sar.construct_full_graph(data), sar.rank()
    start, end = data.node_ranges[rank]
    (block,) = sar.construct_mfgs(data, torch.arange(start, end)[::2], n_layers=1)
    sampled = graph.sampling_graph
    typed_data = sar.load_dgl_partition_data(part_of(directory, "het"), rank, "cpu")
    typed = sar.construct_full_graph(typed_data)
    (typed_block,) = sar.construct_mfgs(typed_data, torch.arange(*typed.tgt_node_range)[::2], n_layers=1)
    book, kinds = typed_block._partition_book, typed_block.ntypes
    return {
        "ranges": (graph.node_ranges == data.node_ranges, graph.node_ranges() == data.node_ranges),
        "own": (graph.tgt_node_range == (start, end), graph.local_src_node_range == (start, end)),
        "book": graph.partition_book() is graph._partition_book is data.partition_book,
        "ids": (graph.ndata[dgl.NID].tolist() == list(range(start, end)), graph.srcnodes().tolist()),
        "types": (data.node_features[dgl.NTYPE], data.all_shard_edges[0].edge_features[dgl.ETYPE]),
        "counts": (graph.num_nodes() / 2, 2 * graph.number_of_edges(), graph.num_nodes() % 3, -graph.num_nodes()),
        "global": (graph.num_nodes_global(), graph.number_of_edges_global(), typed.num_nodes_global("user")),
        "typed": (typed.num_nodes_global(), typed.num_edges_global("buys"), typed.ntypes_global(), typed.num_nodes()),
        "is typed": isinstance(typed, sar.HeteroGraphShardManager) and isinstance(graph, sar.GraphShardManager),
        "typed block": (kinds, typed_block.num_nodes(), [typed_block.num_nodes(k) for k in kinds]),
        "typed sources": [typed_block.srcnodes(k).numel() for k in typed.ntypes],
        "bipartite": (typed_block["buys"].num_nodes(), typed_block["buys"].num_dst_nodes()),
        "srcnodes": [typed.srcnodes(k).numel() == book.partid2nids(rank, k).numel() for k in typed.ntypes],
        "block": (block.num_nodes(), block.num_src_nodes(), block.num_dst_nodes(), block.srcnodes()),
        "block src": (block.srcdata[dgl.NID], block.srcnodes() + start),
        "block dst": (block.dstdata[dgl.NID], block.dstnodes() + start),
        "sampled": (sampled.num_nodes(), *sampled.edges(), sampled.edata[dgl.EID]),
        "orig_id": data.node_features["_N/orig_id"],
        "shard": sar.core.GraphShard(data.all_shard_edges[0], data.node_ranges[0], (start, end), data.edge_type_names),
    }  # fmt: skip


class DocumentedRelGraphConv(dnn.RelGraphConv):
    """As SAR's documentation subclasses it."""

    @sar.message_has_parameters(lambda self: tuple(self.linear_r.parameters()))
    def message(self, edges: object) -> dict[str, Tensor]:
        return super().message(edges)


class TypedOnce(nn.Module):
    """One layer over typed edges."""

    def __init__(self, conv: type[nn.Module]) -> None:
        super().__init__()
        self.conv = conv(8, 6, 3, "basis", 2)

    def forward(self, graph: object, h: Tensor) -> Tensor:
        return self.conv(graph, h, graph.edata[dgl.ETYPE])


def patched(directory: Path) -> Results:
    """DGL's attention, patched as SAR's documentation does it, in a model that `sync_params` knows or does not."""
    data, features = loaded(directory)
    graph = sar.construct_full_graph(data)

    def patched_edge_softmax(graph, *args, **kwargs):
        if isinstance(graph, sar.GraphShardManager):
            return sar.edge_softmax(graph, *args, **kwargs)
        return dgl.nn.edge_softmax(graph, *args, **kwargs)

    modules = dnn.conv.gatconv, dnn.conv.dotgatconv, dnn.conv.agnnconv
    kept = [module.edge_softmax for module in modules]
    for module in modules:
        module.edge_softmax = patched_edge_softmax
    found = {"synced": trained_once(seeded(dnn.GATConv, 8, 3, 2), graph, features)}
    model = seeded(dnn.GATConv, 8, 3, 2)
    F.elu(model(graph, features)).pow(3).sum().backward()
    sar.gather_grads(model)
    for module, original in zip(modules, kept):
        module.edge_softmax = original
    typed = sar.load_dgl_partition_data(part_of(directory, "het"), sar.rank(), "cpu")
    rows = sar.suffix_key_lookup(typed.node_features, "feat", type_list=typed.node_type_names)
    whole = sar.construct_full_graph(typed, homogeneous=True)
    return found | {
        "plain": gradients(model),
        "rgcn": trained_once(seeded(TypedOnce, DocumentedRelGraphConv), whole, rows),
    }
