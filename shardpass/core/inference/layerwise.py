"""Inference over the whole graph, layer by layer. All ranks write one file in original order; a run can be resumed."""

from __future__ import annotations

import hashlib
import math
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from shardpass.core.graphs import ShardedGraph, refuse_original_order, require_graph
from shardpass.core.inference.deferred import Deferral, DeferredRows, block_of, whole
from shardpass.core.inference.fingerprint import argument_lines, model_lines
from shardpass.core.inference.journal import Journal
from shardpass.core.inference.row_sources import ChangedRowsError, spans
from shardpass.core.ranks import (
    Ranks,
    allocate,
    are_threads,
    fail_together,
    ordinary_tensors,
    plain_of,
    refuse_irregular,
    require_path,
    takes_followed,
    tells_of_full_disk,
    torch_private,
)
from shardpass.core.sharding import NodeType
from shardpass.core.training import refuse_unlike
from shardpass.errors import MissingDependencyError

_T = TypeVar("_T")
_TABLE = ".parquet"
_NOT_WRITTEN = frozenset([".csv", ".tsv", ".txt", ".json", ".npz", ".pt", ".pth", ".h5", ".safetensors"])


@takes_followed("number")
def infer(
    model: nn.Module,
    graph: ShardedGraph,
    path: str | os.PathLike[str],
    *args: Any,
    overwrite: bool = False,
    progress: Callable[[str], None] | None = None,
    node_type: NodeType | None = None,
    tag: str = "",
    classes: bool = False,
) -> list[Path]:
    """The files to which the output of `model` for every node was written, in original order. Collective.

    The model runs in evaluation mode without gradients, so a rank holds its own rows of the layers at hand and a block
    of fetched rows. The result of every sharded call is kept beside the output until the output is complete. If a run
    is ended, the next one with the same model, inputs, ranks and tag continues from there.

    Args:
        model: wrapped by `pyg.wrap` or `dgl.wrap`, with the same parameters on every rank.
        graph: the nodes and edges.
        path: the file to write, which every rank must reach: ``.parquet`` for a table with the columns `id`, your own
            id of each node, and `output`; or else ``.npy``. A dict by node type gives a ``logits.paper.npy`` per type.
        args: what the model is called with; default: ``(graph.x, graph)``, and ``graph.x_dict`` for several types.
        overwrite: whether to replace a file that exists.
        progress: called with the name of each layer as it begins.
        node_type: the type of the rows, if the model returns one tensor and the graph has several types.
        tag: any text. Pass another one if code has changed, which is not noticed: the run begins anew.
        classes: what the model returns are logits, and a table has the columns `class` and `probability` of it, too.

    Returns:
        The files, ``[total_nodes, ...]`` each. `numpy.load` with ``mmap_mode="r"`` opens ``.npy`` without reading.

    Raises:
        FileExistsError: the file exists. (All errors here are raised on every rank.)
        ValueError: the model is not wrapped, or does not return rows of own nodes; or the ending of `path` is neither.
        DivergenceError: the model differs between ranks, as when some of them loaded weights after `wrap`.
        RefusedError: an argument is a field of the graph, but in the order of the original nodes.
        TypeError: the model does not take the default arguments.
        OSError: a rank cannot write.
        MissingDependencyError: pyarrow, which writes tables, is not installed.
    """
    comm, target = _checked(model, graph, path, overwrite, node_type)
    if classes and target.suffix != _TABLE:
        raise ValueError(f"infer(classes=True) writes columns of a table (.parquet), and {target.name} is none")
    with ordinary_tensors():  # what stands for rows counts their changes
        is_by_default = not args
        args = args or (graph.x if graph.is_homogeneous else graph.x_dict, graph)
        args = torch_private.tree_map(plain_of, args)
        refuse_original_order(args, [graph])
        refuse_unlike(model, comm)  # before what an interrupted run has left is begun anew
        fingerprint = _fingerprint(model, graph, args, tag)
        journal = Journal(target.with_name(f".{target.name}.partial"), comm, fingerprint, progress, Deferral())
        with _evaluating(model, comm, journal), _telling(model, comm, is_by_default):
            found = _outputs(model, graph, args, journal)
        rows = _on_all(comm, lambda: _rows_by_type(graph, found, target, overwrite, node_type, classes))
        for file, of_type in rows.items():
            _write(graph, file, classes, *of_type)
        journal.remove()
    return list(rows)


