"""Training of a layer for six epochs, alone or on ranks."""

import torch

EPOCHS = 6


def trained(model, call, inputs, graph, sync=lambda: None):
    """The loss of each epoch, as a share of the whole graph's, with plain gradient descent."""
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.01), []
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        out = call(model, inputs, graph)
        out = out[0] if isinstance(out, tuple) else out
        parts = out.values() if isinstance(out, dict) else [out]
        loss = sum(part.tanh().square().sum() for part in parts)
        if loss.requires_grad:
            loss.backward()
        sync()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)
