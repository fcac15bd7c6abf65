"""SAR's documented names, one by one, in this process."""

from __future__ import annotations

import copy
import logging
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardpass as sp
from shardpass.errors import CommunicationError, RefusedError, ShardpassError
from shardpass.frontends.sar.core import counts

dgl = pytest.importorskip("dgl")

import dgl.nn.pytorch as dnn  # noqa: E402

from frontends import sar_program as program  # noqa: E402
from frontends.sar_cases import NODES, close, free_port, heterogeneous, homogeneous  # noqa: E402
from shardpass.frontends import sar  # noqa: E402
from shardpass.frontends.sar._state import STATE  # noqa: E402


@pytest.fixture
def one_rank() -> Iterator[None]:
    STATE.comm = sp.connect("local")
    yield
    STATE.comm = None


def test_a_dist_graph(parts: Callable[[int], Path], one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DGL_DIST_MODE", "standalone")
    found = program.dist_graph(parts(1))
    for name, g in (("homo", homogeneous()), ("het", heterogeneous())):
        one = found[name]
        assert sorted(one["nodes"]) == sorted(g.ntypes)
        for kind, fields in one["nodes"].items():
            assert set(fields) - {dgl.NID} == set(g.nodes[kind].data)
            for field, rows in fields.items():
                if field != dgl.NID:
                    assert torch.equal(rows, g.nodes[kind].data[field][fields["orig_id"]])
        for kind, fields in one["edges"].items():
            assert torch.equal(fields["w"], g.edges[kind].data["w"][fields[dgl.EID]])
            assert torch.equal(one["degrees"][kind], g.in_degrees(etype=kind)[one["nodes"][kind[2]]["orig_id"]])


def test_sampling(parts: Callable[[int], Path], one_rank: None) -> None:
    """A script of SAR that trains on sampled blocks."""
    data = sar.load_dgl_partition_data(program.part_of(parts(1), "homo"), 0, "cpu")
    graph = sar.construct_full_graph(data)
    features = sar.suffix_key_lookup(data.node_features, "feat")
    labels = sar.suffix_key_lookup(data.node_features, "label")
    seeds = sar.suffix_key_lookup(data.node_features, "train_mask").bool().nonzero().view(-1)
    sampler = sar.DistNeighborSampler([3, 4], input_node_features={"f": features}, output_node_features={"l": labels})
    loader = sar.DataLoader(graph, seeds, sampler, 8, shuffle=True)
    model = dgl.nn.SAGEConv(8, 3, "mean").double()
    sar.sync_params(model)
    found = []
    for blocks in loader:
        first, last = blocks
        assert torch.equal(first.srcdata["f"], features[first.srcdata[dgl.NID]])
        assert torch.equal(last.dstdata["l"], labels[last.dstdata[dgl.NID]]) and "l" not in first.srcdata
        assert int(first.in_degrees().max()) <= 3 and int(last.in_degrees().max()) == 4
        found.append(last.dstdata[dgl.NID])
        loss = sp.cross_entropy(model(first, first.srcdata["f"]), labels[first.dstdata[dgl.NID]], None, STATE.comm)
        model.zero_grad()
        loss.backward()
        sar.gather_grads(model)
    assert torch.equal(torch.cat(found).sort().values, seeds) and len(found) == len(loader) == 3
    with pytest.raises(TypeError, match=r"prob=True and replace=False; expected the name of an edge feature"):
        sar.DistNeighborSampler([3, 4], True)


def test_before_joining() -> None:
    assert not sar.is_initialized()
    for ask in (sar.rank, sar.world_size, sar.comm_device, lambda: sar.gather_grads(nn.Linear(1, 1))):
        with pytest.raises(ShardpassError, match=r"call sar\.initialize_comms\(rank, world_size"):
            ask()
    with pytest.raises(ValueError, match=r"rank 2 of 2; expected integers, 0 <= rank < world_size"):
        sar.initialize_comms(2, 2, "127.0.0.1", "gloo")
    with pytest.raises(ValueError, match="the backend is 'smoke'; expected one of gloo, mpi, nccl, ccl"):
        sar.initialize_comms(0, 1, "127.0.0.1", "smoke")


def test_socket_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAR_SOCKET_NAME", "eth99")
    with pytest.raises(ValueError, match=r"SAR_SOCKET_NAME='eth99' is no network interface of .*, which has: .*lo"):
        sar.initialize_comms(0, 1, "127.0.0.1", "gloo")


def test_a_second_initialisation(one_rank: None) -> None:
    sar.initialize_comms(0, 1, "127.0.0.1", "gloo")
    assert (sar.rank(), sar.world_size(), sar.comm_device()) == (0, 1, torch.device("cpu"))
    with pytest.raises(ValueError, match="this process is to be rank 1 of 2, but initialize_comms was called before"):
        sar.initialize_comms(1, 2, "127.0.0.1", "gloo")


def test_all_reduce(one_rank: None) -> None:
    for op in (torch.distributed.ReduceOp.SUM, "max", torch.distributed.ReduceOp.PRODUCT):
        values = torch.tensor([2.0, 3.0])
        sar.comm.all_reduce(values, op)
        assert values.tolist() == [2, 3]
    with pytest.raises(ValueError, match="expected SUM, MAX, MIN or PRODUCT"):
        sar.comm.all_reduce(torch.ones(1), torch.distributed.ReduceOp.BAND)


def test_a_stale_file_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAR_SOCKET_NAME", "lo")
    path = tmp_path / "ip"
    path.write_text(f"127.0.0.1\n{free_port()} 00ff\n")
    found: list[str] = []
    waiting = threading.Thread(target=lambda: found.append(sar.nfs_ip_init(1, str(path))))
    waiting.start()
    time.sleep(0.4)
    assert not found
    assert sar.nfs_ip_init(0, str(path)) == "127.0.0.1"
    waiting.join(60)
    assert found == ["127.0.0.1"]
    STATE.on_connected.pop()()
    assert not path.exists()


HOLDS_THE_INTERPRETER = """
import ctypes, sys
from shardpass.frontends import sar

sar.nfs_ip_init(0, sys.argv[1])
print("published", flush=True)
ctypes.PyDLL(None).sleep(30)  # as MPI does while it starts and waits for the other ranks
"""


@pytest.mark.long
@pytest.mark.processes
def test_rank_0_is_found_while_it_holds_the_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAR_SOCKET_NAME", "lo")
    monkeypatch.setenv("SHARDPASS_CONNECT_TIMEOUT", "10")
    command = [sys.executable, "-c", HOLDS_THE_INTERPRETER, str(tmp_path / "ip")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as rank_0:
        assert rank_0.stdout is not None and rank_0.stdout.readline() == "published\n"
        time.sleep(0.2)  # it is in the call now
        try:
            assert sar.nfs_ip_init(1, str(tmp_path / "ip")) == "127.0.0.1"
        finally:
            rank_0.kill()


@pytest.mark.parametrize(
    "content, told",
    [
        (None, "does not exist"),
        ("10.0.0.7", "was written by something else"),
        ("127.0.0.1\n{port} 00ff\n", "names 127.0.0.1, where no starting rank 0 answers"),
    ],
)
def test_no_address_is_an_error(
    content: str | None, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDPASS_CONNECT_TIMEOUT", "0.3")
    path = tmp_path / "ip"
    if content is not None:
        path.write_text(content.format(port=free_port()))
    with pytest.raises(CommunicationError, match=told):
        sar.nfs_ip_init(3, str(path))


def test_another_program_on_the_port_is_not_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDPASS_CONNECT_TIMEOUT", "0.5")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=lambda: listener.accept()[0].sendall(b"SSH"), daemon=True).start()
        (tmp_path / "ip").write_text(f"127.0.0.1\n{listener.getsockname()[1]} {'0' * 32}\n")
        with pytest.raises(CommunicationError, match="left by an earlier run"):
            sar.nfs_ip_init(1, str(tmp_path / "ip"))


def test_suffix_key_lookup() -> None:
    feat, other = torch.ones(3, 2), torch.zeros(2, 2)
    features = {"a/feat": feat, "a/xfeat": torch.zeros(3), "b/label": torch.arange(2)}
    assert sar.suffix_key_lookup(features, "feat") is feat
    assert sar.suffix_key_lookup(features, "a/feat") is feat
    assert sar.suffix_key_lookup(features, "feat", type_list=["b", "a"]).shape == (3, 2)
    assert torch.equal(sar.suffix_key_lookup(features, "feat", True, ["b", "a"]), torch.cat([other, feat]))
    for types in (None, ["b"]):
        with pytest.warns(UserWarning, match="empty tensor; there are: a/feat, a/xfeat, b/label"):
            assert torch.equal(sar.suffix_key_lookup(features, "eat", type_list=types), torch.LongTensor([]))
    with pytest.raises(ValueError, match="expand_to_all=True needs the type_list"):
        sar.suffix_key_lookup(features, "feat", True)
    both = features | {"b/feat": other}
    with pytest.raises(ValueError, match="'feat' means a/feat, b/feat: pass one of them, or the type_list"):
        sar.suffix_key_lookup(both, "feat")
    assert torch.equal(sar.suffix_key_lookup(both, "feat", type_list=["a", "b"]), torch.cat([feat, other]))
    with pytest.raises(ValueError, match=r"float32 rows of shape \[2\] and float32 rows of shape \[5\]"):
        sar.suffix_key_lookup(both | {"b/feat": torch.zeros(2, 5)}, "feat", type_list=["a", "b"])
    with pytest.raises(ValueError, match="the number of nodes of type 'c' is not known"):
        sar.suffix_key_lookup(features, "feat", True, ["a", "c"])
    typed = {"a/feat": feat, dgl.NTYPE: torch.tensor([0, 0, 0, 1])}
    assert sar.suffix_key_lookup(typed, "feat", True, ["a", "c"]).shape == (4, 2)
    edges = {"a:r:b/w": feat}
    assert sar.suffix_key_lookup(edges, "w", type_list=[("a", "r", "b")]).shape == (3, 2)


def test_wrong_partitions(parts: Callable[[int], Path], one_rank: None, tmp_path: Path) -> None:
    config = program.part_of(parts(2), "homo")
    with pytest.raises(ValueError, match=r"has the parts 0 to 1, no part 2; pass the rank"):
        sar.load_dgl_partition_data(config, 2, "cpu")
    data = sar.load_dgl_partition_data(config, 0, "cpu")
    with pytest.raises(ValueError, match=r"2 parts, but there are 1 ranks: start 2 ranks, or partition it into 1"):
        sar.construct_full_graph(data)
    with pytest.raises(ValueError, match=r"nothing\.json cannot be read"):
        sar.load_dgl_partition_data(str(tmp_path / "nothing.json"), 0, "cpu")
    torn = tmp_path / "torn"
    dgl.distributed.partition_graph(homogeneous(), "homo", 2, str(torn), part_method="random")
    for name in ("graph.dgl", "node_feat.dgl", "edge_feat.dgl"):
        file = torn / "part1" / name
        whole_file = file.read_bytes()
        file.write_bytes(whole_file[: len(whole_file) // 2])
        with pytest.raises(ValueError, match=f"{name} is cut short or altered"):
            sar.load_dgl_partition_data(str(torn / "homo.json"), 1, "cpu")
        sar.load_dgl_partition_data(str(torn / "homo.json"), 0, "cpu")  # reads nothing of part 1
        file.write_bytes(whole_file)
    (torn / "part0").rename(torn / "kept")
    (torn / "part1").rename(torn / "part0")
    other = r"edge_feat\.dgl is altered: .* expected \d+ rows|graph\.dgl is altered or belongs to another"  # as drawn
    with pytest.raises(ValueError, match=other):
        sar.load_dgl_partition_data(str(torn / "homo.json"), 0, "cpu")


def test_original_ids_in_files_of_their_own(one_rank: None, tmp_path: Path) -> None:
    g = heterogeneous()
    for kind in g.ntypes:
        g.nodes[kind].data.pop("orig_id")
    for kind in g.canonical_etypes:
        g.edges[kind].data.pop("orig_id")
    nodes, edges = dgl.distributed.partition_graph(
        g, "het", 1, str(tmp_path), part_method="random", return_mapping=True
    )
    save = dgl.data.utils.save_tensors
    save(str(tmp_path / "part0" / "orig_nids.dgl"), nodes)
    save(str(tmp_path / "part0" / "orig_eids.dgl"), {":".join(kind): ids for kind, ids in edges.items()})
    graph = sar.construct_full_graph(sar.load_dgl_partition_data(str(tmp_path / "het.json"), 0, "cpu"))
    for kind in g.ntypes:
        rows = graph.nodes[kind].data
        assert torch.equal(rows["feat"], g.nodes[kind].data["feat"][rows["orig_id"]])
    for kind in g.canonical_etypes:
        rows = graph.edges[kind].data
        assert torch.equal(rows["w"], g.edges[kind].data["w"][rows[dgl.EID]])


def plain(parts: Callable[[int], Path]) -> sar.PartitionData:
    return sar.load_dgl_partition_data(program.part_of(parts(1), "homo"), 0, "cpu")


def test_data_made_by_hand(parts: Callable[[int], Path], one_rank: None) -> None:
    shard = sar.ShardEdgesAndFeatures((torch.tensor([0, 1, 3]), torch.tensor([1, 2, 2])), {"w": torch.rand(3)})
    data = sar.PartitionData([shard], [(0, 4)], {"feat": torch.rand(4, 2)}, ["_N"], [("_N", "_E", "_N")])
    graph = sar.construct_full_graph(data)
    assert graph.in_degrees().tolist() == [0, 1, 2, 0]
    assert set(graph.edata) == {"w", dgl.EID}
    assert set(graph.ndata) == {"feat", dgl.NID}
    wrong = shard._replace(edges=(torch.tensor([0, 1, 4]), torch.tensor([1, 2, 2])))
    with pytest.raises(ValueError, match=r"an edge ends at node 4, which is outside \[0, 4\)"):
        sar.construct_full_graph(data._replace(all_shard_edges=[wrong]))
    with pytest.raises(ValueError, match="node feature 'feat' has 3 rows; this rank has 4 such nodes"):
        sar.construct_full_graph(data._replace(node_features={"feat": torch.rand(3, 2)}))
    with pytest.raises(ValueError, match="feature 'w' of edges _N:_E:_N from part 0 has 2 rows for 3 edges"):
        short = shard._replace(edge_features={"w": torch.rand(2)})
        sar.construct_full_graph(data._replace(all_shard_edges=[short]))
    with pytest.raises(ValueError, match="rank 0: 1 of the seed nodes are not its own"):
        sar.construct_mfgs(data, torch.tensor([1, 4]), 1)


def test_the_device_of_a_graph(parts: Callable[[int], Path], one_rank: None) -> None:
    graph = sar.construct_full_graph(plain(parts))
    assert graph.to("cpu") is graph
    with pytest.raises(RefusedError, match=r"cannot move to cuda:0: pass the device to load_dgl_partition_data"):
        graph.to("cuda:0")
    assert torch.equal(graph.input_nodes, torch.arange(NODES))


@pytest.mark.parametrize("name, value", [("pipeline_depth", 0), ("max_collective_size", -1), ("pipeline_depth", 1.5)])
def test_config_is_checked(
    name: str, value: Any, parts: Callable[[int], Path], one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sar.Config, name, value)
    with pytest.raises(ValueError, match=rf"sar\.Config\.{name} is {value}; expected an integer that is at least"):
        sar.construct_full_graph(plain(parts))


def test_edge_softmax_over_out_edges_is_refused(parts: Callable[[int], Path], one_rank: None) -> None:
    graph = sar.construct_full_graph(plain(parts))
    logits = torch.rand(graph.num_edges())
    with pytest.raises(RefusedError, match="the softmax is over all in-edges of a node"):
        sar.edge_softmax(graph, logits, norm_by="src")
    with pytest.raises(RefusedError, match="over some edges"):
        sar.edge_softmax(graph, logits[:3], eids=torch.arange(3))
    g = homogeneous()
    logits = torch.rand(g.num_edges())
    assert torch.equal(
        sar.patched_edge_softmax(g, logits, norm_by="src"), dgl.nn.functional.edge_softmax(g, logits, norm_by="src")
    )


def test_message_has_parameters_takes_a_function() -> None:
    with pytest.raises(TypeError, match=r"write @sar\.message_has_parameters\(lambda self"):
        sar.message_has_parameters([nn.Parameter(torch.ones(1))])


def test_synchronised_models_stay_ordinary(parts: Callable[[int], Path], one_rank: None) -> None:
    model = program.seeded(program.Sage, sar.DistributedBN1D)
    names = list(model.state_dict())
    sar.sync_params(model)
    sar.sync_params(model)
    assert len(model._forward_pre_hooks) == len(model._forward_hooks) == 1
    assert list(model.state_dict()) == names == list(program.seeded(program.Sage, nn.BatchNorm1d).state_dict())
    graph, x = sar.construct_full_graph(plain(parts)), torch.rand(NODES, 8, dtype=torch.float64)
    expected = model(graph, x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        close(other(graph, x), expected)
    with torch.no_grad():
        assert not model(graph, x).requires_grad
    assert not STATE.forwards
    with pytest.raises(RefusedError, match="SortPooling cannot be exact"):
        sar.sync_params(dnn.SortPooling(2))


def test_norms(one_rank: None) -> None:
    torch.manual_seed(0)
    x = torch.randn(50, 4, dtype=torch.float64) + 1e6
    for options in ({}, {"affine": False}, {"eps": 0.1}, {"distributed": False}, {"track_running_stats": False}):
        ours = sar.DistributedBN1D(4, **options).double()
        theirs = nn.BatchNorm1d(4, **{k: v for k, v in options.items() if k != "distributed"}).double()
        close(ours(x), theirs(x))
        close(ours.eval()(x), theirs.eval()(x))
    assert torch.isfinite(sar.DistributedBN1D(2)(torch.ones(5, 2))).all()


def test_logging(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    logger = logging.getLogger("shardpass")
    before = logger.level, logger.propagate, list(logger.handlers)
    try:
        sar.logging_setup(logging.INFO, 1, 4)
        sar.logging_setup("INFO", 2, 4)
        sar.logger.info("hello")
        sar.logger.debug("quiet")
        assert capsys.readouterr().err == "rank 2 of 4: INFO: shardpass.sar: hello\n"
        sar.logging_setup(logging.DEBUG, log_file=str(tmp_path / "log"))
        sar.logger.debug("kept")
        assert (tmp_path / "log").read_text() == "DEBUG: shardpass.sar: kept\n" and not capsys.readouterr().err
    finally:
        sar.logging_setup(logging.INFO)  # closes the file
        logger.level, logger.propagate, logger.handlers[:] = before


def test_counts_are_numbers() -> None:
    """Counts of own rows, as those of SAR's graphs, give in arithmetic what an `int` gives."""
    n = counts.OwnNodeCount(5, 15)
    assert [1.0 / n, n * 0.5, n**0.5, n**-1, n // 2, 7 % n, -n, n >> 1, n & 4, round(n)] == [
        0.2, 2.5, 5**0.5, 0.2, 2, 2, -5, 2, 4, 5,
    ]  # fmt: skip
    assert divmod(n, 2) == (2, 1) and float(n) == 5.0 and n * 10**30 == 5 * 10**30
    for quotient in (lambda: 1 / counts.OwnNodeCount(0, 15), lambda: n // 0):
        with pytest.raises(ZeroDivisionError):
            quotient()
