"""SAR's interface: every documented name is importable where it was, and takes SAR's arguments in SAR's order."""

from __future__ import annotations

import ast
import importlib
import inspect
from typing import Any

import pytest

dgl = pytest.importorskip("dgl")

NAMES = {
    "": """initialize_comms rank world_size nfs_ip_init comm_device DistributedBN1D construct_mfgs construct_full_graph
        convert_dist_graph GraphShardManager HeteroGraphShardManager load_dgl_partition_data suffix_key_lookup Config
        edge_softmax message_has_parameters DistributedBlock DistNeighborSampler DataLoader logging_setup logger
        RelGraphConv sync_params gather_grads patch_dgl patched_edge_softmax PartitionData ShardEdgesAndFeatures""",
    "comm": """get_socket get_ip_address dump_ip_address nfs_ip_init initialize_comms is_initialized rank world_size
        master_port master_ip backend comm_device all_to_all all_reduce all_to_all_rounds all_to_all_gloo_support
        exchange_single_tensor exchange_tensors sync_params gather_grads""",
    "common_tuples": "ShardEdgesAndFeatures PartitionData SocketInfo",
    "config": "Config",
    "construct_shard_manager": "construct_mfgs construct_full_graph convert_dist_graph",
    "core": """GraphShard GraphShardManager HeteroGraphShardManager DistributedBlock message_has_parameters DataLoader
        DistNeighborSampler""",
    "core.full_partition_block": "DistributedBlock",
    "core.graphshard": "GraphShard GraphShardManager HeteroGraphShardManager",
    "core.sampling": "DataLoader DistNeighborSampler",
    "core.sar_aggregation": "message_has_parameters",
    "data_loading": "suffix_key_lookup load_dgl_partition_data load_dgl_partition_data_from_graph",
    "distributed_bn": "DistributedBN1D MeanOp VarOp",
    "edge_softmax": "edge_softmax",
    "logging_setup": "logging_setup logger",
    "patch_dgl": "RelGraphConv patched_edge_softmax patch_dgl",
}


@pytest.mark.parametrize("module", NAMES)
def test_names(module: str) -> None:
    found = importlib.import_module(f"shardpass.frontends.sar.{module}".rstrip("."))
    assert [name for name in NAMES[module].split() if not hasattr(found, name)] == []
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = found.nothing


