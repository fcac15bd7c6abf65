"""Checkpoints of a distributed training run: one file, written by rank 0, loaded without executing anything.

[Note: all ranks fail together]
Rank 0 alone touches the file and passes on what it read. Whatever can go wrong is found before anything is changed, and
every verdict is agreed: an error on one rank is raised on all. What the file holds is told in `checkpoint_file`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardpass import errors
from shardpass.core.ranks import Ranks, derive_seed, get_random_state, set_random_state
from shardpass.core.training.checkpoint_file import decode, describe, digest, encode, read_file, write_file
from shardpass.core.training.gradients import broadcast_tensors, forget_gradients
from shardpass.errors import CheckpointError

FORMAT = 1
Optimizer = torch.optim.Optimizer
Span = tuple[int, int, int]
"""First and last row (exclusive) of this rank, and rows of all ranks."""


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
        path: the file, replaced if it exists; only rank 0 needs to reach it.
        comm: the ranks.
        model: its ``state_dict`` is saved as rank 0 has it, rows owned by ranks (``shardpass_local``) from each.
        optimizer: any torch optimizer whose state is tensors and JSON values.
        epoch: returned by `load_checkpoint`.
        graph: its ``fingerprint`` and ``partition_fingerprint`` are kept and compared on loading.
        extra: nested dicts, lists and tuples of tensors and JSON values; rank 0's is kept.

    Raises:
        CheckpointError: on every rank, if something cannot be stored or written on one, or if parameters that ranks
            share differ between them.
    """
    errors.require("safetensors", "store", "save_checkpoint")
    tensors: dict[str, Tensor] = {}
    trees = _agreed(comm, lambda: _trees(model, optimizer, extra, tensors))
    local = _local_names(model, optimizer, tensors)
    _refuse_different(comm, model)
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
    _agreed(comm, lambda: write_file(Path(path), tensors, manifest) if comm.rank == 0 else None)


def load_checkpoint(
    path: str | os.PathLike[str],
    comm: Ranks,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    graph: Any = None,
) -> dict[str, Any]:
    """Restore what `save_checkpoint` wrote, on any number of ranks. Collective. Nothing changes if it is refused.

    Args:
        path: the file; only rank 0 needs to reach it.
        comm: the ranks.
        model: with the names, shapes and dtypes of the saved one.
        optimizer: of the saved class, over parameters of the saved shapes; None leaves the saved state unused.
        graph: refused if the checkpoint was written for another graph or partition; not compared if None, which is
            refused for a model with rows owned by ranks (`NodeEmbedding`).

    Returns:
        ``{"epoch": ..., "extra": ..., "random": ...}``; random is ``"restored"``, or ``"derived"`` when the number of
        ranks is another one: then each rank continues with a stream derived from the saved one and its rank.

    Raises:
        CheckpointError: on every rank: the file is missing, torn or altered, or does not fit.
    """
    errors.require("safetensors", "store", "load_checkpoint")
    read: dict[str, Tensor] = {}
    manifest = _agreed(comm, lambda: read_file(Path(path), read) if comm.rank == 0 else None)
    manifest = comm.all_gather_object(manifest, "checkpoint manifest")[0]
    spans = _spans(model, optimizer, comm)
    _agreed(comm, lambda: _validate(Path(path), manifest, model, optimizer, graph, spans))
    tensors = _passed_on(manifest, read, comm, spans)
    _agreed(comm, lambda: _restore(manifest, tensors, model, optimizer))
    same = _continue_random(manifest, tensors, comm)
    extra = decode(manifest["extra"], tensors)
    return {"epoch": manifest["epoch"], "extra": extra, "random": "restored" if same else "derived"}