def _checked(
    model: nn.Module, graph: ShardedGraph, path: Any, overwrite: bool, node_type: NodeType | None
) -> tuple[Ranks, Path]:
    """The ranks and the path, where every argument of `infer` is as it should be. Collective."""
    require_graph(graph, "infer(model, graph, path)")
    comm, target = graph.comm, require_path(path, "infer(model, graph, path)")
    if not getattr(model, "_shardpass_wrapped", False):
        raise ValueError("infer takes a wrapped model: call shardpass.pyg.wrap(model, comm), or dgl.wrap, first")
    _on_all(comm, lambda: _refuse_existing(target, overwrite))
    _on_all(comm, lambda: node_type is None or graph.ids_of(node_type))
    if target.suffix == _TABLE:
        _on_all(comm, lambda: graph.tables.check() if comm.rank == 0 else None)
    return comm, target


def _refuse_existing(path: Path, overwrite: bool) -> None:
    if path.suffix in _NOT_WRITTEN:
        raise ValueError(
            f"{path}: the output is an .npy file, or a .parquet table with your own ids, not {path.suffix}: give a "
            f"name that ends so"
        )
    refuse_irregular(path, "replaced")
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists: give another name, or overwrite=True")


def _fingerprint(model: nn.Module, graph: ShardedGraph, args: tuple[Any, ...], tag: str) -> str:
    """A hash of what the rows of all ranks depend on, the same on every rank. Collective."""
    parts = [graph.partition_fingerprint, graph.contents, str(graph.comm.size), str(graph.options.wire_dtype), tag]
    parts += [*model_lines(model), *argument_lines(args, graph)]
    mine = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    every = graph.comm.all_gather_object(mine, "infer: fingerprints")
    return hashlib.sha256("".join(every).encode()).hexdigest()