SIGNATURES = """
comm.get_ip_address(ip_file)
comm.dump_ip_address(ip_file)
comm.nfs_ip_init(_rank, ip_file)
comm.initialize_comms(_rank, _world_size, master_ip_address, backend, _comm_device=None, master_port_number=12345)
comm.all_to_all(recv_tensors, send_tensors, move_to_comm_device=False)
comm.all_reduce(red_tensor, op, move_to_comm_device=False)
comm.all_to_all_rounds(recv_tensors, send_tensors)
comm.all_to_all_gloo_support(recv_tensors, send_tensors)
comm.exchange_single_tensor(recv_idx, send_idx, recv_tensor, send_tensor)
comm.exchange_tensors(tensors, recv_sizes=None)
comm.sync_params(model)
comm.gather_grads(model)
common_tuples.ShardEdgesAndFeatures(edges, edge_features)
common_tuples.PartitionData(all_shard_edges, node_ranges, node_features, node_type_names, \
edge_type_names, partition_book)
common_tuples.SocketInfo(name, ip_addr)
construct_shard_manager.construct_mfgs(partition_data, seed_nodes, n_layers, keep_seed_nodes=True)
construct_shard_manager.construct_full_graph(partition_data)
construct_shard_manager.convert_dist_graph(dist_graph)
core.graphshard.GraphShard(shard_edges_features, src_range, tgt_range, edge_type_names)
core.graphshard.GraphShardManager.get_full_partition_graph(self, delete_shard_data=True)
core.graphshard.GraphShardManager.to(self, device)
core.graphshard.GraphShardManager.num_nodes(self, ntype=None)
core.graphshard.GraphShardManager.number_of_nodes(self, ntype=None)
core.graphshard.GraphShardManager.num_src_nodes(self, ntype=None)
core.graphshard.GraphShardManager.number_of_src_nodes(self, ntype=None)
core.graphshard.GraphShardManager.num_dst_nodes(self, ntype=None)
core.graphshard.GraphShardManager.number_of_dst_nodes(self, ntype=None)
core.graphshard.GraphShardManager.num_edges(self, etype=None)
core.graphshard.GraphShardManager.number_of_edges(self, etype=None)
core.graphshard.GraphShardManager.num_nodes_global(self, ntype=None)
core.graphshard.GraphShardManager.number_of_nodes_global(self, ntype=None)
core.graphshard.GraphShardManager.num_edges_global(self, etype=None)
core.graphshard.GraphShardManager.number_of_edges_global(self, etype=None)
core.graphshard.GraphShardManager.in_degrees(self, vertices=dgl.ALL, etype=None)
core.graphshard.GraphShardManager.out_degrees(self, vertices=dgl.ALL, etype=None)
core.graphshard.GraphShardManager.update_all(self, message_func, reduce_func, apply_node_func=None, etype=None)
core.graphshard.GraphShardManager.apply_edges(self, message_func, edges=dgl.ALL, etype=None, inplace=False)
core.sampling.DistNeighborSampler(fanouts, prob=None, replace=False, copy_edata=True, input_node_features=None, \
output_node_features=None, output_device=None)
core.sampling.DistNeighborSampler.sample(self, full_graph_manager, seeds)
core.sampling.DataLoader(full_graph_manager, seed_nodes, graph_sampler, batch_size=1, drop_last=False, shuffle=False, \
precompute_optimized_batches=True, optimized_batches_cache=None, num_workers=0)
core.sar_aggregation.message_has_parameters(param_foo)
data_loading.suffix_key_lookup(feature_dict, key, expand_to_all=False, type_list=None)
data_loading.load_dgl_partition_data(partition_json_file, own_partition_idx, device)
data_loading.load_dgl_partition_data_from_graph(graph, device)
distributed_bn.DistributedBN1D(n_feats, eps=1e-05, affine=True, distributed=None)
distributed_bn.DistributedBN1D.forward(self, inp)
distributed_bn.MeanOp.apply(x)
distributed_bn.VarOp.apply(features)
edge_softmax.edge_softmax(graph, logits, eids=dgl.ALL, norm_by='dst')
logging_setup.logging_setup(log_level, _rank=-1, _world_size=-1, log_file=None)
patch_dgl.patched_edge_softmax(graph)
patch_dgl.patch_dgl()
""".strip().splitlines()


@pytest.mark.parametrize("text", SIGNATURES, ids=lambda text: text.split("(")[0])
def test_arguments(text: str) -> None:
    """Ours begin with SAR's, in the same order; a default of SAR's is ours."""
    call: Any = ast.parse(f"def {text.split('(')[0].split('.')[-1]}({text.split('(', 1)[1]}: ...").body[0]
    expected = [argument.arg for argument in call.args.args]
    path = text.split("(")[0]
    module = max((name for name in NAMES if path.startswith(f"{name}.")), key=len)
    owner: Any = importlib.import_module(f"shardpass.frontends.sar.{module}")
    for name in path.removeprefix(f"{module}.").split("."):
        owner = getattr(owner, name)
    found = inspect.signature(owner).parameters
    assert list(found)[: len(expected)] == expected
    for name, default in zip(reversed(expected), reversed(call.args.defaults)):
        wanted = dgl.base.ALL if ast.unparse(default) == "dgl.ALL" else ast.literal_eval(default)
        assert found[name].default == wanted, name
    required = [name for name, given in found.items() if given.default is given.empty and given.kind.name[:3] != "VAR"]
    assert set(required) <= set(expected[: len(expected) - len(call.args.defaults)])
