"""Every class of torch_geometric.nn.models, and what a sharded graph makes of it.

`tests/frontends/test_pyg_models.py` walks the package: each class is in exactly one of the groups below. One that a
later release adds is in none, and is refused until somebody has looked at it. What their methods besides ``forward`` do
is in `frontends/pyg/methods.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

EXACT = frozenset(
    "MLP BasicGNN GCN GraphSAGE GIN GAT PNA EdgeCNN JumpingKnowledge HeteroJumpingKnowledge DeepGCNLayer MetaLayer "
    "AttentiveFP GATEConv NeuralFingerprint LabelPropagation CorrectAndSmooth PMLP RECT_L MaskLabel SignedGCN "
    "LightGCN InnerProductDecoder GAE VGAE ARGA ARGVA ARLinkPredictor InvertibleModule GroupAddRev SGFormer "
    "SGModule GraphModule DeepGraphInfomax Polynormer GPSENodeEncoder CFConv InteractionBlock ViS_MP ViS_MP_Vertex "
    "EdgeEmbedding".split()
)
"""Exact: built of layers that are, or given what they lack by `wrap`."""

ROW_WISE = frozenset(
    "Envelope BesselBasisLayer ResidualLayer GaussianFilter GaussianSmearing ShiftedSoftplus CosineCutoff "
    "ExpNormalSmearing TimeEncoder IdentityMessage Sphere Linear VecLayerNorm GatedEquivariantBlock EquivariantScalar "
    "Atomref".split()
)
"""Parts of models: each row of the output depends on that row of the input."""

_POSITIONS = (
    "it is made for batches of small molecules and builds or walks their graph from positions; train it in one process "
    "(DistributedDataParallel over molecules)"
)
_TEMPORAL = "it follows events in time, with a memory of all nodes; train it in one process"
_WALKS = "it trains on random walks over the whole graph; train it in one process and store the result as a node field"
_BATCH_OBJECT = "it is called with a Batch of small graphs, not with edge_index; train it in one process"
_PAIRS = (
    "it scores pairs of nodes with matrices over all nodes; use an encoder that is exact, put its outputs "
    "together with shardpass.gather, and score pairs on those"
)
_TABLE = (
    "it holds a row per node of the graph; SparseLinear is SimpleConv('sum') over the rows of a "
    "shardpass.NodeEmbedding(graph, channels): build the model from these and MLP"
)

_GROUPS = (
    (
        "SchNet RadiusInteractionGraph DimeNet DimeNetPlusPlus SphericalBasisLayer EmbeddingBlock "
        "InteractionPPBlock OutputBlock OutputPPBlock GNNFF NodeBlock EdgeBlock ViSNet ViSNetBlock Distance",
        _POSITIONS,
    ),
    (
        "NeighborEmbedding",
        "it goes another way where no edge is a self-loop, which each rank would judge by its own edges; remove "
        "self-loops before partitioning and write its message as a MessagePassing class of your own",
    ),
    ("TGNMemory LastAggregator MeanAggregator RENet NodeEncoder LinkEncoder _MLPMixer", _TEMPORAL),
    ("Node2Vec MetaPath2Vec", _WALKS),
    (
        "GPSE GeneralLayer GeneralMultiLayer ResGatedGCNConv BatchNorm1dNode BatchNorm1dEdge GNNStackStage "
        "GNNInductiveHybridMultiHead IdentityHead",
        _BATCH_OBJECT,
    ),
    ("LPFormer LPAttLayer", _PAIRS),
    ("LINKX SparseLinear", _TABLE),
    ("GraphUNet", "it drops nodes (TopKPooling) and multiplies adjacency matrices; use a model without pooling"),
    ("BPRLoss", "it averages over own pairs only; use shardpass.mean over the logsigmoid of their differences"),
)
REFUSED: dict[str, str] = {name: reason for names, reason in _GROUPS for name in names.split()}
"""What cannot be exact, with the reason and what to do."""

REFUSED_IF: dict[str, tuple[Callable[[Any], bool], str]] = {
    "InvertibleModule": (
        lambda module: not module.disable,
        "it drops its inputs and computes them again inside backward, out of step with the other ranks; build it with "
        "disable=True. The modes 'sar' and 'keep' of shardpass keep no messages either",
    ),
    "InteractionBlock": (lambda module: not hasattr(module, "conv"), _POSITIONS),  # that of DimeNet
    "DeepGCNLayer": (
        lambda module: bool(module.ckpt_grad),
        "ckpt_grad=True is reentrant checkpointing; build it with ckpt_grad=False and call "
        "torch.utils.checkpoint.checkpoint(layer, ..., use_reentrant=False)",
    ),
}
"""What is refused as it was built: the condition, the reason and what to do."""

ELSEWHERE: dict[str, str] = {
    "torch_geometric.llm.": "models around language models are made for batches of small graphs; train the GNN in them "
    "alone, and store the text embeddings as a node field",
    "torch_geometric.graphgym.": "GraphGym calls its layers with a Batch; use the layers that it holds",
    "torch_geometric.contrib.": "experimental code was not looked at; use what torch_geometric.nn has",
    "torch_geometric.explain.": "explanations are not supported on a sharded graph; load the state_dict into a "
    "model that is not wrapped",
}
"""Packages of PyG outside torch_geometric.nn that hold modules, each refused as a whole."""