def _passed_on(
    manifest: dict[str, Any], read: dict[str, Tensor], comm: Ranks, spans: dict[str, Span]
) -> dict[str, Tensor]:
    """The tensors of the file; of those with rows owned by ranks, the rows of this one. Collective."""
    tensors: dict[str, Tensor] = {}
    pieces: dict[str, list[Tensor]] = {name: [] for name in manifest["local"]}
    first = dict.fromkeys(manifest["local"], 0)
    for name, (dtype, shape) in manifest["tensors"].items():
        whole = read[name] if comm.rank == 0 else torch.empty(shape, dtype=getattr(torch, dtype))
        broadcast_tensors([whole], comm, "load_checkpoint")
        table, _, rank = name.rpartition("@")
        if table not in pieces:
            tensors[name] = whole
        elif table.startswith("random/"):
            tensors[name] = whole
            if int(rank) == comm.rank % manifest["ranks"]:
                tensors[table] = whole
        elif _span_of(table, spans) is not None:
            start, stop, _ = _span_of(table, spans) or (0, 0, 0)
            low, high = max(start, first[table]), min(stop, first[table] + len(whole))
            pieces[table].append(whole[max(0, low - first[table]) : max(0, high - first[table])].clone())
            first[table] += len(whole)
    return tensors | {name: torch.cat(parts) for name, parts in pieces.items() if parts}


def _spans(model: nn.Module, optimizer: Optimizer | None, comm: Ranks) -> dict[str, Span]:
    """Rows of this rank in tables owned by ranks, by the beginning of the names under which they are saved. Collective.

    Ranks own contiguous runs of the same order of nodes, so that their rows one after the other are the same table
    for any number of ranks.
    """
    named = model.named_parameters(remove_duplicate=False)
    counts = {f"model/{name}": len(p) for name, p in named if getattr(p, "shardpass_local", False)}
    for index, parameter in enumerate(_optimized(optimizer) if optimizer else []):
        if getattr(parameter, "shardpass_local", False):
            counts[f"optimizer/state/{index}/"] = len(parameter)
    every = comm.all_gather_object(counts, "checkpoint rows")
    spans = {}
    for name, count in counts.items():
        rows = [other.get(name, 0) for other in every]
        start = sum(rows[: comm.rank])
        spans[name] = (start, start + count, sum(rows))
    return spans


def _span_of(name: str, spans: dict[str, Span]) -> Span | None:
    return next(
        (s for prefix, s in spans.items() if name == prefix or (prefix[-1] == "/" and name.startswith(prefix))), None
    )


def _continue_random(manifest: dict[str, Any], tensors: dict[str, Tensor], comm: Ranks) -> bool:
    """Restore this rank's random state, or derive one on another number of ranks; whether it was restored."""
    names = [name for name in manifest["local"] if name.startswith("random/")]
    same = bool(manifest["ranks"] == comm.size)
    with comm.random_lock():
        if same:
            set_random_state({name.removeprefix("random/"): tensors[name] for name in names})
        else:
            torch.manual_seed(derive_seed(digest(tensors["random/cpu@0"]), comm.size, comm.rank))
    return same


def _agreed(comm: Ranks, work: Callable[[], Any]) -> Any:
    """What `work` returned here; a CheckpointError on one rank is raised on all. Collective."""
    result, problem = None, None
    try:
        result = work()
    except CheckpointError as error:
        problem = str(error)
    for rank, text in enumerate(comm.all_gather_object(problem, "checkpoint verdict")):
        if text is not None:
            raise CheckpointError(f"{text} (found on rank {rank})")
    return result


