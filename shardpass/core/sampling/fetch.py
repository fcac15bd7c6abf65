"""What the owners of nodes know of them: rows of their fields, their original ids, their global ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from shardpass.core.exchange import Routed, exchange_arrays, exchange_rows
from shardpass.core.sampling.source import Array, SampledSource
from shardpass.core.sharding import NodeType

IDS = " ids"  # no field has a name with a space in front


class RowFetcher:
    """Fetches fields of nodes, and their original ids, from the ranks that own them.

    Args:
        source: this rank's share.
        fields: names by node type, the same on every rank.
        wire: the dtype in which float32 rows travel. `None` keeps float32.
    """

    def __init__(
        self, source: SampledSource, fields: Mapping[NodeType, Sequence[str]], wire: torch.dtype | None = None
    ) -> None:
        self._source, self._wire, self._fields = source, wire, fields
        self._tensors: dict[NodeType, dict[str, Tensor]] = {}

    def _of(self, kind: NodeType) -> dict[str, Tensor]:
        """The tensors of own nodes of a type whose rows other ranks fetch."""
        if kind not in self._tensors:  # fields may be mapped from files, so they are read on first use
            source = self._source
            held = {name: source.node_fields[kind][name].detach() for name in self._fields.get(kind, ())}
            if source.parts is None:
                held[IDS] = torch.from_numpy(source.node_ids[kind]).to(source.comm.device)
            self._tensors[kind] = held
        return self._tensors[kind]

    def fetch(self, ids: Mapping[NodeType, Array]) -> dict[NodeType, dict[str, Tensor]]:
        """The fields of nodes by type and name, and their original ids under `IDS`. Collective.

        Args:
            ids: global ids, int64, for the same types on every rank.
        """
        comm, parts = self._source.comm, self._source.parts
        if comm.size == 1:
            rows = {kind: torch.from_numpy(chosen).to(comm.device) for kind, chosen in ids.items()}
            return {
                kind: {name: tensor.index_select(0, chosen) for name, tensor in self._of(kind).items()}
                for kind, chosen in rows.items()
            }
        routes = {kind: Routed.of(wanted, self._source.ownership[kind]) for kind, wanted in ids.items()}
        found = self._ask({kind: route for kind, route in routes.items() if self._of(kind)})
        if parts is None:
            return found
        result = {}
        for kind, route in routes.items():
            original = np.empty(len(route.order), dtype=np.int64)
            held = zip(parts, route.split(route.rows))
            original[route.order] = np.concatenate([part.node_ids[kind][rows] for part, rows in held])
            result[kind] = {**found.get(kind, {}), IDS: torch.from_numpy(original).to(comm.device)}
        return result

    def _ask(self, routes: Mapping[NodeType, Routed]) -> dict[NodeType, dict[str, Tensor]]:
        if not routes:
            return {}
        comm, tensors = self._source.comm, [self._of(kind) for kind in routes]
        asked = list(zip(*(route.split(route.rows) for route in routes.values())))
        requests = exchange_arrays(comm, asked, "sampling: nodes of a batch")
        send = [[torch.from_numpy(rows).to(comm.device) for rows in request] for request in requests]
        counts = [[int(route.per_rank[rank]) for route in routes.values()] for rank in range(comm.size)]
        found = exchange_rows(comm, tensors, send, counts, self._wire, "sampling: node fields")
        result: dict[NodeType, dict[str, Tensor]] = {}
        for i, (kind, route) in enumerate(routes.items()):
            places = torch.from_numpy(route.order).to(comm.device).split(route.per_rank.tolist())
            result[kind] = {}
            for name, tensor in tensors[i].items():
                result[kind][name] = tensor.new_empty((len(route.order), *tensor.shape[1:]))
                for chosen, part in zip(places, found):
                    result[kind][name].index_copy_(0, chosen, part[i][name])
        return result
