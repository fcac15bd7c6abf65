"""`shardpass new`: a training script with comments, for PyG or for DGL, as a place to start from."""

from __future__ import annotations

import shlex
from pathlib import Path
from string import Template

from shardpass.cli.launch import typed_command
from shardpass.core.ranks import prepare_target

_WORDS = {
    "library": ("PyG", "DGL"),
    "package": ("torch_geometric", "dgl"),
    "frontend": ("pyg", "dgl"),
    "how": ("", ', "mean"'),
    "inputs": ("x, edge_index", "g, x"),
    "hidden": ("h, edge_index", "g, h"),
    "call": ("model(graph.x, graph.edge_index)", "model(graph, graph.node[FEATURES])"),
    "names": ("", """
FEATURES, LABELS = "x", "y"  # fields of the demo; many graphs of DGL have "feat" and "label" instead
"""),
    "x": ("graph.x", "graph.node[FEATURES]"),
    "y": ("graph.y", "graph.node[LABELS]"),
    "channels": ("graph.num_features", "graph.node[FEATURES].size(1)"),
    "classes": ("graph.num_classes", "1 + max(comm.all_gather_object(int(graph.node[LABELS].max())))"),
}  # fmt: skip
"""What the script says for PyG, and for DGL."""
_SCRIPT = '''\
"""Train a $library model on a whole graph, on one rank or on several.

    $command partition demo:powerlaw:5000 parts    # once; instead of demo:... give your own graph
    python $file parts
    torchrun --nproc-per-node 2 $file parts
    mpirun -n 2 python $file parts

Every rank runs every line, on the nodes that it owns. The numbers are those of one process with the whole graph. A run
that was ended goes on from run.ckpt, on any number of ranks; remove that file to begin again.
"""

import argparse
import os

import torch
from $package.nn import SAGEConv

import shardpass as sp
$names

class Net(torch.nn.Module):
    """An ordinary $library model. Put your own here: it needs no change."""

    def __init__(self, channels, hidden, classes):
        super().__init__()
        self.first = SAGEConv(channels, hidden$how)
        self.second = SAGEConv(hidden, classes$how)
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, $inputs):
        h = self.dropout(self.first($inputs).relu())
        return self.second($hidden)


def step(model, optimizer, graph, comm):
    """Train on the whole graph once; the loss over all training nodes."""
    model.train()
    out = $call  # a row for each own node
    loss = sp.cross_entropy(out, $y, graph.train_mask, comm)  # the mean over all ranks
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def evaluate(model, graph, mask, comm):
    """The accuracy over the nodes of all ranks in `mask`; the same number on every rank."""
    model.eval()
    return sp.accuracy($call, $y, mask, comm)


def train(comm, options):
    """The program of one rank. Returns the accuracy on test nodes of the model that was best on validation nodes."""
    graph = sp.load(options.store, comm)  # own nodes: $x, $y, ...
    classes = $classes
    with sp.seed(options.seed, comm):  # the same first parameters on every rank
        model = Net($channels, options.hidden, classes)
    model = sp.$frontend.wrap(model, comm)
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)

    epoch, best, waited = 0, -1.0, 0
    if comm.all_gather_object(os.path.exists("run.ckpt"))[0]:  # rank 0 looks, so that all ranks decide alike
        found = sp.load_checkpoint("run.ckpt", comm, model, optimizer, graph=graph)
        epoch, (best, waited) = found["epoch"], found["extra"]
    while epoch < options.epochs and waited < options.patience:
        epoch += 1
        loss = step(model, optimizer, graph, comm)
        val = evaluate(model, graph, graph.val_mask, comm)
        waited += 1
        if val > best:  # the same on every rank: `best` and `val` are
            best, waited = val, 0
            sp.save_checkpoint("best.ckpt", comm, model, epoch=epoch, graph=graph)  # every rank must call it
        sp.save_checkpoint("run.ckpt", comm, model, optimizer, epoch=epoch, graph=graph, extra=[best, waited])
        if comm.rank == 0 and epoch % 10 == 0:  # print alone: losses and metrics are made by all ranks together
            print(f"epoch {epoch}: loss {loss:.4f}, validation accuracy {val:.4f}", flush=True)

    best_epoch = sp.load_checkpoint("best.ckpt", comm, model, graph=graph)["epoch"]
    test = evaluate(model, graph, graph.test_mask, comm)
    if comm.rank == 0:
        print(f"{epoch} epochs on {comm.size} rank(s); best at epoch {best_epoch}:", end=" ")
        print(f"validation accuracy {best:.4f}, test accuracy {test:.4f}")
    return test


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("store", help="a directory that `shardpass partition` wrote")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--patience", type=int, default=20, help="epochs without a better validation accuracy")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    train(sp.connect(), parser.parse_args())
'''


def write_script(file: Path, uses_dgl: bool) -> str:
    """Write the script, and return what to type next."""
    if file.exists():
        raise ValueError(f"{file} is there already, and new does not overwrite: give another name, or remove it")
    prepare_target(file)
    command, name = typed_command(), shlex.quote(str(file))
    words = {word: pair[uses_dgl] for word, pair in _WORDS.items()}
    text = Template(_SCRIPT).substitute(words, command="shardpass", file=file.name)
    file.write_text(text, encoding="utf-8")
    return f"wrote {file}. Next:\n  {command} partition demo:powerlaw:5000 parts\n  python {name} parts"
