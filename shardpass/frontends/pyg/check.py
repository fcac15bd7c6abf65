"""How PyG models take part in the self-check, see `shardpass.core.selfcheck`."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch_geometric.nn import Sequential

from shardpass.core.graphs import ShardedGraph
from shardpass.core.ranks import Ranks
from shardpass.core.selfcheck import Fields, Frontend, copy_for_check
from shardpass.core.sharding import EDGE
from shardpass.testing.hetero import shard_by_type
from shardpass.testing.run import run


def copy_of_model(model: nn.Module) -> nn.Module | None:
    """A copy of `model` for the self-check; None, with a warning, where it cannot run."""
    if not _being_imported(model):
        return copy_for_check(model)
    warnings.warn(
        f"{type(model).__name__} runs without the self-check: gnn.Sequential imports the script that built it "
        f'again. Put what the script does into a function under `if __name__ == "__main__":`',
        stacklevel=3,
    )
    return None


def _being_imported(model: nn.Module) -> bool:
    """Whether a script that built a `gnn.Sequential` is being imported: copies in other threads would wait for it."""
    scripts = {vars(module).get("_caller_module") for module in model.modules() if isinstance(module, Sequential)}
    specs = [getattr(sys.modules.get(script), "__spec__", None) for script in scripts if script]
    return any(getattr(spec, "_initializing", False) for spec in specs)


def checked_by(wrap: Callable[[nn.Module, Ranks], nn.Module]) -> Frontend:
    """What the self-check asks of this frontend, whose models are wrapped by `wrap`."""
    return Frontend(
        wrap=wrap,
        run=run,
        shard=shard_by_type,
        core_of=lambda value: value if isinstance(value, ShardedGraph) else None,
        fields_of=lambda graph: {},
        whole=_whole,
        sharded=lambda graph, fields: graph,
    )


def _whole(num_nodes: dict[Any, int], edges: dict[Any, Tensor], fields: Fields) -> Any:
    return edges[EDGE] if list(edges) == [EDGE] else edges
