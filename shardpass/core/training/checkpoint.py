"""Checkpoints of a distributed training run: one file, written by rank 0, loaded without executing anything.

[Note: all ranks fail together]
Rank 0 alone touches the file and passes on what it read. Every check comes before anything is changed, and ranks agree
on its verdict: an error on one rank is raised on all. `checkpoint_file` describes the content of the file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shardpass.core.ranks import (
    Ranks,
    derive_seed,
    describe,
    fail_together,
    get_random_state,
    is_local,
    require_model,
    require_path,
    require_ranks,
    set_random_state,
    tensor_digest,
    torch_private,
)
from shardpass.core.training.buckets import broadcast_tensors
from shardpass.core.training.checkpoint_columns import refuse_other_columns, warn_of_unknown
from shardpass.core.training.checkpoint_file import FORMAT, decode, encode, read_file, write_file
from shardpass.core.training.groups import refuse_parts
from shardpass.core.training.same_model import refuse_unlike
from shardpass.errors import CheckpointError

Optimizer = torch.optim.Optimizer
_T = TypeVar("_T")


def save_checkpoint(
    path: str | os.PathLike[str],
    comm: Ranks,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    epoch: int = 0,
    graph: Any = None,
    extra: Any = None,
) -> None:
    """Write model, optimizer, random states of all ranks, epoch and extra to one file, atomically. Collective.

    Args:
        path: the file, replaced if it exists; only rank 0 needs to reach it. Missing folders are made.
        comm: the ranks.
        model: the ``state_dict`` of rank 0 is saved, but rows owned by ranks (``shardpass_local``) of every rank.
        optimizer: any torch optimizer whose state is tensors and JSON values.
        epoch: what `load_checkpoint` returns as the epoch.
        graph: its ``fingerprint``, ``partition_fingerprint`` and ``column_names`` are saved, and compared on loading.
        extra: nested dicts, lists and tuples of tensors and JSON values. That of rank 0 is saved.

    Raises:
        CheckpointError: on every rank, if something cannot be stored or written on one.
        DivergenceError: on every rank, if the model differs between ranks.
    """
    path = _checked(path, comm, model, optimizer, "save_checkpoint(path, comm, model)")
    tensors: dict[str, Tensor] = {}
    trees = _agreed(comm, lambda: _trees(model, optimizer, extra, tensors))
    tables = _tables(model, optimizer)
    # of the state of a table, what has its shape has a row for each of its rows
    local = [name for name, value in tensors.items() if getattr(_of_name(name, tables), "shape", None) == value.shape]
    refuse_unlike(model, comm)  # since the file holds what rank 0 has
    states = get_random_state()
    kinds = comm.all_gather_object(sorted(states), "checkpoint random states")
    for kind in sorted(set(kinds[0]).intersection(*kinds)):
        local.append(f"random/{kind}")
        tensors[local[-1]] = states[kind]
    for name in local:
        rows = comm.all_gather(tensors.pop(name).detach().contiguous().to(comm.device), f"checkpoint {name}")
        tensors.update({f"{name}@{rank}": part for rank, part in enumerate(rows)})
    manifest = {"format": FORMAT, "ranks": comm.size, "epoch": epoch, "local": local, **trees}
    manifest["graph"], manifest["partition"] = _fingerprints(graph)
    manifest["columns"] = getattr(graph, "column_names", {})
    _agreed(comm, lambda: write_file(path, tensors, manifest) if comm.rank == 0 else None)


def load_checkpoint(
    path: str | os.PathLike[str],
    comm: Ranks,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    graph: Any = None,
    other_graph: bool = False,
) -> dict[str, Any]:
    """Restore what `save_checkpoint` wrote, on any number of ranks. Collective.

    Nothing changes if the checkpoint is refused, unless it was forged: its checksum fits, but its state does not.

    Args:
        path: the file; only rank 0 needs to reach it.
        comm: the ranks.
        model: it has the names, shapes and dtypes of the saved one.
        optimizer: of the saved class, over parameters of the saved shapes. `None` leaves the saved state unused.
        graph: the checkpoint is refused if it was written for another graph or partition. `None` leaves that unchecked,
            and is refused for a model with rows owned by ranks (`NodeEmbedding`). It is also refused if columns of its
            node fields have other names, or another order, than those that were trained on.
        other_graph: `graph` may be another graph or partition, as for inference. Its columns are compared.

    Returns:
        ``{"epoch": ..., "extra": ..., "random": ...}``. The last is ``"restored"``, or ``"derived"`` if the number of
        ranks has changed: then each rank continues with random numbers that follow from the saved state and its rank.

    Raises:
        CheckpointError: on every rank, if the file is missing, torn or altered, or does not fit.
    """
    path = _checked(path, comm, model, optimizer, "load_checkpoint(path, comm, model)")
    read: dict[str, Tensor] = {}
    manifest = _agreed(comm, lambda: read_file(path, read) if comm.rank == 0 else None)
    manifest = comm.all_gather_object(manifest, "checkpoint manifest")[0]
    rows = _rows(model, optimizer, comm)
    _agreed(comm, lambda: _validate(path, comm, manifest, model, optimizer, graph, rows, other_graph))
    if comm.rank == 0:
        warn_of_unknown(str(path), manifest["columns"], getattr(graph, "column_names", {}), graph is not None)
    tensors = _passed_on(manifest, read, comm, rows)
    _agreed(comm, lambda: _restore(manifest, tensors, model, optimizer))
    random = _agreed(comm, lambda: _continue_random(manifest, tensors, comm))
    return {"epoch": manifest["epoch"], "extra": decode(manifest["extra"], tensors), "random": random}


def _checked(path: Any, comm: Any, model: Any, optimizer: Any, call: str) -> Path:
    """The path, if the arguments are of the kinds that they must be."""
    require_ranks(comm, call)
    require_model(model, call)
    refuse_parts(model, call, "use torch.distributed.checkpoint, with the states that get_state_dict returns")
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        raise TypeError(f"{call}: `optimizer` must be an optimizer of torch, but got {type(optimizer).__name__}")
    return require_path(path, call)


def _tables(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Tensor]:
    """The parameters with rows owned by ranks, each by how the names begin under which it and its state are saved."""
    named = {f"model/{name}": parameter for name, parameter in model.named_parameters(remove_duplicate=False)}
    if optimizer is not None:
        groups = (parameter for group in optimizer.param_groups for parameter in group["params"])
        named |= {f"optimizer/state/{index}": parameter for index, parameter in enumerate(groups)}
    return {name: parameter for name, parameter in named.items() if is_local(parameter)}


def _of_name(name: str, tables: Mapping[str, _T]) -> _T | None:
    """What belongs to the tensor saved as `name`, of a dict with the keys of `_tables`."""
    return tables.get(name if name.startswith("model/") else "/".join(name.split("/")[:3]))


def _rows(model: nn.Module, optimizer: Optimizer | None, comm: Ranks) -> dict[str, list[int]]:
    """For each of `_tables`, how many of its rows each rank has. Collective.

    Ranks own contiguous ranges of the same order of nodes. So their rows, one rank after the other, are the same table
    for any number of ranks.
    """
    own = {name: len(parameter) for name, parameter in _tables(model, optimizer).items()}
    every = comm.all_gather_object(own, "checkpoint rows")
    return {name: [counts.get(name, 0) for counts in every] for name in own}


def _passed_on(
    manifest: dict[str, Any], read: dict[str, Tensor], comm: Ranks, rows: dict[str, list[int]]
) -> dict[str, Tensor]:
    """The tensors that rank 0 has read; of tables, the rows of this rank. Collective."""
    tensors: dict[str, Tensor] = {}
    for name, (dtype, shape) in manifest["tensors"].items():
        tensor = read[name] if comm.rank == 0 else torch.empty(shape, dtype=getattr(torch, dtype))
        broadcast_tensors([tensor], comm, "load_checkpoint")
        if name in manifest["local"] and not name.startswith("random/"):
            counts = _of_name(name, rows)
            if counts is None:
                continue  # of an optimizer that is not loaded
            start = sum(counts[: comm.rank])
            tensor = tensor[start : start + counts[comm.rank]].clone()
        tensors[name] = tensor
    return tensors


def _continue_random(manifest: dict[str, Any], tensors: dict[str, Tensor], comm: Ranks) -> str:
    """Restore this rank's random state, or derive one on another number of ranks; "restored" or "derived"."""
    names = [name for name in manifest["local"] if name.startswith("random/")]
    same = manifest["ranks"] == comm.size
    try:
        states = {name.removeprefix("random/"): tensors[name].view(manifest["ranks"], -1) for name in names}
        with comm.random_lock():
            if same:
                set_random_state({kind: rows[comm.rank].clone() for kind, rows in states.items()})
            else:
                torch.manual_seed(derive_seed(tensor_digest(states["cpu"][0]), comm.size, comm.rank))
    except (RuntimeError, TypeError, KeyError) as error:
        raise CheckpointError(f"the random state could not be restored: {error}") from error
    return "restored" if same else "derived"