@contextmanager
def _evaluating(model: nn.Module, comm: Ranks, journal: Journal) -> Iterator[None]:
    """A block without gradients, with the model in evaluation mode, in which `journal` keeps the results of calls."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    comm.kept_calls = journal
    try:
        with torch.no_grad():
            yield
    finally:
        comm.kept_calls = None
        for module, training in modes:
            module.training = training


@contextmanager
def _telling(model: nn.Module, comm: Ranks, is_by_default: bool) -> Iterator[None]:
    """A block that calls the model, and tells what it was called with if that fails, and of random numbers it draws."""
    drawn = torch.get_rng_state()
    try:
        yield
    except (TypeError, AttributeError) as error:
        if not is_by_default:
            raise
        raise TypeError(
            f"infer was given no arguments for the model, so it called {type(model).__name__}(graph.x, graph), "
            f"which failed: {error}. Pass what the model takes; for one of DGL, "
            f"infer(model, graph, path, g, g.ndata['x']) with g = shardpass.dgl.graph(graph)"
        ) from error
    if comm.rank == 0 and not are_threads(comm) and not torch.equal(drawn, torch.get_rng_state()):
        warnings.warn(
            "infer: the model drew random numbers in evaluation mode, as F.dropout does without "
            "training=self.training, so its output differs from run to run",
            stacklevel=5,
        )


def _outputs(model: nn.Module, graph: ShardedGraph, args: tuple[Any, ...], journal: Journal) -> Any:
    """What the model returns. Its rows are deferred, unless it writes into tensors in a way that forbids it."""
    deferral = journal.deferral
    assert deferral is not None
    counts = {rows.count for rows in graph.row_sets() if not rows.is_of_edges}

    def given(leaf: Any) -> Any:
        is_rows = type(leaf) is Tensor and leaf.layout == torch.strided and leaf.dim() > 0 and leaf.size(0) in counts
        return deferral.held(leaf) if is_rows else leaf

    try:
        found, problem = model(*torch_private.tree_map(given, args)), ""
        for module in model.modules():  # what a layer caches is used after the files are gone
            for name, value in vars(module).items():
                if any(isinstance(leaf, DeferredRows) for leaf in torch_private.tree_leaves(value)):
                    vars(module)[name] = torch_private.tree_map(whole, value)
    except ChangedRowsError as error:
        found, problem = None, str(error)
    if not any(graph.comm.all_gather_object(problem, "infer: deferred rows")):
        return found
    journal.begin_again()
    return model(*args)


_Rows = dict[Path, tuple[Tensor, Tensor, int, NodeType | None]]


def _rows_by_type(
    graph: ShardedGraph, found: Any, path: Path, overwrite: bool, node_type: NodeType | None, classes: bool
) -> _Rows:
    """For each file to write: own rows, their original ids, how many rows all ranks have, and the node type."""
    if isinstance(found, Tensor):
        if node_type is None and len(graph.node_types) > 1:
            raise ValueError(
                f"infer: the model returned one tensor, and the graph has several node types: pass the type of its "
                f"rows as node_type=...; types: {graph.node_types}"
            )
        by_type: dict[Path, tuple[Any, Any]] = {path: (node_type, found)}
    elif isinstance(found, dict):
        unknown = [name for name in found if name not in graph.node_types]
        if unknown:
            raise ValueError(
                f"infer: the model returned a dict with the key {unknown[0]!r}; expected node types of the graph: "
                f"{graph.node_types}"
            )
        suffix = _TABLE if path.suffix == _TABLE else ".npy"
        by_type = {path.with_suffix(f".{name}{suffix}"): (name, value) for name, value in found.items()}
    else:
        kind = type(found).__name__
        raise ValueError(f"infer: the model returned a {kind}; expected a tensor, or a dict of tensors by node type")
    rows: _Rows = {}
    for target, (node_type, value) in by_type.items():
        _refuse_existing(target, overwrite)
        ids, total = graph.ids_of(node_type)
        if not isinstance(value, Tensor) or value.dim() == 0 or value.size(0) != ids.numel():
            shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"infer: the model returned {shape}; expected {ids.numel()} rows, one per own node")
        value = value.float() if value.dtype == torch.bfloat16 else value  # which numpy does not know
        if classes and (value.dim() != 2 or not value.is_floating_point() or value.size(1) < 2):
            raise ValueError(
                f"infer(classes=True): the model returned {list(value.shape)} of {value.dtype}; expected logits, a "
                f"number for each of several classes"
            )
        rows[target] = (value.detach(), ids.cpu(), total, node_type)
    return rows


def _write(
    graph: ShardedGraph, path: Path, classes: bool, rows: Tensor, ids: Tensor, total: int, node_type: NodeType | None
) -> None:
    """Write the rows of all ranks into one file, which gets its name when it is complete. Collective."""
    comm, partial = graph.comm, path.with_name(f".{path.name}.writing")
    table = path.with_name(f".{path.name}.table")
    shape, dtype = (total, *rows.shape[1:]), torch.empty(0, dtype=rows.dtype).numpy().dtype

    def create() -> None:
        if comm.rank == 0:
            partial.unlink(missing_ok=True)  # and nothing that it may point to is written
            with open(partial, "xb") as file:
                header = {"descr": dtype.str, "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(file, header)
                num_bytes = file.tell() + math.prod(shape) * rows.itemsize
                with tells_of_full_disk(path, num_bytes):
                    allocate(file, num_bytes)

    def fill() -> None:
        out = np.load(partial, mmap_mode="r+")
        for start, stop in spans(ids.numel(), [rows]):
            out[ids[start:stop].numpy()] = block_of(rows, start, stop).cpu().numpy()
        out.flush()

    def finish() -> None:
        if comm.rank == 0 and path.suffix == _TABLE:
            table.unlink(missing_ok=True)
            numbers = np.load(partial, mmap_mode="r")
            with tells_of_full_disk(path, numbers.nbytes):
                graph.tables.write(table, numbers, node_type, classes)
            os.replace(table, path)
        elif comm.rank == 0:
            os.replace(partial, path)

    try:
        for step in (create, fill, finish):
            _on_all(comm, step)
    finally:
        if comm.rank == 0:
            partial.unlink(missing_ok=True)
            table.unlink(missing_ok=True)


def _on_all(comm: Ranks, work: Callable[[], _T]) -> _T:
    return fail_together(comm, "infer: verdict", work, FileExistsError, OSError, ValueError, MissingDependencyError)
