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

Every rank runs every line, on the nodes that it owns. The numbers are those of one process with the whole graph. With
--checkpoint run.ckpt, the run is written to that file after each epoch; with --resume too, it goes on from there, on
any number of ranks.
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


def exists(file, comm):
    """Whether rank 0 finds the file; the same answer on every rank."""
    return bool(file) and comm.all_gather_object(os.path.exists(file))[0]


def train(comm, options):
    """The program of one rank. Returns the accuracy on test nodes of the model that was best on validation nodes."""
    graph = sp.load(options.store, comm)  # own nodes: $x, $y, ...
    classes = $classes
    with sp.seed(options.seed, comm):  # the same first parameters on every rank
        model = Net($channels, options.hidden, classes)
    model = sp.$frontend.wrap(model, comm)
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)

    epoch, waited, best = 0, 0, (0, 0.0, 0.0)  # epoch, validation accuracy and test accuracy
    given = [options.hidden, options.lr, options.seed]  # a run that goes on keeps these
    if not options.resume and (exists(options.checkpoint, comm) or exists(options.best, comm)):
        raise SystemExit("--checkpoint or --best is there already: --resume goes on with it; or give another name")
    if options.resume and exists(options.checkpoint, comm):
        found = sp.load_checkpoint(options.checkpoint, comm, model, optimizer, graph=graph)
        epoch, (before, waited, best) = found["epoch"], found["extra"]
        if before != given or epoch > options.epochs:
            raise SystemExit(f"{options.checkpoint} has {epoch} epochs with hidden, lr, seed = {before}: not as asked")
    while epoch < options.epochs and waited < options.patience:
        epoch, waited = epoch + 1, waited + 1
        loss = step(model, optimizer, graph, comm)
        val = evaluate(model, graph, graph.val_mask, comm)
        if val > best[1]:  # the same on every rank: `best` and `val` are
            best, waited = (epoch, val, evaluate(model, graph, graph.test_mask, comm)), 0
            if options.best:
                sp.save_checkpoint(options.best, comm, model, epoch=epoch, graph=graph)  # every rank must call it
        if options.checkpoint:
            extra = [given, waited, best]
            sp.save_checkpoint(options.checkpoint, comm, model, optimizer, epoch=epoch, graph=graph, extra=extra)
        if comm.rank == 0 and epoch % 10 == 0:  # print alone: losses and metrics are made by all ranks together
            print(f"epoch {epoch}: loss {loss:.4f}, validation accuracy {val:.4f}", flush=True)

    best_epoch, val, test = best
    if comm.rank == 0:
        print(f"{epoch} epochs on {comm.size} rank(s); best at epoch {best_epoch}:", end=" ")
        print(f"validation accuracy {val:.4f}, test accuracy {test:.4f}")
    return test


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("store", help="a directory that `shardpass partition` wrote")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--patience", type=int, default=20, help="epochs without a better validation accuracy")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", default="", help="the file to write while training")
    parser.add_argument("--resume", action="store_true", help="go on from --checkpoint, if it is there")
    parser.add_argument("--best", default="", help="the file for the parameters of the best epoch")
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
