"""`infer_rank`: one rank's part of `shardpass infer`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Console
from safetensors import safe_open
from torch import Tensor, nn

import shardpass as sp
from shardpass.cli.console import Steps
from shardpass.cli.models import MODELS, ModelConfig, in_degrees_for
from shardpass.cli.options import StoreFolder, Threads
from shardpass.cli.task import edge_weight_of, features_of, model_inputs, num_classes_of, unused_edge_fields
from shardpass.core.ranks import Mode, Ranks, refuse_irregular


@dataclass(frozen=True, kw_only=True)
class InferConfig(ModelConfig):
    """What `shardpass infer` was asked to do, as plain data. Every rank must have the same."""

    model: Annotated[str, typer.Option(help="As in `train`, or FILE.py:FUNCTION that makes it of the graph.")] = "sage"  # type: ignore[assignment]
    store: StoreFolder
    output: Annotated[str, typer.Argument(help="A row per node in the original order: .npy; .parquet with ids.")]
    weights: Annotated[Path, typer.Option(exists=True, help="Of `train`, or a state_dict: .pt, .safetensors.")]
    frontend: Annotated[Literal["pyg", "dgl"], typer.Option(help="dgl calls model(graph, x).")] = "pyg"
    mode: Annotated[Mode, typer.Option(help="sar needs the least memory. The numbers agree.")] = "sar"
    threads: Threads = 1
    overwrite: Annotated[bool, typer.Option(help="Replace a file that is there already.")] = False
    classes: Annotated[bool, typer.Option("--classes", help="Of .parquet: add columns of class and probability.")] = (
        False
    )
    tag: Annotated[str, typer.Option(help="Any text: a run does not continue one with another tag.")] = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model not in MODELS and ".py:" not in self.model:
            raise ValueError(f"--model is one of {', '.join(MODELS)}, or FILE.py:FUNCTION, got {self.model!r}")
        if self.edge_weight and self.model not in MODELS:
            raise ValueError("--edge-weight is for the models of the command: FILE.py:FUNCTION is given the graph")


def infer_rank(comm: Ranks, config: InferConfig) -> list[str]:
    """Infer as one rank of `comm`; the files written. Collective."""
    torch.set_num_threads(config.threads)
    graph = sp.load(config.store, comm, sp.Options(mode=config.mode))
    if not graph.is_homogeneous:
        raise ValueError(
            f"the store {config.store} has several types, {graph.node_types}: shardpass infer takes graphs of one; "
            f"call shardpass.infer in a script"
        )
    x = features_of(graph, config.torch_dtype)
    is_pyg = config.frontend == "pyg"
    model = (sp.pyg if is_pyg else sp.dgl).wrap(_build(config, graph, x.size(1)).to(config.torch_dtype), comm)
    _load_weights(config, comm, model, graph)
    console = Console(stderr=True, quiet=comm.rank > 0)
    if config.model in MODELS and (note := unused_edge_fields(graph, config.edge_weight)):
        console.print(note)
    with Steps(console) as steps:

        def told(layer: str) -> None:
            steps.tell(f"inference: {layer}")

        weight = edge_weight_of(graph, config.edge_weight, config.torch_dtype)
        args = model_inputs(x, graph, weight) if is_pyg else (graph, x)
        files = sp.infer(
            model, graph, config.output, *args, overwrite=config.overwrite, tag=config.tag, progress=told,
            classes=config.classes,
        )  # fmt: skip
    console.print("wrote", *map(str, files))
    return [str(file) for file in files]


def _build(config: InferConfig, graph: sp.ShardedGraph, num_features: int) -> nn.Module:
    if config.model in MODELS:
        return config.build(num_features, num_classes_of(graph), in_degrees_for(config, graph))
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


def _require_same_weights(path: Path, config: InferConfig, extra: Any) -> None:
    """Refuse other weights of edges than the parameters were trained with, which they fit all the same."""
    options = extra.get("options", {}) if isinstance(extra, dict) and config.model in MODELS else {}
    trained = options.get("edge_weight", config.edge_weight) if isinstance(options, dict) else config.edge_weight
    if trained != config.edge_weight:
        raise ValueError(
            f"--weights {path} was trained with --edge-weight {trained!r}, not {config.edge_weight!r}: give that one"
        )


def _load_weights(config: InferConfig, comm: Ranks, model: nn.Module, graph: sp.ShardedGraph) -> None:
    """Load a checkpoint of `shardpass train`, or a state_dict. Collective."""
    path = config.weights
    try:
        state = _read_state(path)
    except Exception as error:  # libraries raise errors of many kinds here
        words = " ".join(str(error).split())[:200]
        raise ValueError(
            f"--weights {path} cannot be read: {words}. Expected a checkpoint of shardpass train, or a state_dict as "
            f".safetensors, or as .pt by torch.save(model.state_dict(), path)"
        ) from error
    if state is None:
        has_rows = any(isinstance(module, sp.NodeEmbedding) for module in model.modules())
        # parameters alone fit another partition, too, and another graph
        found = sp.load_checkpoint(path, comm, model, graph=graph, other_graph=not has_rows)
        _require_same_weights(path, config, found["extra"])
        return
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        held = f"a dict with {', '.join(map(str, state))}" if isinstance(state, dict) else f"a {type(state).__name__}"
        raise ValueError(f"--weights {path} holds {held}; expected a state_dict, tensors by the names of the model")
    try:
        model.load_state_dict(state)
    except (RuntimeError, TypeError, AttributeError) as error:
        words = " ".join(str(error).split())
        raise ValueError(
            f"--weights {path} does not fit the model: {words}. Give "
            f"--model, --layers, --hidden, --heads and --batch-norm as they were in training"
        ) from error


def _read_state(path: Path) -> object:
    """What the file holds, which should be a state_dict; `None` for a checkpoint of `shardpass train`."""
    refuse_irregular(path)
    if path.suffix in (".pt", ".pth", ".bin"):
        return torch.load(path, map_location="cpu", weights_only=True)
    with safe_open(path, "pt") as file:
        if "shardpass" in (file.metadata() or {}):
            return None
        return {name: file.get_tensor(name) for name in list(file.keys())}
