"""The steps of formulas, in torch."""

import torch

STEPS = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "select": lambda x, a, b: torch.where(x <= 0, b, a),
    "positive": lambda x, a, b: torch.where(x > 0, a, b),
    "tied": lambda a, b, c: torch.where(a == b, c, 0.0),
    "at_least": lambda x, low: torch.where(x.isnan(), x, torch.where(x < low, low, x)),
    "at_most": lambda x, high: torch.where(x.isnan(), x, torch.where(x > high, high, x)),
    "softplus": lambda x, y: torch.where(x > 20, x, y),
    "detach": lambda x: x,
    "neg": torch.neg,
    "abs": torch.abs,
    "exp": torch.exp,
    "log": torch.log,
    "log1p": torch.log1p,
    "sqrt": torch.sqrt,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}
