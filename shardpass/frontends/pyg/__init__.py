"""The PyG frontend: unmodified PyG models on a sharded graph."""

from shardpass.errors import require

require("torch_geometric", "pyg", "the PyG frontend")

from shardpass.frontends.pyg.attention import gather_attention  # noqa: E402
from shardpass.frontends.pyg.link_loader import LinkNeighborLoader  # noqa: E402
from shardpass.frontends.pyg.loader import NeighborLoader  # noqa: E402
from shardpass.frontends.pyg.wrap import exact, wrap  # noqa: E402

__all__ = ["LinkNeighborLoader", "NeighborLoader", "exact", "gather_attention", "wrap"]
