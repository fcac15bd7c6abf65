"""The JSON beside the parts of a DGL partition: which ids and files belong to which part."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardpass.data.raw import EdgeType

_FILES = ("part_graph", "node_feats", "edge_feats")


class IdRanges:
    """DGL's ids after partitioning. Those of one type in one part are consecutive. A type goes by its number.

    sizes: the number of ids of each type in each part, [types, parts]. totals: the number of ids of each type.

    Args:
        path: the JSON, which errors name.
        what: ``"node"`` or ``"edge"``, for errors.
        ranges: the first id and the end of each type in each part, [types, parts, 2].
    """

    def __init__(self, path: Path, what: str, ranges: np.ndarray) -> None:
        self.what, self.num_parts, self._ranges = what, ranges.shape[1], ranges
        self.sizes = sizes = ranges[:, :, 1] - ranges[:, :, 0]
        self._offsets = np.concatenate([np.zeros((len(ranges), 1), np.int64), sizes.cumsum(1)], 1)
        self.totals: list[int] = self._offsets[:, -1].tolist()
        kinds, parts = np.nonzero(sizes)
        order = ranges[kinds, parts, 0].argsort()
        self._kinds, self._parts = kinds[order], parts[order]
        self._starts, ends = ranges[self._kinds, self._parts].T
        if (sizes < 0).any() or not np.array_equal(self._starts, np.concatenate([[0], ends])[: len(ends)]):
            raise ValueError(f"{path} is altered: the {what} ids of its parts have gaps or overlap")

    def rows(self, kind: int, part: int) -> slice:
        """Where the ids of a part are among those of their type."""
        return slice(int(self._offsets[kind, part]), int(self._offsets[kind, part + 1]))

    def size(self, kind: int, part: int) -> int:
        """The number of ids of a type in a part."""
        return int(self.sizes[kind, part])

    def count(self, part: int) -> int:
        """The number of ids of a part, of all types."""
        return int(self.sizes[:, part].sum())

    def by_type(self, values: np.ndarray) -> list[np.ndarray]:
        """The values of each type, given those of all ids."""
        return [np.concatenate([values[start:end] for start, end in ranges]) for ranges in self._ranges]

    def locate(self, ids: np.ndarray, path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The type, the number within the type, and the part of each id.

        Raises:
            ValueError: when an id is out of range. The error names `path`.
        """
        ids = ids.astype(np.int64, copy=False)
        if ids.size and not (ids.min() >= 0 and ids.max() < sum(self.totals)):
            raise ValueError(f"{path} is altered: a {self.what} id is outside [0, {sum(self.totals)})")
        run = np.searchsorted(self._starts, ids, side="right") - 1
        kinds, parts = self._kinds[run], self._parts[run]
        return kinds, ids - self._starts[run] + self._offsets[kinds, parts], parts

    def check_owned(self, ids: np.ndarray, part: int, path: Path) -> None:
        """Return when these are all ids of a part, each once.

        Raises:
            ValueError: when they are not. The error names `path`.
        """
        _, _, parts = self.locate(ids, path)
        if (parts != part).any() or ids.size != self.count(part) or np.unique(ids).size != ids.size:
            raise ValueError(
                f"{path} is altered or belongs to another partition: its inner {self.what}s are not those that the "
                f"JSON gives to part {part}"
            )


@dataclass(frozen=True)
class Part:
    """The files of a part."""

    graph: Path
    node_fields: Path
    edge_fields: Path


@dataclass(frozen=True)
class Config:
    """What the JSON of a partition says. Types are in the order of their numbers."""

    path: Path
    method: str
    node_types: list[str]
    edge_types: list[EdgeType]
    nodes: IdRanges
    edges: IdRanges
    parts: list[Part]

    @property
    def node_files(self) -> list[Path]:
        return [part.node_fields for part in self.parts]

    @property
    def edge_files(self) -> list[Path]:
        return [part.edge_fields for part in self.parts]


