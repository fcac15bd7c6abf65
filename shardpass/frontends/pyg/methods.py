"""The methods of PyG's layers and models that do not run as they are: refused by name, replaced, or guarded.

A method that averages over own rows, or looks up ids of the whole graph among them, would be silently wrong. Every
public method of an exact model has a line below, or is right on own rows: the tests list which are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import isfunction, signature
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from shardpass.core.graphs import BatchIndex, NodeIds, ShardedEdgeIndex
from shardpass.core.ranks import Ranks, unfollowed
from shardpass.errors import RefusedError
from shardpass.frontends.pyg import replacements

_LIBRARIES = frozenset("builtins torch torch_geometric lightning pytorch_lightning shardpass".split())
_SAMPLED = "must be left out: it belongs to sampled neighbours, but a sharded graph is trained whole"
_EDGES = (
    "must be left out, be the graph, or come from shardpass.node_ids(graph, ids): plain ids of the whole graph do not "
    "number the rows here, which are own ones"
)
_BATCH = "must be graph.batch, so that the readout takes in the nodes of all ranks"
_LOADER = (
    "it samples neighbours from a graph in one piece; call the model with the graph in eval mode under no_grad(), "
    "which computes every layer once for all nodes"
)
_NEGATIVES = (
    "it draws negative edges among own nodes and averages over own edges; call shardpass.mean on the values of "
    "decode() or discriminate(), for the graph and for negatives of shardpass.negative_sampling"
)
_ALL_PAIRS = "it scores all pairs of nodes, but a rank holds its own; score outputs that shardpass.gather put together"
_OWN_MEAN = "it averages over own rows only; call shardpass.mean on the values of single rows"
_GATHERED = "it evaluates own rows only; call it on an unwrapped model with outputs that shardpass.gather put together"
_BEFORE = "a rank holds some rows only; compute it before partition and store it as a field"

REFUSED_METHODS: dict[str, dict[str, str]] = {
    "BasicGNN": {"inference": _LOADER, "inference_per_layer": _LOADER},
    "RECT_L": {"get_semantic_labels": _BEFORE},
    "LightGCN": {"recommend": _ALL_PAIRS, "link_pred_loss": _OWN_MEAN, "recommendation_loss": _OWN_MEAN},
    "SignedGCN": {
        "split_edges": _BEFORE,
        "create_spectral_features": _BEFORE,
        "loss": _NEGATIVES,
        "nll_loss": _NEGATIVES,
        "pos_embedding_loss": _NEGATIVES,
        "neg_embedding_loss": _NEGATIVES,
        "test": _GATHERED,
    },
    "InnerProductDecoder": {"forward_all": _ALL_PAIRS},
    "DeepGraphInfomax": {"test": _GATHERED},
    "ARLinkPredictor": {"calculate_r_fraction": _OWN_MEAN},
}
"""By the name of a class of nn.models: methods that raise, with the reason and what to do."""

REPLACED_METHODS: dict[str, dict[str, Callable[..., Any]]] = {
    "HeteroLinear": {"forward": replacements.hetero_linear},
    "ChebConv": {"__norm__": replacements.cheb_norm},
    "HypergraphConv": {"forward": replacements.hypergraph},
    "LabelPropagation": {"forward": replacements.label_propagation},
    "CorrectAndSmooth": {"correct": replacements.correct},
    "AttentiveFP": {"forward": replacements.attentive_fp},
    "GAE": {"recon_loss": replacements.recon_loss, "test": replacements.link_metrics},
    "VGAE": {"kl_loss": replacements.kl_loss},
    "ARGA": {"reg_loss": replacements.reg_loss, "discriminator_loss": replacements.discriminator_loss},
    "DeepGraphInfomax": {"loss": replacements.infomax_loss},
}
"""Methods that look at all nodes, and what takes their place."""

GUARDED: dict[str, dict[str, dict[str, str]]] = {
    "BasicGNN": {"forward": {"num_sampled_nodes_per_hop": _SAMPLED, "num_sampled_edges_per_hop": _SAMPLED}},
    "AttentiveFP": {"forward": {"batch": _BATCH}},
    "NeuralFingerprint": {"forward": {"batch": _BATCH}},
    "LightGCN": {"forward": {"edge_label_index": _EDGES}, "predict_link": {"edge_label_index": _EDGES}},
    "SignedGCN": {"discriminate": {"edge_index": _EDGES}},
    "InnerProductDecoder": {"forward": {"edge_index": _EDGES}},
    "ARLinkPredictor": {"forward": {"edge_index": _EDGES}, "decode": {"edge_index": _EDGES}},
}
"""Arguments of methods that must be left out, or must come from the sharded graph, with the reason."""

CALLED_WITH_A_GRAPH: dict[str, tuple[str, ...]] = {
    "CorrectAndSmooth": ("correct", "smooth"),
    "RECT_L": ("embed",),
    "InvertibleModule": ("inverse",),
    "LightGCN": ("get_embedding", "predict_link"),
    "SignedGCN": ("discriminate",),
    "GAE": ("encode", "decode", "recon_loss", "test"),
    "ARLinkPredictor": ("decode",),
}
"""Methods besides ``forward`` that run as ``forward`` does when they are called on the wrapped model itself."""


def is_replaced(kind: type) -> bool:
    """Whether a class of PyG has a method that passes messages, and that is replaced as a whole."""
    return not {"forward", "correct"}.isdisjoint(REPLACED_METHODS.get(_name(kind), ()))


def methods_replaced(module: nn.Module) -> list[str]:
    """The methods of `module` that something else takes the place of, and that are not given a graph."""
    return [name for name, _ in _own(module, REPLACED_METHODS) if name not in ("forward", *methods_to_run(module))]


def adapt_methods(module: nn.Module, comm: Ranks) -> None:
    """Refuse, replace and guard the methods of `module` as its class needs. A method that a subclass overrides stays.

    Partial functions take their place: a deep copy of `module` deep-copies those for the copied module.
    """
    for name, reason in _own(module, REFUSED_METHODS):
        setattr(module, name, partial(_refuse, f"{type(module).__name__}.{name}()", reason))
    for name, replacement in _own(module, REPLACED_METHODS):
        of_all_rows = unfollowed(1, gives="whole" if name.endswith("loss") else "rows")(replacement)
        setattr(module, name, partial(of_all_rows, module, comm))
    for name, arguments in _own(module, GUARDED):
        run = vars(module).get(name) or MethodType(getattr(type(module), name), module)
        setattr(module, name, partial(_guarded, module, name, arguments, run))


def with_written(method: Callable[..., Any], change: Callable[[Any], Any]) -> Callable[..., Any]:
    """`method` with what ``change`` makes of the function in it that PyG or its user wrote."""
    if not isinstance(method, partial):
        return method
    if method.func is _guarded:
        return partial(_guarded, *method.args[:-1], change(method.args[-1]))
    return change(method) if isinstance(method.func, FunctionType) and len(method.args) == 1 else method  # type: ignore[no-any-return]


def methods_to_run(module: nn.Module) -> list[str]:
    """The methods of `module` besides ``forward`` that are called with a graph as ``forward`` is.

    Public methods that its user wrote are among them; called without a graph they run as they are.
    """
    found = [name for kind in type(module).__mro__ for name in CALLED_WITH_A_GRAPH.get(_name(kind), ())]
    return [*dict.fromkeys([*found, *methods_written(module)])]


def methods_written(module: nn.Module) -> list[str]:
    """The public methods of the user's own classes which no class of a library has."""
    kinds = [kind for kind in type(module).__mro__ if kind.__module__.split(".")[0] not in _LIBRARIES]
    others = [kind for kind in type(module).__mro__ if kind not in kinds]
    names = dict.fromkeys(name for kind in kinds for name, value in vars(kind).items() if isfunction(value))
    return [name for name in names if name[0] != "_" and not any(hasattr(kind, name) for kind in others)]


