"""A batch as numbers: nodes in the order in which they were found, and the edges that each hop drew between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from shardpass.core.ranks import derive_seed
from shardpass.core.sampling.drawing import Numbering
from shardpass.core.sampling.neighbours import Drawer
from shardpass.core.sampling.source import Array
from shardpass.core.sharding import EdgeType, NodeType


class DrawnEdges(NamedTuple):
    """Edges of one type drawn in one hop.

    Args:
        src, dst: the numbers of their ends among the batch's nodes of these types, int64; `dst` ascends.
        edge_ids: their original ids, int64.
        fields: their rows of the wanted edge tensors.
    """

    src: Array
    dst: Array
    edge_ids: Array
    fields: dict[str, Tensor]


@dataclass
class Sample:
    """What was drawn for the seeds of one batch on this rank.

    Args:
        ids: global ids of the nodes by type: first the seeds, then the nodes that each hop found.
        num_nodes: how many nodes there are after the seeds and after each hop, by type, ``[num_hops + 1]``.
        hops: the edges drawn in each hop, by type, without types of fanout 0.
    """

    ids: dict[NodeType, Array]
    num_nodes: dict[NodeType, list[int]]
    hops: list[dict[EdgeType, DrawnEdges]]


def sample(
    drawer: Drawer,
    seeds: Mapping[NodeType, Array],
    fanouts: Sequence[Mapping[EdgeType, int]],
    seed: int,
    every_layer: bool,
) -> tuple[Sample, dict[NodeType, Array]]:
    """``(sample, numbers)``: what is drawn for `seeds`, and the number of each seed among the nodes. Collective.

    Args:
        drawer: draws from the graph.
        seeds: global ids by type, int64. If one comes several times, it is one node.
        fanouts: how many edges each hop draws, by edge type, beginning with the seeds' hop. The same on every rank.
        seed: of the batch, the same on every rank.
        every_layer: with True, every hop draws anew for all nodes so far, as for DGL's blocks. With False, it draws for
            the nodes that the hop before has found, as for PyG's subgraphs, so a node's in-edges are drawn once.
    """
    numberings = {kind: Numbering(drawer.loops, owned.num_total) for kind, owned in drawer.source.ownership.items()}
    nothing = np.empty(0, dtype=np.int64)
    numbers = {kind: numbering.add(seeds.get(kind, nothing)) for kind, numbering in numberings.items()}
    counts = {kind: [numbering.count] for kind, numbering in numberings.items()}
    starts = dict.fromkeys(numberings, 0)
    hops = []
    for layer, fanout in enumerate(fanouts):
        frontier = {kind: numbering.ids[starts[kind] :] for kind, numbering in numberings.items()}
        found = drawer.hop(frontier, fanout, derive_seed(seed, layer if every_layer else 0))
        drawn = {}
        for kind, hop in found.items():
            first = starts[kind[2]]
            dst = np.repeat(np.arange(first, first + len(hop.counts)), hop.counts)
            src = numberings[kind[0]].add(hop.src_ids)
            drawn[kind] = DrawnEdges(src, dst, hop.edge_ids, hop.fields)
        for node_type, numbering in numberings.items():
            starts[node_type] = 0 if every_layer else counts[node_type][-1]
            counts[node_type].append(numbering.count)
        hops.append(drawn)
    return Sample({kind: numbering.ids for kind, numbering in numberings.items()}, counts, hops), numbers
