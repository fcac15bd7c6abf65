"""A model, optimizers and a training loop whose state is saved and loaded."""

import torch
from torch import nn

from shardpass.core.training import sync_gradients, sync_parameters

OPTIMIZERS = {
    "adam": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, amsgrad=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.05),
    "rprop": lambda parameters: torch.optim.Rprop(parameters, lr=0.05),
}


class Net(nn.Module):
    def __init__(self, width=4, dtype=torch.float64):
        super().__init__()
        self.first = nn.Linear(3, width, dtype=dtype)
        self.norm = nn.BatchNorm1d(width, dtype=dtype)
        self.last = nn.Linear(width, width, dtype=dtype)
        self.tied = self.last.weight
        self.scale = nn.Parameter(torch.ones(2, dtype=dtype))
        self.register_buffer("flag", torch.tensor(True))
        generator = torch.Generator().manual_seed(0)  # the same on every rank
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5, generator=generator)

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x)))) * self.scale.sum()


def train(model, optimizer, comm, steps):
    rows = torch.arange(12.0, dtype=torch.float64).view(4, 3).sin()
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(rows) ** 2).sum() / comm.size
        loss.backward()
        sync_gradients(model, comm)
        optimizer.step()
        losses.append(loss.item() * comm.size)
    return losses


def begin(comm, optimizer="adam"):
    model = Net()
    sync_parameters(model, comm)
    return model, OPTIMIZERS[optimizer](model.parameters())
