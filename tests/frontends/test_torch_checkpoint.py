"""torch.distributed.checkpoint of a wrapped model and its optimizer, as docs/recipes.md writes it."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

pytest.importorskip("torch_geometric")

from torch_geometric.nn import GCN

import shardpass as sp
from shardpass.errors import RefusedError

RING = torch.stack([torch.arange(10), (torch.arange(10) + 1) % 10])
RING_GRAPH = {"edge_index": RING, "x": torch.arange(40.0).view(10, 4) / 40, "y": torch.arange(10) % 2}


class Net(torch.nn.Module):
    def __init__(self, graph, has_table):
        super().__init__()
        self.table = sp.NodeEmbedding(graph, 4) if has_table else None
        self.gnn = GCN(4, 4, 2, 2)

    def forward(self, x, edge_index):
        return self.gnn(x if self.table is None else self.table(), edge_index)


class Run:
    def __init__(self, comm, has_table=False):
        self.comm, self.graph = comm, sp.shard(RING_GRAPH, comm)
        torch.manual_seed(0)
        self.model = sp.pyg.wrap(Net(self.graph, has_table), comm)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)

    def step(self):
        out = self.model(self.graph.x, self.graph.edge_index)
        loss = sp.cross_entropy(out, self.graph.y, None, self.comm)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def save(self, path):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)

    def load(self, path):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=path)
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)


def saved(comm, path):
    """The losses of two steps after the checkpoint, without a break and with one."""
    run = Run(comm)
    run.step()
    run.step()
    run.save(path)
    expected = [run.step(), run.step()]
    return expected, resumed(comm, path)


def resumed(comm, path):
    run = Run(comm)
    run.load(path)
    return [run.step(), run.step()]


def tables(comm, path):
    """By how much own rows differ from those saved with our checkpoint, and what torch's says."""
    run = Run(comm, has_table=True)
    run.step()
    rows = run.model.table.weight.detach().clone()
    run.save(path)
    sp.save_checkpoint(f"{path}.ckpt", comm, run.model, run.optimizer, graph=run.graph)
    run.step()
    sp.load_checkpoint(f"{path}.ckpt", comm, run.model, graph=run.graph)
    differs = (run.model.table.weight - rows).abs().max().item()
    try:
        run.load(path)
    except RefusedError as error:
        return differs, str(error)
    return differs, ""


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_next_steps_are_those_without_a_break(tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    found = sp.spawn(saved, 2, "processes", args=(path,))
    expected = found[0][0]
    assert [after for _, after in found] == [expected, expected]
    assert resumed(sp.connect(), path) == pytest.approx(expected, abs=1e-6), "on another number of ranks"


@pytest.mark.long
@pytest.mark.processes
def test_a_table_with_rows_of_each_rank_wants_our_checkpoint(tmp_path: Path) -> None:
    """torch takes one name for one tensor, so it keeps the rows of one rank."""
    found = sp.spawn(tables, 2, "processes", args=(str(tmp_path / "checkpoint"),))
    assert [differs for differs, _ in found] == [0, 0]
    assert any("of other 'node' nodes than this rank has" in words for _, words in found)


def test_the_rows_of_another_partition_are_refused() -> None:
    table = sp.NodeEmbedding(sp.shard(RING_GRAPH), 4)
    sp.NodeEmbedding(sp.shard(RING_GRAPH), 4).load_state_dict(table.state_dict())
    other = {"weight": table.weight.detach() + 1}
    sp.NodeEmbedding(sp.shard(RING_GRAPH), 4).load_state_dict(other)
    with pytest.raises(RuntimeError, match="Missing key"):
        sp.NodeEmbedding(sp.shard(RING_GRAPH), 4).load_state_dict({})
    with pytest.raises(RuntimeError, match="_extra_state"):
        torch.nn.Embedding(10, 4).load_state_dict(table.state_dict())
    of_others = sp.NodeEmbedding(sp.shard({"edge_index": RING, "num_nodes": 12}), 4)
    assert of_others.get_extra_state() != table.get_extra_state()
