"""`infer_rank`: one rank's part of `shardpass infer`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from torch import Tensor, nn

import shardpass as sp
from shardpass.cli.config import TrainConfig
from shardpass.cli.models import NAMES, build_model
from shardpass.cli.task import in_degree_histogram
from shardpass.core.ranks import Mode, Ranks
from shardpass.errors import require


@dataclass(frozen=True)
class InferConfig:
    """What `shardpass infer` was asked to do, as plain data. Every rank must have the same."""

    store: str
    output: str
    weights: str
    model: str = "sage"
    layers: int = 2
    hidden: int = 64
    heads: int = 4
    batch_norm: bool = False
    frontend: str = "pyg"
    mode: Mode = "sar"
    threads: int = 1
    dtype: Literal["float32", "float64"] = "float32"
    overwrite: bool = False

    def __post_init__(self) -> None:
        if self.frontend not in ("pyg", "dgl"):
            raise ValueError(f"--frontend is pyg or dgl, got {self.frontend!r}")
        if self.model not in NAMES and ".py:" not in self.model:
            raise ValueError(f"--model is one of {', '.join(NAMES)}, or FILE.py:FUNCTION, got {self.model!r}")
        if not Path(self.weights).exists():
            raise ValueError(f"--weights {self.weights} does not exist")


def infer_rank(comm: Ranks, config: InferConfig) -> list[str]:
    """Infer as one rank of `comm`; the files written. Collective."""
    torch.set_num_threads(config.threads)
    graph = sp.load(config.store, comm, sp.Options(mode=config.mode))
    if not graph.is_homogeneous:
        raise ValueError(
            f"the store {config.store} has several types, {graph.node_types}: shardpass infer takes graphs of one; "
            f"call shardpass.infer in a script"
        )
    if "x" not in graph.node:
        raise ValueError(
            f"the store {config.store} has no node features: no field 'x' (fields: {', '.join(graph.node)})"
        )
    model = _build(config, graph).to(getattr(torch, config.dtype))
    model = (sp.pyg if config.frontend == "pyg" else sp.dgl).wrap(model, comm)
    _load_weights(Path(config.weights), comm, model, graph)
    x = graph.x.to(getattr(torch, config.dtype))
    args = (x, graph) if config.frontend == "pyg" else (graph, x)
    console = Console(stderr=True)
    with console.status("inference") if comm.rank == 0 else nullcontext() as status:
        told = None if status is None else lambda name: status.update(f"inference: {name}")
        files = sp.infer(model, graph, config.output, *args, overwrite=config.overwrite, progress=told)
    if comm.rank == 0:
        console.print("wrote", *map(str, files))
    return [str(file) for file in files]


def _build(config: InferConfig, graph: sp.ShardedGraph) -> nn.Module:
    if config.model in NAMES:
        sizes = {name: getattr(config, name) for name in ("model", "layers", "hidden", "heads", "batch_norm", "dtype")}
        histogram = in_degree_histogram(graph) if config.model == "pna" else None
        return build_model(TrainConfig(config.store, **sizes), graph.num_features, graph.num_classes, histogram)
    model = _function(config.model)(graph)
    if not isinstance(model, nn.Module):
        raise ValueError(f"--model {config.model} returned a {type(model).__name__}, expected a torch.nn.Module")
    return model


def _function(name: str) -> Callable[[sp.ShardedGraph], nn.Module]:
    file, _, function = name.rpartition(":")
    if not Path(file).is_file():
        raise ValueError(f"--model {name}: there is no file {file}")
    spec = spec_from_file_location("shardpass_model", file)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Callable[[sp.ShardedGraph], nn.Module] | None = getattr(module, function, None)
    if found is None:
        raise ValueError(f"--model {name}: {file} has no function {function!r}")
    return found


def _load_weights(path: Path, comm: Ranks, model: nn.Module, graph: sp.ShardedGraph) -> None:
    if path.suffix in (".pt", ".pth", ".bin"):
        _load_state(path, model, _readable(path, lambda: torch.load(path, map_location="cpu", weights_only=True)))
    elif _is_checkpoint(path):
        has_rows = any(isinstance(module, sp.NodeEmbedding) for module in model.modules())
        # parameters alone fit another partition, too, and another graph
        sp.load_checkpoint(path, comm, model, graph=graph if has_rows else None)
    else:
        load_file = require("safetensors.torch", "store", "shardpass infer").load_file
        _load_state(path, model, _readable(path, lambda: load_file(path)))


def _readable(path: Path, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except Exception as error:  # libraries raise errors of many kinds here
        words = " ".join(str(error).split())[:200]
        raise ValueError(
            f"--weights {path} cannot be read: {words}. Expected a checkpoint of shardpass train, or a state_dict as "
            f".safetensors, or as .pt by torch.save(model.state_dict(), path)"
        ) from error


def _is_checkpoint(path: Path) -> bool:
    safe_open = require("safetensors", "store", "shardpass infer").safe_open

    def header() -> dict[str, str]:
        with safe_open(path, "pt") as file:
            return file.metadata() or {}

    return "shardpass" in _readable(path, header)


def _load_state(path: Path, model: nn.Module, state: Any) -> None:
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        held = f"a dict with {', '.join(map(str, state))}" if isinstance(state, dict) else f"a {type(state).__name__}"
        raise ValueError(f"--weights {path} holds {held}; expected a state_dict, tensors by the names of the model")
    try:
        model.load_state_dict(state)
    except (RuntimeError, TypeError, AttributeError) as error:
        words = " ".join(str(error).split())
        raise ValueError(f"--weights {path} does not fit the model: {words}") from error
