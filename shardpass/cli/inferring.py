"""`infer_rank`: one rank's part of `shardpass infer`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Console
from torch import nn

import shardpass as sp
from shardpass.cli.console import Steps
from shardpass.cli.models import MODELS, ModelConfig, in_degrees_for
from shardpass.cli.options import StoreFolder, Threads
from shardpass.cli.task import edge_weight_of, features_of, loaded, model_inputs, unused_edge_fields
from shardpass.cli.weights import Weights, read_weights
from shardpass.core.ranks import Mode, Ranks

_MOST_NAMES = 12


@dataclass(frozen=True, kw_only=True)
class InferConfig(ModelConfig):
    """What `shardpass infer` was asked to do, as plain data. Every rank must have the same."""

    model: Annotated[str, typer.Option(help="As in `train`, or FILE.py:FUNCTION that makes it of the graph.")] = "sage"  # type: ignore[assignment]
    edge_weight: Annotated[str, typer.Option(help="The edge field that gcn or FILE.py takes for weights.")] = ""
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
        if self.edge_weight and self.frontend == "dgl":
            raise ValueError(
                "--edge-weight is for PyG, of which a model is called as model(x, graph, weights): for DGL, call "
                "shardpass.infer in a script"
            )


def infer_rank(comm: Ranks, config: InferConfig) -> list[str]:
    """Infer as one rank of `comm`; the files written. Collective."""
    torch.set_num_threads(config.threads)
    graph = loaded(config.store, comm, sp.Options(mode=config.mode))
    if not graph.is_homogeneous:
        raise ValueError(
            f"the store {config.store} has several types, {graph.node_types}: shardpass infer takes graphs of one; "
            f"call shardpass.infer in a script"
        )
    x = features_of(graph, config.torch_dtype)
    is_pyg = config.frontend == "pyg"
    weight = edge_weight_of(graph, config.edge_weight, config.torch_dtype)
    state = read_weights(config.weights)
    built = _build(config, graph, x.size(1), state).to(config.torch_dtype)
    model = (sp.pyg if is_pyg else sp.dgl).wrap(built, comm)
    _load_weights(config, comm, model, graph, state)
    console = Console(stderr=True, quiet=comm.rank > 0)
    for note in _notes(config, graph, state):
        console.print(note, markup=False)
    with Steps(console) as steps:

        def told(layer: str) -> None:
            steps.tell(f"inference: {layer}")

        args = model_inputs(x, graph, weight) if is_pyg else (graph, x)
        files = sp.infer(
            model, graph, config.output, *args, overwrite=config.overwrite, tag=config.tag, progress=told,
            classes=config.classes,
        )  # fmt: skip
    console.print("wrote", *map(str, files))
    return [str(file) for file in files]


def _build(config: InferConfig, graph: sp.ShardedGraph, num_features: int, state: Weights) -> nn.Module:
    if config.model in MODELS:
        return config.build(num_features, _num_outputs(config, num_features, state), in_degrees_for(config, graph))
    model = _function(config.model)(graph)
    if not isinstance(model, nn.Module):
        raise ValueError(f"--model {config.model} returned a {type(model).__name__}, expected a torch.nn.Module")
    if config.edge_weight and not _takes_edge_weight(model):
        raise ValueError(
            f"--edge-weight {config.edge_weight}: the model is called as model(x, graph, weights), but "
            f"{type(model).__name__} takes no weights: write forward(self, x, edge_index, edge_weight)"
        )
    return model


def _takes_edge_weight(model: nn.Module) -> bool:
    try:
        signature(model.forward).bind("x", "edge_index", "edge_weight")
    except TypeError:
        return False
    return bool(getattr(model, "supports_edge_weight", True))  # of PyG's models, which ignore weights if it is False


def _num_outputs(config: InferConfig, num_features: int, state: Weights) -> int:
    """The output channels of the model with these weights, which a graph without labels does not know."""
    two, three = (config.build(num_features, count).state_dict() for count in (2, 3))
    for name, tensor in two.items():
        shape = state.shapes.get(name, ())
        for place, sizes in enumerate(zip(tensor.shape, three[name].shape)):
            if sizes == (2, 3) and len(shape) == tensor.dim():
                return shape[place]
    return 1  # the weights are of another model, which is refused when they are loaded


def _notes(config: InferConfig, graph: sp.ShardedGraph, state: Weights) -> list[str]:
    """Lines about what nothing has compared or read."""
    notes = [unused_edge_fields(graph, config.edge_weight)] if config.model in MODELS else []
    columns = [name for fields in graph.column_names.values() for name in fields.get("x", fields.get("feat", ()))]
    if columns and not state.is_checkpoint:
        listed = ", ".join(columns[:_MOST_NAMES]) + (", ..." if len(columns) > _MOST_NAMES else "")
        notes.append(
            f"not compared: {config.weights} names no columns, and those of the store are {listed}. They must be those "
            f"of training, in their order; a checkpoint of shardpass train or save_checkpoint has their names"
        )
    return [note for note in notes if note]


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
    options = extra.get("options", {}) if isinstance(extra, dict) else {}
    trained = options.get("edge_weight", config.edge_weight) if isinstance(options, dict) else config.edge_weight
    if trained != config.edge_weight:
        raise ValueError(
            f"--weights {path} was trained with --edge-weight {trained!r}, not {config.edge_weight!r}: give that one"
        )


def _load_weights(config: InferConfig, comm: Ranks, model: nn.Module, graph: sp.ShardedGraph, state: Weights) -> None:
    """Load a checkpoint of `shardpass train`, or a state_dict. Collective."""
    path = config.weights
    if state.is_checkpoint:
        has_rows = any(isinstance(module, sp.NodeEmbedding) for module in model.modules())
        # parameters alone fit another partition, too, and another graph
        found = sp.load_checkpoint(path, comm, model, graph=graph, other_graph=not has_rows)
        _require_same_weights(path, config, found["extra"])
        return
    try:
        model.load_state_dict(state.tensors)
    except (RuntimeError, TypeError, AttributeError) as error:
        words = " ".join(str(error).split()).rstrip(".")
        remedy = "Give --model, --layers, --hidden, --heads and --batch-norm as they were in training"
        if all(name.startswith("module.") for name in state.tensors):
            remedy = "DistributedDataParallel puts 'module.' before names: save model.module.state_dict()"
        elif ":" in config.model:
            remedy = "The function must build the model as it was in training"
        raise ValueError(f"--weights {path} does not fit the model: {words}. {remedy}") from error
