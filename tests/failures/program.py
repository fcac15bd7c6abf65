"""Training as a script of one rank, for real launchers: ``python program.py <fault> <token>``. STORE is the store."""

import os
import signal
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
    if what in ("too many expected", "alone"):
        fault()
    comm = sp.connect(ranks=5 if what == "too many expected" else None)
    if what == "divergences":  # each ends its own communicator only, so that one launch can show several
        for one in ("skip", "no backward", "sync twice"):
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
        x = graph.x
        if guilty:
            misbehave(what, model)
        if guilty and what == "width":
            x = x[:, :4]
        loss = sp.cross_entropy(model(x, graph), graph.y, graph.train_mask, comm)
        optimizer.zero_grad()
        if not (guilty and what == "no backward"):
            loss.backward()
        sp.sync_gradients(model, comm)
        if guilty and what == "sync twice":
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
    first, second = model.convs
    if what == "kill":  # while the others are in the second layer
        second.register_forward_pre_hook(kill)
    if what == "kill in backward":
        first.register_forward_hook(lambda m, a, out: out.register_hook(kill) and None)
    if what == "raise":
        first.register_forward_hook(lambda m, a, out: out.register_hook(boo) and None)
    if what == "skip":
        second.forward = lambda x, *_, **__: x[:, : second.out_channels]


def kill(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def boo(_: torch.Tensor) -> None:
    raise ValueError("boo")


if __name__ == "__main__":
    main(sys.argv[1])