def read_config(path: Path) -> Config:
    """The partition that a JSON describes.

    Raises:
        ValueError: when the JSON is missing, altered, or of a version that cannot be read. The error names it.
    """
    raw = _load(path)
    if raw.get("graph_name") is None or not isinstance(raw.get("num_parts"), int) or raw["num_parts"] < 1:
        raise ValueError(
            f"{path} does not describe a DGL partition: expected the JSON that dgl.distributed.partition_graph wrote"
        )
    num_parts: int = raw["num_parts"]
    node_types, edge_types = _types(path, raw, "ntypes"), _types(path, raw, "etypes")
    split = {name: _edge_type(path, name) for name in edge_types}
    for source, _, target in split.values():
        if source not in node_types or target not in node_types:
            raise ValueError(f"{path} is altered: an edge type between {source!r} and {target!r}, of {node_types}")
    nodes = _ranges(path, raw, "node", node_types, num_parts)
    edges = _ranges(path, raw, "edge", edge_types, num_parts)
    parts = [_part(path, raw, part) for part in range(num_parts)]
    method = str(raw.get("part_method", "unknown"))
    return Config(path, method, node_types, list(split.values()), nodes, edges, parts)


def _load(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"{path} is cut short or altered: it is not JSON ({error})") from error
    return raw if isinstance(raw, dict) else {}


def _types(path: Path, raw: Mapping[str, Any], key: str) -> list[str]:
    numbers = raw.get(key)
    if not isinstance(numbers, dict) or sorted(map(str, numbers.values())) != sorted(map(str, range(len(numbers)))):
        raise ValueError(f"{path}: {key!r} is {numbers!r}; expected a number for each type")
    return sorted(numbers, key=lambda name: int(numbers[name]))


def _edge_type(path: Path, name: str) -> EdgeType:
    names = name.split(":")
    if len(names) != 3:
        raise ValueError(
            f"{path}: edge type {name!r}; expected <source>:<relation>:<target>, as DGL 1.0 and newer write it: "
            "partition the graph again, or use DGL's tools/change_etype_to_canonical_etype.py"
        )
    return names[0], names[1], names[2]


def _ranges(path: Path, raw: Mapping[str, Any], what: str, types: list[str], num_parts: int) -> IdRanges:
    maps = raw.get(f"{what}_map")
    if not isinstance(maps, dict) or set(maps) != set(types) or any(isinstance(ids, str) for ids in maps.values()):
        raise ValueError(
            f"{path}: '{what}_map' is not a list of id ranges for each of {types}; "
            "partition the graph again with DGL 1.0 or newer (and reshuffle=True where there is such an option)"
        )
    try:
        ranges = np.array([maps[name] for name in types] or np.zeros((0, num_parts, 2), np.int64))
    except ValueError:  # rows of different lengths
        ranges = np.zeros(0)
    if ranges.shape != (len(types), num_parts, 2) or ranges.dtype.kind != "i":
        raise ValueError(f"{path}: '{what}_map' has no [start, end) for each of {num_parts} parts")
    found = IdRanges(path, what, ranges)
    if sum(found.totals) != raw.get(f"num_{what}s"):
        raise ValueError(
            f"{path} is altered: 'num_{what}s' is {raw.get(f'num_{what}s')}, parts have {sum(found.totals)}"
        )
    return found


def _part(path: Path, raw: Mapping[str, Any], part: int) -> Part:
    files = raw.get(f"part-{part}")
    if isinstance(files, dict) and "part_graph_graphbolt" in files and "part_graph" not in files:
        raise ValueError(
            f"{path} was written for GraphBolt, whose files cannot be read here: "
            "run dgl.distributed.partition_graph again with use_graphbolt=False"
        )
    if not isinstance(files, dict) or not all(isinstance(files.get(key), str) for key in _FILES):
        raise ValueError(f"{path}: 'part-{part}' does not name the files {', '.join(_FILES)}")
    return Part(*(path.parent / files[key] for key in _FILES))
