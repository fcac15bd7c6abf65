"""Every module class of torch_geometric.nn outside ``nn.conv`` and ``nn.models``, and what a sharded graph makes of it.

`tests/frontends/test_pyg_modules.py` walks the package: each class is in exactly one of the groups below. One that a
later release adds is in none, and is refused until somebody has looked at it.
"""

from __future__ import annotations

ROW_WISE = frozenset(
    "Linear HeteroLinear HeteroDictLinear PositionalEncoding TemporalEncoding MessageNorm HeteroLayerNorm "
    "Sequential ModuleDict ParameterDict Reshape ToHeteroLinear ToHeteroMessagePassing "
    "HeteroBasisConv LinearAlign".split()
)
"""Each row of the output depends on that row of the input, or the module is a container: right on own rows as it is."""

NORMS = frozenset(
    "BatchNorm DiffGroupNorm GraphNorm GraphSizeNorm HeteroBatchNorm InstanceNorm LayerNorm MeanSubtractionNorm "
    "PairNorm".split()
)
"""Exact: `wrap` gives them, or the ``torch.nn.BatchNorm1d`` they hold, the statistics of all ranks' nodes."""

ATTENTION = frozenset("PerformerAttention PerformerProjection PolynormerAttention SGFormerAttention".split())
"""Exact: linear attention over all nodes, for which `wrap` adds up a few small matrices over ranks."""

READOUTS = frozenset(
    "Aggregation SumAggregation MeanAggregation MaxAggregation MinAggregation MulAggregation VarAggregation "
    "StdAggregation SoftmaxAggregation PowerMeanAggregation FusedAggregation MultiAggregation DegreeScalerAggregation "
    "AttentionalAggregation Set2Set DeepSetsAggregation VariancePreservingAggregation".split()
)
"""Exact in messages, and as a readout with ``graph.batch`` as index: they only scatter and look up."""

WHOLE_SETS = frozenset(
    "LSTMAggregation GRUAggregation SortAggregation MedianAggregation QuantileAggregation MLPAggregation "
    "LCMAggregation SetTransformerAggregation GraphMultisetTransformer PatchTransformerAggregation "
    "EquilibriumAggregation MultiheadAttentionBlock SetAttentionBlock InducedSetAttentionBlock "
    "PoolingByMultiheadAttention MomentumOptimizer ResNetPotential".split()
)
"""Need a set in one piece. In messages the engine decides; with ``graph.batch`` as index a call is refused, but for
``EquilibriumAggregation``, which descends along gradients of readouts."""

_DROPS = "it drops or merges nodes, so the nodes of the result lie unevenly and its edges need a new halo"
_GATHER = "; apply it to outputs that shardpass.gather has put together, or partition the coarse graph beforehand"
_DENSE = "it takes the dense adjacency matrix of a whole graph; use the layer of the same name without Dense"
_ALL_PAIRS = "it attends over all nodes of the graph; use a layer that attends over edges (GATConv, TransformerConv)"
_TRIPLETS = (
    "it is called with triplets of node ids and holds one row per node; train it in one process, or look up rows of "
    "own nodes yourself and exchange messages with a layer of torch_geometric.nn"
)

_GROUPS = (
    (
        "TopKPooling SAGPooling ASAPooling PANPooling EdgePooling ClusterPooling Select SelectTopK Connect FilterEdges",
        _DROPS + _GATHER,
    ),
    ("MemPooling", "it assigns all nodes to clusters at once, in a padded batch" + _GATHER),
    ("DMoNPooling", "it assigns all nodes to clusters at once, with a dense adjacency matrix" + _GATHER),
    ("DenseGATConv DenseGCNConv DenseGINConv DenseGraphConv DenseSAGEConv", _DENSE),
    ("QFormer", _ALL_PAIRS),
    ("KGEModel ComplEx DistMult RotatE TransE", _TRIPLETS),
    ("DataParallel", "it splits a list of graphs over devices and averages gradients; ranks share one graph instead"),
)
REFUSED: dict[str, str] = {name: reason for names, reason in _GROUPS for name in names.split()}
"""What cannot be exact, with the reason and what to do."""
