"""Train a wrapped model by Lightning's Trainer, on one rank or on several: pip install lightning

    python examples/lightning_trainer.py
    mpirun -n 4 python examples/lightning_trainer.py

Each rank runs a Trainer of its own with one device. Lightning knows of no other rank: shardpass connects them.
"""

import lightning
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch_geometric.nn import GAT

import shardpass as sp
from shardpass.cli.graphs import digits


class Digits(lightning.LightningModule):
    def __init__(self, graph):
        super().__init__()
        self.graph, self.comm = graph, graph.comm
        with sp.seed(0, self.comm):
            model = GAT(graph.num_features, 64, num_layers=2, out_channels=graph.num_classes, heads=8)
        self.model = sp.pyg.wrap(model, self.comm)

    def training_step(self, batch):
        logits = self.model(self.graph.x, self.graph)
        return sp.cross_entropy(logits, self.graph.y, self.graph.train_mask, self.comm)

    def test_step(self, batch):
        logits = self.model(self.graph.x, self.graph)
        self.log("accuracy", sp.accuracy(logits, self.graph.y, self.graph.test_mask, self.comm))  # that of all ranks

    def configure_optimizers(self):
        return torch.optim.Adam(self.model.parameters(), lr=0.01)


def main():
    torch.set_num_threads(1)
    comm = sp.connect()
    if comm.rank == 0:
        sp.partition(digits(), "lightning-parts", parts=4, overwrite=True)
    comm.barrier()
    module = Digits(sp.load("lightning-parts", comm))
    step = torch.utils.data.DataLoader([0])  # an epoch is one step on the whole graph
    trainer = lightning.Trainer(
        max_epochs=40, accelerator="cpu", devices=1, plugins=[LightningEnvironment()],  # this rank alone
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, step)
    (found,) = trainer.test(module, step, verbose=False)
    if comm.rank == 0:
        print(f"test accuracy {found['accuracy']:.4f} on {comm.size} rank(s)")


if __name__ == "__main__":
    main()
