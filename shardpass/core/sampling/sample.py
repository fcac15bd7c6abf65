"""A batch as numbers: nodes in the order in which they were found, and the edges drawn in each hop between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from shardpass.core.ranks import derive_seed
from shardpass.core.sampling.drawing import Numbering
from shardpass.core.sampling.neighbours import Drawer
from shardpass.core.sharding import EdgeType, NodeType

Array = Any


class DrawnEdges(NamedTuple):
    """Edges of one type drawn in one hop, in the batch's numbers of nodes; all int64 but for the fields.

    Args:
        src, dst: numbers of their ends among the batch's nodes of their types; `dst` ascends.
        edge_ids: original ids.
        fields: rows of edge tensors.
    """

    src: Array
    dst: Array
    edge_ids: Array
    fields: dict[str, Tensor]


@dataclass
class Sample:
    """What was drawn for the seeds of one batch on this rank.

    Args:
        ids: global ids of the nodes by type; the seeds come first, then those found in each hop.
        num_nodes: by type, how many nodes there are after the seeds and after each hop, ``[num_hops + 1]``.
        hops: the edges drawn in each hop, by type; types of fanout 0 are left out.
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
        drawer: over the graph.
        seeds: global ids by type, int64; one may come several times and is one node then.
        fanouts: of each hop, by edge type, the seeds' hop first; the same on every rank.
        seed: of the batch; the same on every rank.
        every_layer: as DGL's blocks: every hop draws anew for all nodes so far. Otherwise as PyG's subgraphs: for the
            nodes that the hop before has found, so that a node's in-edges are drawn once.
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