def _agreed(comm: Ranks, work: Callable[[], _T]) -> _T:
    return fail_together(comm, "checkpoint verdict", work, CheckpointError)


def _trees(model: nn.Module, optimizer: Optimizer | None, extra: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    state = model.state_dict()
    trees = {
        "model": encode(_of_all_ranks(state, model), "model", tensors),
        "model_metadata": encode(torch_private.state_versions(state), "model_metadata", tensors),
        "extra": encode(extra, "extra", tensors),
        "optimizer": None,
    }
    if optimizer is not None:
        trees["optimizer"] = {
            "class": type(optimizer).__name__,
            "shapes": _shapes(optimizer),
            "state": encode(optimizer.state_dict(), "optimizer", tensors),
        }
    return trees


def _of_all_ranks(state: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """A ``state_dict`` without what a `NodeEmbedding` says of its nodes, which are others on another rank."""
    tables = {name for name, module in model.named_modules() if getattr(module, "shardpass_own_rows", False)}
    return {name: value for name, value in state.items() if name.rpartition(".")[0] not in tables or "weight" in name}


def _shapes(optimizer: Optimizer) -> list[list[list[int]]]:
    """The shapes of the parameters of each group."""
    return [[list(parameter.shape) for parameter in group["params"]] for group in optimizer.param_groups]


def _fingerprints(graph: Any) -> tuple[str | None, str | None]:
    return getattr(graph, "fingerprint", None), getattr(graph, "partition_fingerprint", None)


def _validate(
    path: Path, comm: Ranks, manifest: dict[str, Any], model: nn.Module, optimizer: Optimizer | None, graph: Any,
    rows: dict[str, list[int]], other_graph: bool,
) -> None:  # fmt: skip
    """Raise CheckpointError if the checkpoint does not fit what it is loaded into."""
    what = f"the checkpoint {str(path)!r}"
    refuse_other_columns(what, manifest["columns"], getattr(graph, "column_names", {}))
    for kind, found in zip(("graph", "partition"), _fingerprints(graph)):
        if not other_graph and None not in (found, manifest[kind]) and found != manifest[kind]:
            raise CheckpointError(
                f"{what} was written for another {kind}: {manifest[kind]}, this is {found}. To go on training, load it "
                f"with the store that it was trained on; to use its parameters here, pass other_graph=True, as "
                f"shardpass infer does"
            )
    local = [name for name in manifest["local"] if not name.startswith("random/")]
    if local and (other_graph or _fingerprints(graph)[1] is None or manifest["partition"] is None):
        raise CheckpointError(
            f"{what} holds rows owned by ranks ({local[0]}), which belong to the nodes of one partition: pass graph= "
            f"to save_checkpoint and to load_checkpoint, so that they can be compared, and not other_graph=True"
        )
    state = _of_all_ranks(model.state_dict(), model)
    own = {name: describe(value) if isinstance(value, Tensor) else "no tensor" for name, value in state.items()}
    saved = {}
    for name, tree in manifest["model"]["dict"]:
        saved[name] = "no tensor"
        if isinstance(tree, dict) and "tensor" in tree:
            dtype, shape = manifest["tensors"][tree["tensor"]]
            counts = _of_name(tree["tensor"], rows) if tree["tensor"] in local else None
            if counts is not None and sum(counts) == shape[0]:
                shape = [counts[comm.rank], *shape[1:]]
            saved[name] = f"{dtype} {shape}"
    for name in [*own, *saved]:
        if own.get(name) != saved.get(name):
            raise CheckpointError(
                f"{what} does not fit the model: {name!r} is {saved.get(name, 'missing')} in the checkpoint, "
                f"{own.get(name, 'missing')} in the model. Build it with the arguments that it had when it was saved; "
                f"for shardpass infer these are --model, --layers, --hidden, --heads and --batch-norm"
            )
    if optimizer is not None:
        _validate_optimizer(what, manifest["optimizer"], optimizer, bool(local))


def _validate_optimizer(what: str, saved: dict[str, Any] | None, optimizer: Optimizer, local: bool) -> None:
    if saved is None:
        raise CheckpointError(f"{what} holds no optimizer state: load it without an optimizer")
    if saved["class"] != type(optimizer).__name__:
        raise CheckpointError(f"{what} holds the state of {saved['class']}, not of {type(optimizer).__name__}")
    own, lengths = _shapes(optimizer), [len(group) for group in saved["shapes"]]
    if lengths != [len(group) for group in own] or (own != saved["shapes"] and not local):
        raise CheckpointError(
            f"{what} does not fit the optimizer: its parameter groups were {saved['shapes']}, they are {own}: build it "
            f"over the same parameters in the same order"
        )


def _restore(
    manifest: dict[str, Any], tensors: dict[str, Tensor], model: nn.Module, optimizer: Optimizer | None
) -> None:
    try:
        state = {**model.state_dict(), **decode(manifest["model"], tensors)}
        model.load_state_dict(torch_private.with_versions(state, decode(manifest["model_metadata"], tensors)))
        if optimizer is not None:
            optimizer.load_state_dict(decode(manifest["optimizer"]["state"], tensors))
    except Exception as error:  # of libraries, which document few
        raise CheckpointError(
            f"the state could not be restored: {error}. Build the model and the optimizer again, which may be changed"
        ) from error
