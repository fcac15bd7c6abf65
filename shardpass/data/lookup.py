"""From the numbers of nodes to the user's own ids and back, and tables with these ids, for a store."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardpass.core.graphs import one_type
from shardpass.data.names import column_of, find_names
from shardpass.data.raw import NodeType
from shardpass.data.store import Store, open_store
from shardpass.data.streaming import Budget
from shardpass.errors import require

_BLOCK_BYTES = 1 << 24


def node_names(
    path: str | os.PathLike[str], node_ids: Tensor | None = None, node_type: NodeType | None = None
) -> np.ndarray:
    """Your own ids of nodes of the store at `path`: an array of `str`, or int64 or uint64, [n].

    They are what the edge table, the node table or the list that was partitioned called these nodes. Of a graph that
    came without names they are the original ids themselves. Not collective.

    Args:
        node_ids: integers [n] as in ``graph.node_ids``. `None` stands for all nodes, in the order of what
            `shardpass.gather` returns and of the rows that `shardpass.infer` writes.
        node_type: of the nodes, in a graph of several types.

    Raises:
        StoreError: when the store cannot be opened, or its names are altered.
        ValueError: when an id is out of range, or the node type is missing or unknown.
    """
    store = open_store(path)
    kind = one_type(node_type, store.manifest.node_types)
    count = store.manifest.num_nodes[kind]
    given = torch.arange(count) if node_ids is None else torch.as_tensor(node_ids).detach().cpu()
    if given.numel() and (given.dtype is torch.bool or given.is_floating_point() or given.is_complex()):
        raise ValueError(f"node_names: expected ids of nodes, integers, found {given.dtype}; of a mask pass ids[mask]")
    wanted = given.long().reshape(-1)
    if wanted.numel() and not 0 <= int(wanted.min()) <= int(wanted.max()) < count:
        raise ValueError(f"node_names: ids from {int(wanted.min())} to {int(wanted.max())}; expected [0, {count})")
    names = store.names(kind)
    return wanted.numpy() if names is None else names.take(wanted)


def find_nodes(path: str | os.PathLike[str], names: Any, node_type: NodeType | None = None) -> Tensor:
    """The numbers of the nodes with these names, int64 [n]: the original ids that `shardpass.rows` takes.

    It is the way back from `node_names`. Not collective.

    Args:
        path: a store whose nodes have names.
        names: a list, an array or a tensor of strings or integers.
        node_type: of the nodes, in a graph of several types.

    Raises:
        ValueError: when a name is unknown (the error tells how many are, and the first of them), or the nodes of the
            store have no names.
        TypeError: when the names are not of the type that those of the store have.
        StoreError: as `node_names`.
    """
    store = open_store(path)
    kind = one_type(node_type, store.manifest.node_types)
    known = store.names(kind)
    if known is None:
        raise ValueError(f"the nodes of {store.path} have no names; their original ids are 0, 1, 2, ...")
    if not len(names):
        return torch.empty(0, dtype=torch.int64)
    with tempfile.TemporaryDirectory() as scratch:
        column = column_of(names, "find_nodes: names")
        return torch.from_numpy(find_names(known, column, str(store.path), Budget(Path(scratch))))


@dataclass(frozen=True)
class StoreTables:
    """Writes tables of results with the names of the nodes of a store: the `TableWriter` of its graph."""

    store: Store

    def check(self) -> None:
        """Return when tables can be written: pyarrow is there, and the names are as they were written."""
        _arrow()
        for kind in self.store.manifest.node_types:
            self.store.names(kind)

    def write(self, path: Path, rows: np.ndarray, node_type: NodeType | None = None, classes: bool = False) -> None:
        """Write a Parquet file of a row for each node, by original id: the columns `id`, its name, and `output`.

        Args:
            path: the file, which is replaced.
            rows: `[num_nodes, ...]`. Rows of more than one dimension become lists. If the nodes have no names, the
                ids are 0, 1, 2, ...
            node_type: of the nodes, in a graph of several types.
            classes: rows are logits `[num_nodes, classes]`, and there are two more columns: `class`, the number of the
                largest, and `probability`, what softmax gives it.
        """
        arrow, parquet = _arrow()
        names = self.store.names(one_type(node_type, self.store.manifest.node_types))
        step = max(1, _BLOCK_BYTES // max(8, rows[:1].nbytes))
        kind = arrow.int64() if names is None else names.block(0, 0).type
        kind = arrow.string() if kind == arrow.large_string() else kind
        of_classes = [("class", arrow.int64()), ("probability", arrow.float32())] if classes else []
        schema = arrow.schema([("id", kind), *of_classes, ("output", _lists(rows[:0]).type)])
        with parquet.ParquetWriter(path, schema) as writer:
            for start in range(0, len(rows), step):
                block = rows[start : start + step]
                stop = start + len(block)
                ids = arrow.array(np.arange(start, stop)) if names is None else names.block(start, stop).cast(kind)
                chosen = _most_likely(block) if classes else ()
                writer.write_table(arrow.table([ids, *chosen, _lists(block)], schema=schema))


def _most_likely(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The class of each row of logits, and its probability."""
    probabilities = torch.from_numpy(np.array(logits)).float().softmax(1)
    found = probabilities.max(1)
    return found.indices.numpy(), found.values.numpy()


def _arrow() -> tuple[Any, Any]:
    """pyarrow, and what of it writes Parquet."""
    purpose, otherwise = "writing a table of results", "give the name of an .npy file"
    return require("pyarrow", "names", purpose, otherwise), require("pyarrow.parquet", "names", purpose, otherwise)


def _lists(rows: np.ndarray) -> Any:
    """Rows as an array of pyarrow: numbers, or lists of one length."""
    arrow, _ = _arrow()
    found = arrow.array(rows.reshape(-1))
    for width in reversed(rows.shape[1:]):
        found = arrow.FixedSizeListArray.from_arrays(found, width)
    return found
