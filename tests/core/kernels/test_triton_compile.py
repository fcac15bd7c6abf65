"""Triton's kernels compile for a GPU, down to its machine code: the interpreter takes more than the compiler does.

None adds atomically, so that every run gives the same bits.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardpass.core import kernels

COMPILE = r"""
import re
import sys
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from shardpass.core.kernels import triton_attention
from shardpass.core.kernels import triton_extremum
from shardpass.core.kernels import triton_sums

INDICES, BOUNDS = ("indptr", "columns", "order"), ("start", "stop", "low", "high")
COUNTS, WIDE = ("heads", "width", "channels", "num_channels"), ("mix_sums",)


def compiled(kernel, dtype, index, **constants):
    wide = "fp64" if dtype == "fp64" else "fp32"
    constants |= {"ACC": tl.float64 if wide == "fp64" else tl.float32, "BLOCK_E": 16, "BLOCK_C": 64}
    types, values = {}, {}
    for k, parameter in enumerate(kernel.params):
        name = parameter.name
        if parameter.is_constexpr:
            types[name], values[k,] = "constexpr", constants.pop(name)
        elif name in BOUNDS or name in COUNTS:
            types[name] = "i64" if name in BOUNDS else "i32"
        elif name == "ties":
            types[name] = "*i32"
        else:
            types[name] = "*" + (index if name in INDICES else wide if name in WIDE else dtype)
    source = ASTSource(kernel, types, values)
    made = triton.compile(source, target=GPUTarget("cuda", int(capability), 32), options={"num_warps": 2}).asm
    assert "cubin" in made and not re.search(r"\b(atom|red)\.", made["ptx"]), "adds in any order"


dtype, index, capability = sys.argv[1:]
compiled(triton_sums._sum_rows, dtype, index, FRESH=False, WEIGHTED=True, ORDERED=True)
compiled(triton_sums._edge_dots, dtype, index)
compiled(triton_extremum._extremum, dtype, index, SIGN=-1)
compiled(triton_extremum._extremum_adjoint, dtype, index)
compiled(triton_attention._given_adjoint, dtype, index, DROPS=True)
for kind, channels in (("given", 1), ("slanted", 1), ("dot", 64), ("mixed", 64)):
    given = {"NUMBER": 0.2, "KIND": kind, "DROPS": kind != "dot", "BLOCK_S": channels}
    compiled(triton_attention._attend_rows, dtype, index, **given)
    if kind != "given":
        compiled(triton_attention._source_adjoint, dtype, index, **given, SAME=kind == "mixed")
        compiled(triton_attention._destination_adjoint, dtype, index, **given)
"""


@pytest.mark.parametrize(
    "dtype, index, capability",
    [
        ("fp32", "i32", "80"),
        pytest.param("fp32", "i64", "90", marks=pytest.mark.long),
        pytest.param("fp64", "i64", "80", marks=pytest.mark.long),
        pytest.param("bf16", "i32", "90", marks=pytest.mark.long),
        pytest.param("fp16", "i64", "80", marks=pytest.mark.long),
    ],
)
def test_kernels_compile_for_a_gpu(dtype, index, capability, tmp_path: Path) -> None:
    pytest.importorskip("triton.backends.nvidia")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, dtype, index, capability],
        env=environment,
        capture_output=True,
        text=True,
        timeout=480,
    )
    assert done.returncode == 0, done.stderr


def test_no_kernel_adds_atomically() -> None:
    """Nor do those that are not compiled above."""
    modules = list(Path(kernels.__file__).parent.glob("triton_*.py"))
    assert len(modules) >= 4
    assert [path.name for path in modules if "atomic_" in path.read_text(encoding="utf-8")] == []
