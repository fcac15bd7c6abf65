"""Training as a script of one rank, for real launchers: ``python program.py <fault> <token>``. STORE is the store."""

import os
import sys
import time
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parents[2])]

import shardpass as sp  # noqa: E402
from shardpass.errors import DivergenceError  # noqa: E402


def fault() -> None:
    """Note the time: the last of these lines is when it happened."""
    print(f"fault at {time.time():.3f}", flush=True)


def main(what: str) -> None:
    torch.set_num_threads(1)
    if what == "alone":
        fault()
    comm = sp.connect()
    if what == "divergences":  # each ends its own communicator only, so that one launch can show several
        for one in ("skip", "no backward"):
            try:
                train(comm.duplicate(one), one)
            except DivergenceError as error:
                print(f"{one} on rank {comm.rank} after {time.time() - fault.at:.1f} s: {error}", flush=True)
    else:
        train(comm, what)
    print(f"rank {comm.rank} is done", flush=True)


def train(comm: sp.Communicator, what: str) -> None:
    from torch_geometric.nn.models import GCN  # a rank that never gets here need not wait for it

    graph = sp.load(os.environ["STORE"], comm)
    torch.manual_seed(0)
    model = sp.pyg.wrap(GCN(graph.num_features, 8, 2, graph.num_classes), comm)
    optimizer = torch.optim.Adam(model.parameters())
    epochs = 2 if what == "slow, then fewer epochs" and comm.rank == 1 else 3
    fault.at = time.time()
    for epoch in range(epochs):
        guilty = comm.rank == 1 and epoch == 1
        if guilty:
            misbehave(what, model)
        loss = sp.cross_entropy(model(graph.x, graph), graph.y, graph.train_mask, comm)
        optimizer.zero_grad()
        if not (guilty and what == "no backward"):
            loss.backward()
        sp.sync_gradients(model, comm)
        optimizer.step()
        fault.at = time.time()
        print(f"rank {comm.rank} has done epoch {epoch}", flush=True)
    if epochs == 2:
        fault()


def misbehave(what: str, model: torch.nn.Module) -> None:
    if what.startswith("slow"):
        time.sleep(float(os.environ["SLOW_SECONDS"]))
    fault()
    if what == "skip":
        second = model.convs[1]
        second.forward = lambda x, *_, **__: x[:, : second.out_channels]


if __name__ == "__main__":
    main(sys.argv[1])
