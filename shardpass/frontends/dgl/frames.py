"""Node and edge data by name: dicts of tensors that check the number of rows, as DGL's frames do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
from dgl import DGLError
from torch import Tensor

from shardpass.core.following import user_line
from shardpass.core.ranks import FollowedTensor, plain_of
from shardpass.errors import RefusedError
from shardpass.frontends.dgl.closed import refused

_IDS = ("dgl.NID", "dgl.EID")


def hidden_in(fields: Mapping[str, Tensor]) -> frozenset[str]:
    """The fields that are neither counted nor listed."""
    return getattr(fields, "hidden", frozenset())


def all_of(fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The fields by name, with those that are not listed."""
    return {**fields, **{name: fields[name] for name in hidden_in(fields) if name in fields}}


class LazyFields(MutableMapping[str, Tensor]):
    """Fields that are made of others, each when it is first read, and then kept. Fields may be set and deleted too.

    Args:
        rows: the fields of which they are made.
        made: makes one of them.
        note: called with the name of each field that is read.
        hidden: fields that are there by their names, but are neither counted nor listed: the original ids, which a
            DGLGraph does not have. `None`: those of `rows`.
    """

    def __init__(
        self,
        rows: Mapping[str, Tensor],
        made: Callable[[Tensor], Tensor],
        note: Callable[[str], None] | None = None,
        hidden: frozenset[str] | None = None,
    ) -> None:
        self._rows, self._made, self._note = rows, made, note
        self.hidden = hidden_in(rows) if hidden is None else hidden
        self._own: dict[str, Tensor] = {}
        self._gone: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        if name not in self:
            raise KeyError(name)
        if name not in self._own:
            self._own[name] = self._made(self._rows[name])
            if self._note is not None:
                self._note(name)
        found = self._own[name]
        return found.around.met(found) if isinstance(found, FollowedTensor) else found

    def __setitem__(self, name: str, value: Tensor) -> None:
        self._own[name], self.hidden = value, self.hidden - {name}

    def __delitem__(self, name: str) -> None:
        if name not in self:
            raise KeyError(name)
        self._own.pop(name, None)
        self._gone.add(name)

    def __contains__(self, name: object) -> bool:
        return name in self._own or (name in self._rows and name not in self._gone)

    def __iter__(self) -> Iterator[str]:
        names = {**dict.fromkeys(self._rows), **self._own}
        return iter(name for name in names if name in self and name not in self.hidden)

    def __len__(self) -> int:
        return len(list(iter(self)))


class PlainFields(Mapping[str, Tensor]):
    """Fields as the engine reads them outside of a model: those that scripts are given in a form that is followed.

    Args:
        rows: the fields, which may change.
    """

    def __init__(self, rows: Mapping[str, Tensor]) -> None:
        self._rows = rows

    def __getitem__(self, name: str) -> Tensor:
        return plain_of(self._rows[name])  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


class Frame(LazyFields):
    """The data of this rank's nodes or edges of one type.

    Args:
        num_rows: how many rows every tensor has.
        total: how many nodes or edges all ranks have.
        what: ``"nodes"`` or ``"edges"``, for error messages.
        stored: the fields of the graph's store. Each is read when it is first asked for.
        hidden: as of `LazyFields`.
        check: refuses a tensor whose rows are known to be others.
        given: makes of a field what a script reads.
    """

    def __init__(
        self,
        num_rows: int,
        total: int,
        what: str,
        stored: Mapping[str, Tensor],
        hidden: frozenset[str] = frozenset(),
        check: Callable[[Tensor], None] = lambda rows: None,
        given: Callable[[Tensor], Tensor] = lambda rows: rows,
    ) -> None:
        super().__init__(stored, lambda rows: rows, hidden=hidden)
        self.num_rows, self.total, self.what, self._check, self._given = num_rows, total, what, check, given

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.num_rows} {self.what}: {', '.join(self)})"

    def __getitem__(self, name: str) -> Tensor:
        if name not in self:
            raise KeyError(f"no field {name!r} of these {self.what}; there are: {', '.join(self) or 'none'}")
        return super().__getitem__(name)

    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(value, Mapping):
            raise DGLError(f"field {name!r}: a dict of tensors is for graphs of several types; pass a tensor")
        value = value if isinstance(value, Tensor) else torch.as_tensor(value)
        self._check(value)
        rows = value.size(0) if value.dim() else 0
        if not value.dim() or rows != self.num_rows:
            if value.dim() and rows == self.total:
                ids = "graph.ndata[dgl.NID]" if self.what == "nodes" else "graph.edata[dgl.EID]"
                raise RefusedError(
                    f"{user_line()}: field {name!r} has a row for each of the {rows} {self.what} of the whole graph, "
                    f"of which this rank holds {self.num_rows}: use shardpass.NodeEmbedding(graph, width) for "
                    f"parameters of nodes, and tensor[{ids}] or a stored field for values"
                )
            raise DGLError(
                f"Expect number of features to match number of {self.what} (len(u)). Got {rows} and {self.num_rows} "
                f"instead: field {name!r} must have a row for each of this rank's own {self.what}"
            )
        super().__setitem__(name, self._given(value))

    def clone(self, kind: type[Frame] | None = None) -> Frame:
        """Another frame of the same tensors: what is set in one is not seen in the other.

        Args:
            kind: its class; `None` means the same class.
        """
        kind = kind or type(self)
        other = kind(self.num_rows, self.total, self.what, self._rows, self.hidden, self._check, self._given)
        other._own, other._gone = dict(self._own), set(self._gone)
        return other


class Frames(NamedTuple):
    """The data of a graph by node type, and by canonical edge type."""

    nodes: dict[str, Frame]
    edges: dict[tuple[str, str, str], Frame]


class FramesByType(MutableMapping[str, dict[Any, Tensor]]):
    """The data of several types: ``frames["h"]`` is a dict of the types that have the field, as in DGL."""

    def __init__(self, frames: dict[Any, Frame]) -> None:
        self._frames = frames

    def __getitem__(self, name: str) -> dict[Any, Tensor]:
        found = {kind: frame[name] for kind, frame in self._frames.items() if name in frame}
        if not found:
            raise KeyError(name)
        return found

    def __setitem__(self, name: str, value: Any) -> None:
        if not isinstance(value, Mapping):
            raise DGLError(f"field {name!r}: the graph has several types; pass a dict of tensors by type")
        for kind, tensor in value.items():
            if kind not in self._frames:
                raise DGLError(f"field {name!r}: no type {kind!r}; there are: {list(self._frames)}")
            self._frames[kind][name] = tensor

    def __delitem__(self, name: str) -> None:
        holders = [frame for frame in self._frames.values() if name in frame]
        if not holders:
            raise KeyError(name)
        for frame in holders:
            del frame[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(name for frame in self._frames.values() for name in frame))

    def __len__(self) -> int:
        return len(list(iter(self)))


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