def _own(module: nn.Module, table: dict[str, dict[str, Any]]) -> list[tuple[str, Any]]:
    """The entries of `table` for the methods that `module` has from a class of PyG."""
    found = [(kind, name, what) for kind in type(module).__mro__ for name, what in table.get(_name(kind), {}).items()]
    return [(name, what) for kind, name, what in found if getattr(type(module), name) is getattr(kind, name)]


def _name(kind: type) -> str:
    return kind.__name__ if kind.__module__.startswith("torch_geometric.nn.") else ""


def _refuse(name: str, reason: str, *args: Any, **kwargs: Any) -> Any:
    raise RefusedError(f"{name} cannot be exact on a sharded graph: {reason}")


def _guarded(
    module: nn.Module, name: str, arguments: dict[str, str], run: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """What `run` returns, which is a method of `module` or its replacement, if its `arguments` are as they must be."""
    try:
        given = signature(getattr(type(module), name)).bind(module, *args, **kwargs).arguments
    except TypeError as error:
        is_graph = name == "forward" and bool(args) and isinstance(args[0], ShardedEdgeIndex)
        hint = ": call model(graph.x, graph.edge_index)" if is_graph else ""
        raise TypeError(f"{type(module).__name__}.{name}(): {error}{hint}") from None
    for argument, reason in arguments.items():
        value = given.get(argument)
        fits = isinstance(value, BatchIndex) if reason == _BATCH else value is None
        if not fits and not (reason == _EDGES and isinstance(value, (ShardedEdgeIndex, NodeIds))):
            raise RefusedError(f"{type(module).__name__}.{name}(): `{argument}` {reason}")
    return run(*args, **kwargs)