def _trees(model: nn.Module, optimizer: Optimizer | None, extra: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    state = model.state_dict()
    trees = {
        "model": encode(dict(state), "model", tensors),
        "model_metadata": encode(dict(getattr(state, "_metadata", {})), "model_metadata", tensors),
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


def _optimized(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _shapes(optimizer: Optimizer) -> list[list[list[int]]]:
    """The shapes of the parameters of each group."""
    return [[list(parameter.shape) for parameter in group["params"]] for group in optimizer.param_groups]


def _refuse_different(comm: Ranks, model: nn.Module) -> None:
    """Refuse parameters that have drifted apart: the file would hold rank 0's. Collective."""
    shared = {n: p for n, p in model.named_parameters() if not getattr(p, "shardpass_local", False)}
    mine = {name: digest(parameter.detach().cpu()) for name, parameter in shared.items()}
    every = comm.all_gather_object(mine, "checkpoint parameters")
    for name in mine:
        other = next((rank for rank, theirs in enumerate(every) if theirs.get(name) != every[0].get(name)), None)
        if other is not None:
            raise CheckpointError(
                f"the parameter {name!r} differs between rank 0 and rank {other}, so the ranks do not train one model. "
                f"Every step needs sync_gradients before it, and every rank the same optimizer"
            )


def _local_names(model: nn.Module, optimizer: Optimizer | None, tensors: dict[str, Tensor]) -> list[str]:
    """The tensors of which every rank has rows of its own: such parameters, and optimizer state of their shape."""
    local = [
        f"model/{name}"
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if getattr(parameter, "shardpass_local", False)
    ]
    for index, parameter in enumerate(_optimized(optimizer) if optimizer else []):
        if getattr(parameter, "shardpass_local", False):
            prefix = f"optimizer/state/{index}/"
            local += [n for n, t in tensors.items() if n.startswith(prefix) and t.shape == parameter.shape]
    return [name for name in local if name in tensors]


def _fingerprints(graph: Any) -> tuple[str | None, str | None]:
    return getattr(graph, "fingerprint", None), getattr(graph, "partition_fingerprint", None)


def _validate(
    path: Path,
    manifest: dict[str, Any],
    model: nn.Module,
    optimizer: Optimizer | None,
    graph: Any,
    spans: dict[str, Span],
) -> None:
    """Raise CheckpointError if the checkpoint does not fit what it is loaded into."""
    what = f"the checkpoint {str(path)!r}"
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{what} has format {manifest.get('format')}, this version reads format {FORMAT}")
    for kind, found in zip(("graph", "partition"), _fingerprints(graph)):
        if None not in (found, manifest[kind]) and found != manifest[kind]:
            raise CheckpointError(
                f"{what} was written for another {kind}: {manifest[kind]}, this is {found}. Load it with the store "
                f"that it was trained on"
            )
    local = [name for name in manifest["local"] if not name.startswith("random/")]
    if local and (_fingerprints(graph)[1] is None or manifest["partition"] is None):
        raise CheckpointError(
            f"{what} holds rows owned by ranks ({local[0]}), which belong to the nodes of one partition: pass graph= "
            f"to save_checkpoint and to load_checkpoint, so that they can be compared"
        )
    own = {name: describe(value) for name, value in model.state_dict().items()}
    saved = {}
    for name, tree in manifest["model"]["dict"]:
        stored = tree["tensor"] if isinstance(tree, dict) and "tensor" in tree else None
        if stored is not None and stored in local:
            saved[name] = _table(stored, manifest, spans)
        else:
            saved[name] = "{} {}".format(*manifest["tensors"][stored]) if stored else "no tensor"
    for name in [*own, *saved]:
        if own.get(name) != saved.get(name):
            raise CheckpointError(
                f"{what} does not fit the model: {name!r} is {saved.get(name, 'missing')} in the checkpoint, "
                f"{own.get(name, 'missing')} in the model"
            )
    if optimizer is not None:
        _validate_optimizer(what, manifest["optimizer"], optimizer, bool(local))


def _table(name: str, manifest: dict[str, Any], spans: dict[str, Span]) -> str:
    """A saved table as this rank's rows of it would be described; the whole, where the tables differ in length."""
    parts = [manifest["tensors"][f"{name}@{rank}"] for rank in range(manifest["ranks"])]
    dtype, (_, *tail) = parts[0]
    saved = sum(shape[0] for _, shape in parts)
    start, stop, total = _span_of(name, spans) or (0, saved, saved)
    return f"{dtype} {[stop - start if total == saved else saved, *tail]}"


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
        state = decode(manifest["model"], tensors)
        model.load_state_dict(_with_metadata(state, decode(manifest["model_metadata"], tensors)))
        if optimizer is not None:
            optimizer.load_state_dict(decode(manifest["optimizer"]["state"], tensors))
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"the state could not be restored: {error}") from error
    forget_gradients(model)


def _with_metadata(state: dict[str, Any], metadata: dict[str, Any]) -> dict[str, Any]:
    """`state` as a ``state_dict`` with the module versions that torch keeps as an attribute."""
    from collections import OrderedDict

    versioned: Any = OrderedDict(state)
    versioned._metadata = metadata
    result: dict[str, Any] = versioned
    return result
