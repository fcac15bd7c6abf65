"""offload(outputs_of=model): what a forward holds between layers lies in the file; the same bits, and what stays."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardpass as sp
from shardpass.core.memory import offloading as module


class Held(nn.Module):
    """Holds outputs of layers and of functions, of a buffer too; changes one in place, and skips layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))
        self.act, self.last = nn.ReLU(), nn.Linear(16, 4)
        self.register_buffer("shift", torch.randn(64, 16))
        self.seen: list[list[str]] = []

    def forward(self, x):
        start, early = x, self.layers[0](self.shift)
        held = [early]
        for number, layer in enumerate(self.layers):
            x = layer(x)
            x = self.act(x.add_(1)) if number % 2 else F.dropout(torch.tanh(x), 0.3, self.training)
            held.append(x)
        early.mul_(2)
        self.seen.append(["file" if module._is_mapped(t) else "memory" for t in [*held, start, self.shift]])
        return self.last(torch.stack(held).sum(0) + start)


@pytest.mark.parametrize("grad", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_outputs_of_layers_are_held_in_the_file(grad, tmp_path):
    model, x = Held(), torch.randn(64, 16)
    found = []
    for context in (nullcontext(), sp.offload(tmp_path), sp.offload(tmp_path, min_bytes=64, outputs_of=model)):
        torch.manual_seed(3)
        model.zero_grad()
        with context, grad():
            out = model(x)
        if out.requires_grad:
            out.square().sum().backward()
        found.append([out.detach(), *(p.grad for p in model.parameters() if out.requires_grad)])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    assert model.seen == [["memory"] * 8, ["memory"] * 8, ["file"] * 4 + ["memory"] * 4]
    assert not module._is_mapped(x) and not any(layer._forward_hooks for layer in model.modules())


class Keeps(nn.Module):
    """Does `between` with the first layer's output, which the third saves for backward when the second is done."""

    def __init__(self, first, between=lambda h: None):
        super().__init__()
        self.first, self.second, self.third, self.between = first, nn.Linear(16, 16), nn.Linear(16, 16), between

    def forward(self, x):
        h = self.first(x * 1)
        self.between(h)
        return self.second(x) + self.third(h), h


@pytest.mark.parametrize("first", [nn.Tanh(), nn.Linear(16, 16)])
def test_an_output_in_the_file_that_is_changed_after_it_was_saved_is_told(first, tmp_path):
    model, x = Keeps(first), torch.randn(64, 16, requires_grad=True)
    with sp.offload(tmp_path, min_bytes=64, outputs_of=model):
        out, h = model(x)
    assert module._is_mapped(h)
    with torch.no_grad():
        h.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: .*\[64, 16\].*sp.offload"):
        out.sum().backward()


@pytest.mark.parametrize(
    "shares", [lambda h: h[:2], lambda h: h.detach(), lambda h: h.t(), lambda h: torch.from_numpy(h.detach().numpy())]
)
def test_an_output_that_shares_its_memory_stays(shares, tmp_path):
    held = []
    model, x = Keeps(nn.Linear(16, 16), lambda h: held.append(shares(h))), torch.randn(64, 16)
    with sp.offload(tmp_path, min_bytes=64, outputs_of=model):
        _, h = model(x)
    assert not module._is_mapped(h) and held[0].data_ptr() == h.data_ptr()
    with torch.no_grad():
        held[0].zero_()
    assert not h[:2].any()


def test_what_the_model_is_given_in_an_object_stays(tmp_path):
    class Batch:
        def __init__(self):
            self.fields = {"x": torch.randn(64, 16)}

    class Reads(Keeps):
        def forward(self, batch):
            h = self.first(batch.fields["x"])
            return self.second(h), h

    model, batch = Reads(nn.Linear(16, 16)), Batch()
    with sp.offload(tmp_path, min_bytes=64, outputs_of=model), torch.no_grad():
        model(batch)
    assert not module._is_mapped(batch.fields["x"])


class Conjugate(nn.Module):
    def forward(self, x):
        return (x * 1).conj()


def test_a_conjugate_is_not_moved(tmp_path):
    model, x = nn.ModuleList([Conjugate(), nn.Identity()]), torch.randn(64, 4, dtype=torch.complex128)
    with torch.inference_mode(), sp.offload(tmp_path, min_bytes=8, outputs_of=model):
        h = model[0](x)
        model[1](x)
        assert h.is_conj() and not module._is_mapped(h)
    assert torch.equal(h, x.conj())


def test_a_tensor_of_inference_mode_is_moved_there_only(tmp_path):
    model, x = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), torch.randn(64, 4)
    with sp.offload(tmp_path, min_bytes=8, outputs_of=model):
        with torch.inference_mode():
            h = model[0](x)
        model[1](x)
        assert not module._is_mapped(h)
        with torch.inference_mode():
            model[1](x)
        assert module._is_mapped(h)
