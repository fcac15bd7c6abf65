"""Which tensors go to Triton's kernels, and that nothing else does."""

import subprocess
import sys
from functools import partial

import pytest
import torch

from shardpass.core import kernels
from shardpass.core.kernels import gpu, optional_module

FINDERS = [partial(gpu.triton_for, what) for what in ("sums", "extremum", "attention")]


def test_tensors_of_the_cpu_go_elsewhere():
    """Also where the environment asks for Triton's interpreter."""
    rows = torch.ones(2, 3)
    assert all(find(rows) is None for find in FINDERS)
    assert gpu.is_compiled_for(torch.device("cuda", 1)) and not gpu.is_compiled_for(torch.device("meta"))


def test_which_dtypes(triton_dispatch):
    rows = torch.ones(2, 3, device=triton_dispatch)
    for dtype in gpu.DTYPES:
        assert gpu.triton_for("sums", rows, None, rows.to(dtype)) is not None
    assert gpu.triton_for("attention", rows, None, rows) is not None
    assert gpu.triton_for("attention", rows, rows.double()) is None
    assert gpu.triton_for("sums", rows, rows.long()) is None
    assert gpu.triton_for("sums", rows, rows.to("meta")) is None


def test_the_switch(triton_dispatch, monkeypatch):
    rows = torch.ones(2, 3, device=triton_dispatch)
    monkeypatch.setenv("SHARDPASS_TRITON", "0")
    assert all(find(rows) is None for find in FINDERS)
    monkeypatch.setenv("SHARDPASS_TRITON", "1")
    assert all(find(rows) is not None for find in FINDERS)


def test_without_triton_torch_does_it(triton_dispatch, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(gpu, "optional_module", optional_module.__wrapped__)  # what is installed is looked up once
    for name in ("triton_sums", "triton_extremum", "triton_attention"):
        monkeypatch.delattr(kernels, name, raising=False)
        monkeypatch.delitem(sys.modules, f"shardpass.core.kernels.{name}", raising=False)
    rows = torch.ones(2, 3, device=triton_dispatch)
    assert all(find(rows) is None for find in FINDERS)


def test_tensors_of_the_cpu_do_not_import_triton():
    pytest.importorskip("triton")
    code = """
import sys, torch
from shardpass.core import kernels
from shardpass.core.sharding.shard import Block, build_shards
shard = build_shards(torch.tensor([0, 1]), torch.tensor([1, 1]), [Block(0, 0, 2)], 2).shards[0]
out = torch.empty(2, 3)
kernels.gather_sum(out, shard, torch.ones(2, 3), None, fresh=True)
kernels.edge_dot(shard, out, out, 5, 3)
print("triton" in sys.modules, out.tolist())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=480)
    assert done.stdout.strip() == "False [[0.0, 0.0, 0.0], [2.0, 2.0, 2.0]]", done.stderr
