"""Message-flow graphs: each layer computes only the nodes that the wanted ones need. DGL calls them blocks.

The last layer computes the wanted nodes, the layer before it these and their in-neighbours, and so on. A layer still
sees the whole edge list of the rank, so that degrees and normalisation are those of the graph. Only `propagate` does
less: it leaves out edges into other nodes and does not fetch their halo rows. The rows of other nodes have no meaning.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from shardpass.core.exchange import build_halo_plan, halo_fetch, scatter_to_owners
from shardpass.core.graphs.edge_index import ShardedEdgeIndex
from shardpass.core.graphs.layer_flow import FlowUse, LayerFlow
from shardpass.core.sharding import Ownership


def message_flow(edge_index: ShardedEdgeIndex, sources: Ownership, wanted: Tensor, num_layers: int) -> list[LayerFlow]:
    """What each of `num_layers` layers has to compute, the first one first. Collective.

    Args:
        edge_index: of a graph whose sources and destinations are the same nodes.
        sources: their ownership.
        wanted: the own rows that the last layer must compute, ``[num_nodes]`` bool.
        num_layers: the same on every rank.
    """
    plan = edge_index.plan
    src_rows, dst_rows = edge_index.sources_first
    own_ids = sources.to_global(torch.arange(plan.num_own_src, device=wanted.device), plan.comm.rank)
    ids = halo_fetch(own_ids, plan, "layers: ids")
    flows: list[LayerFlow] = []
    use = FlowUse()
    for number in reversed(range(num_layers)):
        kept = wanted[dst_rows]
        smaller, rows = build_halo_plan(plan.comm, sources, ids[src_rows[kept]], plan.num_dst, plan.options)
        new_rows = torch.full((plan.num_src,), -1, device=wanted.device)
        new_rows[: plan.num_own_src] = torch.arange(plan.num_own_src, device=wanted.device)
        new_rows[src_rows[kept]] = rows
        smaller = replace(smaller, relation=plan.relation)
        flows.insert(0, LayerFlow(wanted, smaller, new_rows, number, use))
        read = torch.zeros(plan.num_src, device=wanted.device)
        read[src_rows[kept]] = 1
        wanted = wanted | (scatter_to_owners(read, plan, "layers: nodes that are read") > 0)
    return flows
