"""Offloaded saved tensors: the same bits, in a file that goes with the graph."""

import errno
import gc
import os
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardpass as sp
from shardpass.core.memory import offloading as module
from shardpass.core.memory import scratch_file


def gradients(model, x, context, **backward):
    model.zero_grad()
    with context:
        loss = model(x).square().mean()
    loss.backward(**backward)
    return [parameter.grad.clone() for parameter in model.parameters()], loss


class Net(nn.Module):
    """Saves one tensor for several nodes, masks, views, an expanded and an in-place changed tensor."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        h = self.a(x)
        h = F.dropout(F.relu_(h), 0.5, self.training)
        h = self.b(h) * self.c(h).sum(1, keepdim=True) + torch.sigmoid(h).t().contiguous().t()
        return self.c(h * h.sum(0)) / x.new_ones(1).expand(x.size(0), 4)


class Nothing:
    def __enter__(self):
        pass

    def __exit__(self, *_):
        pass


def counted(monkeypatch):
    """``(written, mapped)`` bytes so far, as lists."""
    written, mapped = [], []
    write, view = scratch_file.ScratchFile.write, scratch_file.Range.map

    def count_write(self, host):
        written.append(host.numel() * host.itemsize)
        return write(self, host)

    def count_map(self, *args, **kwargs):
        tensor = view(self, *args, **kwargs)
        mapped.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr(scratch_file.ScratchFile, "write", count_write)
    monkeypatch.setattr(scratch_file.Range, "map", count_map)
    return written, mapped


@pytest.mark.parametrize("read_ahead", [0, 1, 5])
def test_the_same_bits(read_ahead, tmp_path, monkeypatch):
    written, mapped = counted(monkeypatch)
    model, x = Net(), torch.randn(64, 8)
    torch.manual_seed(3)
    expected, _ = gradients(model, x, Nothing())
    torch.manual_seed(3)
    found, _ = gradients(model, x, sp.offload(tmp_path, min_bytes=64, read_ahead=read_ahead))
    assert all(torch.equal(a, b) for a, b in zip(expected, found))
    assert len(written) > 5 and sum(mapped) >= sum(written)
    assert os.listdir(tmp_path) == []  # the file never has a name


def test_backward_twice(tmp_path):
    model, x = Net().eval(), torch.randn(64, 8)
    expected, _ = gradients(model, x, Nothing())
    found, loss = gradients(model, x, sp.offload(tmp_path, min_bytes=64), retain_graph=True)
    model.zero_grad()
    loss.backward()
    assert all(torch.equal(a, p.grad) and torch.equal(a, b) for a, b, p in zip(expected, found, model.parameters()))


def test_a_tensor_of_several_nodes_is_written_once_and_parameters_and_small_ones_never(tmp_path, monkeypatch):
    written, _ = counted(monkeypatch)
    x, weight = torch.randn(32, 32, requires_grad=True), nn.Parameter(torch.randn(32, 32))
    with sp.offload(tmp_path, min_bytes=32 * 32 * 4):
        h = x * 2  # saves no tensor
        out = (h * weight).sum() + (h @ weight.t()).sum() + (h[:4] * h[:4]).sum()
    assert written == [32 * 32 * 4]
    out.backward()


def test_memory_is_given_back(tmp_path):
    """What the graph holds between forward and backward is not in memory."""
    alive = []
    with sp.offload(tmp_path, min_bytes=64):
        h = torch.randn(100, 10, requires_grad=True)
        for _ in range(5):
            h = torch.tanh(h * 1)
            alive.append(torch.multiprocessing.reductions.StorageWeakRef(h.untyped_storage()))
    gc.collect()
    assert [reference.expired() for reference in alive] == [True] * 4 + [False]  # the last is in hand
    h.sum().backward()


def test_changed_later_is_what_it_was(tmp_path):
    x = torch.randn(50, 4, requires_grad=True)
    with sp.offload(tmp_path, min_bytes=8):
        h = x * 1
        out = (h * h).sum()
        h.detach().zero_()  # plain autograd would refuse backward
        again = (h * h).sum()
    (out + again).backward()
    assert torch.equal(x.grad, 2 * x.detach())


@pytest.mark.parametrize("what", ["parameter", "small", "result"])
def test_a_tensor_left_in_memory_that_was_changed_is_told(what, tmp_path):
    weight, x = nn.Parameter(torch.randn(50, 4)), torch.randn(50, 4, requires_grad=True)
    with sp.offload(tmp_path):
        h = torch.exp(x * 1)
        out = (h * weight).sum() if what != "result" else h.sum()
    with torch.no_grad():
        (weight if what == "parameter" else h).add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: .*\[50, 4\].*sp.offload"):
        out.backward()


def test_address_that_is_used_again(tmp_path):
    x = torch.randn(1000, 4, dtype=torch.float64, requires_grad=True)
    total, expected = 0, torch.zeros_like(x)
    with sp.offload(tmp_path, min_bytes=8):
        for k in range(20):  # each factor is gone when the next is made, often at the same address
            factor = torch.full_like(x, float(k)).detach()
            total = total + (x * factor).sum()
            expected += k
            del factor
    total.backward()
    assert torch.equal(x.grad, expected)


def test_mapped_files_are_left_alone(tmp_path, monkeypatch):
    written, _ = counted(monkeypatch)
    np.save(tmp_path / "x.npy", np.random.default_rng(0).standard_normal((512, 32), dtype=np.float32))
    x = torch.from_numpy(np.load(tmp_path / "x.npy", mmap_mode="c"))
    weight = nn.Parameter(torch.randn(4, 32))
    with sp.offload(tmp_path / "scratch", min_bytes=1024):
        out = F.linear(x, weight).sum()
    out.backward()
    assert written == []


def test_a_full_disk_is_told(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    x = torch.randn(50, 4, requires_grad=True)
    with pytest.raises(OSError, match="Pass a folder on a disk with more room"), sp.offload(tmp_path, min_bytes=8):
        torch.tanh(x * 1).sum()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"read_ahead": -1}, "read_ahead must be an integer of at least 0, found -1"),
        ({"min_bytes": "1MiB"}, "min_bytes must be an integer of at least 1, found '1MiB'"),
        ({"directory": nn.Linear(1, 1)}, "directory must be the path of a folder, found Linear"),
        ({"directory": __file__}, "test_offload.py is a file; pass the path of a folder"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused(arguments, words):
    with pytest.raises((ValueError, TypeError, OSError), match=words), sp.offload(**arguments):
        pass


class Known(torch.autograd.Function):
    """``sum(x * g)``, of whose gradient backward returns the tensor that was saved."""

    @staticmethod
    def forward(ctx, x, g):
        ctx.save_for_backward(g)
        return (x * g).sum()

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0], None


@pytest.mark.parametrize("copies", [False, True], ids=["mapped", "copied, as to a GPU"])
def test_a_saved_tensor_that_is_returned_as_a_gradient(copies, tmp_path, monkeypatch):
    """Autograd adds to a gradient in place if nobody else seems to have it."""
    found, mapped = [], scratch_file.Range.map

    def copied(self, shape, dtype):
        return mapped(self, shape, dtype).clone()

    if copies:
        monkeypatch.setattr(scratch_file.Range, "map", copied)
    for context in (Nothing(), sp.offload(tmp_path, min_bytes=1)):
        x = torch.ones(100, 8, requires_grad=True)
        with context:
            g, h = torch.arange(800.0).view(100, 8), x * 2
            loss = (h * g).sum() + (h * 3).sum() + Known.apply(h, g)
        loss.backward()
        found.append(x.grad)
    assert torch.equal(*found)


def test_tensors_come_back_as_they_lay_in_memory(tmp_path):
    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sum()

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            strides.append(x.stride())
            return grad * x

    strides = []
    for x in (torch.randn(3, 4, 5).permute(2, 0, 1), torch.randn(6, 4)[:, :2], torch.tensor(3.0)):
        x = x.requires_grad_()
        with sp.offload(tmp_path, min_bytes=1):
            total = Looks.apply(x)
        total.backward()
        assert torch.equal(x.grad, x)
    assert strides == [(1, 20, 5), (2, 1), ()]


def test_within_checkpoint_and_around_it(tmp_path):
    from torch.utils.checkpoint import checkpoint

    model, x = Net().eval(), torch.randn(64, 8)
    expected, _ = gradients(model, x, Nothing())
    model.zero_grad()
    with sp.offload(tmp_path, min_bytes=64):
        checkpoint(model, x, use_reentrant=False).square().mean().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(expected, model.parameters()))


def test_the_file_goes_with_the_last_tensor_and_its_places_are_used_again(tmp_path, monkeypatch):
    files, ends = [], []
    monkeypatch.setattr(
        module, "ScratchFile", lambda folder: files.append(scratch_file.ScratchFile(folder)) or files[0]
    )
    x = torch.randn(64, 16, requires_grad=True)
    with sp.offload(tmp_path, min_bytes=64):
        for _ in range(5):
            h = torch.tanh(x * 1)
            out = (h * h).sum()
            del h
            ends.append(files[0]._end)
    assert ends == [4096, *[8192] * 4]  # the graph of one pass ends when that of the next one is there
    gone = weakref.ref(files.pop())
    out.backward()
    del out
    gc.collect()
    assert gone() is None


def test_conjugates_that_share_their_memory_are_told_apart(tmp_path):
    x = torch.randn(64, 4, dtype=torch.complex128, requires_grad=True)
    found = []
    for context in (Nothing(), sp.offload(tmp_path, min_bytes=8)):
        x.grad = None
        with context:
            h = x * 1
            out = (h * h).sum() + (h.conj() * h.conj() * 2j).sum() + (h.conj().imag * h.real).sum()
        out.abs().backward()
        found.append(x.grad)
    assert torch.equal(*found)


def test_tensors_of_a_gpu_go_to_cpu_memory_where_no_folder_is_named(tmp_path, monkeypatch):
    """Here every tensor passes for one of a GPU."""
    monkeypatch.setattr(module, "_is_on_gpu", lambda tensor: True)
    written, _ = counted(monkeypatch)
    model, x = Net().eval(), torch.randn(64, 8)
    expected, _ = gradients(model, x, Nothing())
    for folder, is_written in ((None, False), (tmp_path, True)):
        found, _ = gradients(model, x, sp.offload(folder, min_bytes=64))
        assert all(torch.equal(a, b) for a, b in zip(expected, found)) and bool(written) == is_written


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("to_file", [False, True])
def test_on_a_gpu(to_file, tmp_path):
    model, x = Net().eval().cuda(), torch.randn(64, 8, device="cuda")
    expected, _ = gradients(model, x, Nothing())
    found, _ = gradients(model, x, sp.offload(tmp_path if to_file else None, min_bytes=64))
    assert all(torch.equal(a, b) for a, b in zip(expected, found))
