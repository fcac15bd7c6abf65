"""NodeEmbedding: a learnable table with a row per node, each rank holding the rows of its own nodes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardpass.core.graphs.graph import ShardedGraph, one_type, require_graph
from shardpass.core.ranks import derive_seed, digest, require_count, tensor_digest
from shardpass.core.sharding import NodeType
from shardpass.errors import RefusedError

_BLOCK = 1 << 12
_MOST_CHANNELS = 1 << 24


class OwnRows(nn.Parameter):
    """A parameter of which every rank has rows of its own: not broadcast, its gradient not summed over ranks."""

    shardpass_local = True


class NodeEmbedding(nn.Module):
    """Learnable rows of this rank's nodes: ``NodeEmbedding(graph, 64)()`` is ``[num_nodes, 64]``. Not collective.

    It takes the place of ``torch.nn.Embedding(num_nodes, dim)`` in a model: `weight` holds the own rows in the order of
    ``graph.node_ids``. `sync_parameters` and `sync_gradients` leave it alone, and checkpoints load on any number of
    ranks. The first values are standard normal. They only depend on the original ids and on torch's random state, which
    `shardpass.seed` makes the same on every rank, so they are the same for any number of ranks.

    Its ``state_dict`` has the rows of this rank alone, and says of which nodes: it loads where the same nodes are.

    Args:
        graph: this rank's share.
        dim: columns of the table.
        node_type: the type of the nodes, in a graph of several types.
        dtype: of the table; `None` for torch's default.

    Raises:
        ValueError: `node_type` is unknown, or missing for a graph of several types.
    """

    shardpass_own_rows = True

    def __init__(
        self, graph: ShardedGraph, dim: int, node_type: NodeType | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        require_graph(graph, "NodeEmbedding(graph, dim)")
        dim = require_count(dim, "channels", "NodeEmbedding(graph, dim)", 1, _MOST_CHANNELS)
        kind = one_type(node_type, graph.node_types)
        self.node_type: NodeType = kind
        self.total_nodes = graph.ownership[self.node_type].num_total
        ids = graph.node_ids_dict[self.node_type]
        self._nodes = digest(tensor_digest(ids))
        seed = int(torch.randint(2**62, ()))
        self.register_load_state_dict_post_hook(_may_come_without_nodes)
        self.weight = OwnRows(_normal_rows(ids.cpu(), dim, seed, dtype).to(graph.comm.device))

    def forward(self, *ids: Any) -> Tensor:
        """The own rows, ``[num_nodes, dim]``. It takes no ids: row i is that of node ``graph.node_ids[i]``."""
        if ids:
            raise TypeError(
                f"NodeEmbedding returns the rows of this rank's {self.node_type!r} nodes: call it without ids, "
                f"`emb()` in place of `emb(ids)`; row i is that of node graph.node_ids[i]"
            )
        return self.weight

    def get_extra_state(self) -> Tensor:
        """The fingerprint of the nodes whose rows these are, ``[1]`` int64."""
        return torch.tensor([self._nodes])

    def set_extra_state(self, state: Tensor) -> None:
        """Raise RefusedError if the rows that were loaded are those of other nodes."""
        if state.tolist() != [self._nodes]:
            raise RefusedError(
                f"the rows of this NodeEmbedding that were loaded are of other {self.node_type!r} nodes than this "
                f"rank has: a state_dict holds the rows of one rank, and so does a file of torch.save or of "
                f"torch.distributed.checkpoint. Save by shardpass.save_checkpoint, which keeps the rows of all ranks"
            )

    def extra_repr(self) -> str:
        return f"{self.weight.size(0)} of {self.total_nodes} {self.node_type!r} rows, dim={self.weight.size(1)}"


def _may_come_without_nodes(module: nn.Module, incompatible: Any) -> None:
    """Rows that were put into order by hand, as ``rows[graph.node_ids]``, do not say of which nodes they are."""
    missing = incompatible.missing_keys
    if missing and missing[-1].endswith("_extra_state"):
        missing.pop()  # this module's, which has no children


def _normal_rows(ids: Tensor, dim: int, seed: int, dtype: torch.dtype | None) -> Tensor:
    """Row i is that of node ``ids[i]`` in a table which `seed` alone decides, made block by block."""
    rows = torch.empty(ids.numel(), dim, dtype=dtype)
    blocks = ids // _BLOCK
    for block in torch.unique(blocks).tolist():
        mine = (blocks == block).nonzero().view(-1)
        generator = torch.Generator().manual_seed(derive_seed(seed, block))
        rows[mine] = torch.randn(_BLOCK, dim, generator=generator, dtype=dtype)[ids[mine] - block * _BLOCK]
    return rows


def node_embeddings(model: nn.Module) -> dict[str, Any]:
    """The `NodeEmbedding` modules of a model, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, NodeEmbedding)}
