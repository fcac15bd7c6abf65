"""What the examples train on, and how they load it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import dgl
import torch
from torch import Tensor

from shardpass.frontends import sar

NODES = 70
TYPES = {"author": 24, "paper": 40}
RELATIONS = [("author", "writes", "paper"), ("paper", "written by", "author"), ("paper", "cites", "paper")]


def arxiv() -> dgl.DGLGraph:
    """A small citation graph: both directions, self-loops; everything of nodes in ndata."""
    torch.manual_seed(3)
    graph = dgl.add_self_loop(dgl.to_bidirected(dgl.graph(tuple(torch.randint(NODES, (2, 260))), num_nodes=NODES)))
    graph.ndata["features"] = torch.randn(NODES, 10, dtype=torch.float64)
    graph.ndata["labels"] = torch.randint(4, (NODES,))
    graph.ndata["orig_id"] = torch.arange(NODES)
    for number, name in enumerate(("train_mask", "val_mask", "test_mask")):
        graph.ndata[name] = torch.arange(NODES) % 3 == number
    return graph


def mag() -> dgl.DGLGraph:
    """A small graph of papers and authors; papers have labels."""
    torch.manual_seed(4)
    ends = {kind: tuple(torch.randint(TYPES[end], (100,)) for end in (kind[0], kind[2])) for kind in RELATIONS}
    graph = dgl.heterograph(ends, TYPES)
    for kind, count in TYPES.items():
        graph.nodes[kind].data["features"] = torch.randn(count, 10, dtype=torch.float64)
    graph.nodes["paper"].data["labels"] = torch.randint(4, (TYPES["paper"],))
    graph.nodes["paper"].data["train_mask"] = torch.arange(TYPES["paper"]) % 2 == 0
    return graph


def write(directory: Path, parts: int) -> None:
    """Partition both, as ``partition_graph`` of DGL does it."""
    for name, graph in (("arxiv", arxiv()), ("mag", mag())):
        dgl.distributed.partition_graph(graph, name, parts, str(directory / name), num_hops=1, part_method="random")


def joined(args: argparse.Namespace) -> sar.PartitionData:
    """This rank's part, after the ranks have met through a file."""
    master_ip_address = sar.nfs_ip_init(args.rank, args.ip_file)
    sar.initialize_comms(args.rank, args.world_size, master_ip_address, args.backend, torch.device("cpu"), args.port)
    return sar.load_dgl_partition_data(args.partitioning_json_file, args.rank, torch.device("cpu"))


def of(partition_data: sar.PartitionData, name: str) -> Tensor:
    """A feature of this rank's nodes."""
    return sar.suffix_key_lookup(partition_data.node_features, name)


def total(value: Any) -> Tensor:
    """The sum over ranks of a number."""
    number = torch.as_tensor(value).detach().clone()
    sar.comm.all_reduce(number, torch.distributed.ReduceOp.SUM, move_to_comm_device=True)
    return number
