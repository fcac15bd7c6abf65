"""The JSON beside the parts of a DGL partition: which ids and files belong to which part."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardpass.core.ranks import refuse_irregular
from shardpass.data.raw import EdgeType


class IdRanges:
    """DGL's ids after partitioning. Those of one type in one part are consecutive. A type goes by its number.

    sizes: the number of ids of each type in each part, [types, parts]. totals: the number of ids of each type.

    Args:
        what: ``"node"`` or ``"edge"``, for errors.
        ranges: the first id and the end of each type in each part, [types, parts, 2].
    """

    def __init__(self, what: str, ranges: np.ndarray) -> None:
        self.what, self.num_parts, self._ranges = what, ranges.shape[1], ranges
        self.sizes = sizes = ranges[:, :, 1] - ranges[:, :, 0]
        self._offsets = np.concatenate([np.zeros((len(ranges), 1), np.int64), sizes.cumsum(1)], 1)
        self.totals: list[int] = self._offsets[:, -1].tolist()
        kinds, parts = np.nonzero(sizes)
        order = ranges[kinds, parts, 0].argsort()
        self._kinds, self._parts = kinds[order], parts[order]
        self._starts, ends = ranges[self._kinds, self._parts].T
        if (sizes < 0).any() or not np.array_equal(self._starts, np.concatenate([[0], ends])[: len(ends)]):
            raise ValueError(f"the {what} ids of its parts have gaps or overlap")

    def count(self, part: int) -> int:
        """The number of ids of a part, of all types."""
        return int(self.sizes[:, part].sum())

    def by_type(self, values: np.ndarray) -> list[np.ndarray]:
        """The values of each type, given those of all ids."""
        return [np.concatenate([values[start:end] for start, end in ranges]) for ranges in self._ranges]

    def locate(self, ids: np.ndarray, path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The type, the number within the type, and the part of each id."""
        ids = ids.astype(np.int64, copy=False)
        if ids.size and not (ids.min() >= 0 and ids.max() < sum(self.totals)):
            raise ValueError(f"{path} is altered: a {self.what} id is outside [0, {sum(self.totals)})")
        run = np.searchsorted(self._starts, ids, side="right") - 1
        kinds, parts = self._kinds[run], self._parts[run]
        return kinds, ids - self._starts[run] + self._offsets[kinds, parts], parts

    def check_owned(self, ids: np.ndarray, part: int, path: Path) -> None:
        """Return when these are all ids of a part, each once."""
        _, _, parts = self.locate(ids, path)
        if (parts != part).any() or ids.size != self.count(part) or np.unique(ids).size != ids.size:
            raise ValueError(
                f"{path} is altered or belongs to another partition: its inner {self.what}s are not those that the "
                f"JSON gives to part {part}"
            )


@dataclass(frozen=True)
class PartFiles:
    """The files of a part."""

    graph: Path
    node_fields: Path
    edge_fields: Path


@dataclass(frozen=True)
class Description:
    """What the JSON of a partition says. Types are in the order of their numbers."""

    path: Path
    method: str
    node_types: list[str]
    edge_types: list[EdgeType]
    nodes: IdRanges
    edges: IdRanges
    parts: list[PartFiles]


def read_description(path: Path) -> Description:
    """The partition that a JSON describes."""
    try:
        refuse_irregular(path)
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is cut short or altered: it is not JSON ({error})") from error
    try:
        return _parsed(path, raw)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ValueError(
            f"{path} does not describe a DGL partition ({type(error).__name__}: {error}); expected the JSON that "
            "dgl.distributed.partition_graph wrote with DGL 1.0 or newer, without use_graphbolt=True"
        ) from error


def _parsed(path: Path, raw: Mapping[str, Any]) -> Description:
    num_parts: int = raw["num_parts"]
    node_types, edge_names = _by_number(raw["ntypes"]), _by_number(raw["etypes"])
    edge_types = []
    for name in edge_names:
        source, relation, target = name.split(":")  # before DGL 1.0 there was the relation only
        if source not in node_types or target not in node_types:
            raise ValueError(f"edge type {name!r} is not between {node_types}")
        edge_types.append((source, relation, target))
    files = [raw[f"part-{part}"] for part in range(num_parts)]
    return Description(
        path=path,
        method=str(raw.get("part_method", "unknown")),
        node_types=node_types,
        edge_types=edge_types,
        nodes=_ranges(raw, "node", node_types, num_parts),
        edges=_ranges(raw, "edge", edge_names, num_parts),
        parts=[
            PartFiles(*(path.parent / of[key] for key in ("part_graph", "node_feats", "edge_feats"))) for of in files
        ],
    )


def _by_number(numbers: Mapping[str, int]) -> list[str]:
    """The names of types in the order of their numbers."""
    names = sorted(numbers, key=lambda name: numbers[name])
    if [numbers[name] for name in names] != list(range(len(names))):
        raise ValueError(f"the types have the numbers {dict(numbers)}")
    return names


def _ranges(raw: Mapping[str, Any], what: str, types: list[str], num_parts: int) -> IdRanges:
    maps = raw[f"{what}_map"]
    ranges = np.array([maps[name] for name in types] or np.zeros((0, num_parts, 2), np.int64))
    if ranges.shape != (len(types), num_parts, 2) or ranges.dtype.kind != "i":
        raise ValueError(f"{what}_map has no [start, end) for each of {num_parts} parts")
    found = IdRanges(what, ranges)
    if sum(found.totals) != raw[f"num_{what}s"]:
        raise ValueError(f"num_{what}s is {raw[f'num_{what}s']}, but the parts have {sum(found.totals)}")
    return found
