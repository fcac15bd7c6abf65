"""``graph.nodes["paper"].data`` and its like."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from shardpass.frontends.dgl.closed import refused
from shardpass.frontends.dgl.frames import Frame

_IDS = ("dgl.NID", "dgl.EID")


@dataclass(frozen=True)
class DataView:
    """The nodes or edges of one type."""

    data: Frame


@dataclass(frozen=True, eq=False)
class DataViews:
    """What ``graph.nodes``, ``srcnodes``, ``dstnodes`` and ``edges`` are: data by type.

    Args:
        name: the name of the property, for error messages.
        frames: the data by type.
        canonical: gives the key in `frames` that a type means.
    """

    name: str
    frames: dict[Any, Frame]
    canonical: Callable[[Any], Any]

    def __getitem__(self, kind: Any) -> DataView:
        if isinstance(kind, slice) and kind == slice(None):
            kind = None
        if kind is None and len(self.frames) == 1:
            return DataView(next(iter(self.frames.values())))
        if kind is not None and not all(
            isinstance(name, str) for name in (kind if isinstance(kind, tuple) else [kind])
        ):
            field, ids = self.name.replace("nodes", "ndata").replace("edges", "edata"), _IDS["edges" in self.name]
            raise refused(
                f"graph.{self.name}[...] by number",
                f"every rank numbers its own rows anew. Pick rows of a field by a mask: "
                f"graph.{field}[name][torch.isin(graph.{field}[{ids}], ids)]",
            )
        kind = self.canonical(kind)
        if kind not in self.frames:
            raise KeyError(f"{self.name}: no type {kind!r}; there are: {list(self.frames)}")
        return DataView(self.frames[kind])

    @property
    def data(self) -> Any:
        """The data of the only type."""
        return self[None].data

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise refused(
            f"graph.{self.name}()",
            "ids are numbered per rank; graph.ndata[dgl.NID] and graph.edata[dgl.EID] hold the original ones, and a "
            "function given to graph.apply_edges sees the rows of both ends of edges. What changes the graph, as "
            "dgl.add_self_loop does, is done before partitioning",
        )
