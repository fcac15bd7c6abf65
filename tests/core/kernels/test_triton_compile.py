"""Triton's kernels compile for a GPU, down to its machine code: the interpreter takes more than the compiler does.

None adds atomically, so that every run gives the same bits.
"""

import os
import subprocess
import sys
from itertools import product
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
COUNTS, WIDE = ("heads", "width", "channels", "num_channels"), ("mix_sums", "top", "total", "log_sum", "delta")
seen = set()


def compiled(kernel, **constants):
    wide = "fp64" if dtype == "fp64" else "fp32"
    constants |= {"ACC": tl.float64 if wide == "fp64" else tl.float32, "BLOCK_E": edges, "BLOCK_C": channels}
    seen.add(kernel.__name__)
    types, values, hints = {}, {}, {}
    for k, parameter in enumerate(kernel.params):
        name = parameter.name
        if parameter.is_constexpr:
            types[name], values[k,] = "constexpr", constants.pop(name)
        elif name in COUNTS and channels == 1:  # as Triton takes a 1
            types[name], values[k,] = "constexpr", 1
        elif name in BOUNDS or name in COUNTS:
            types[name] = index if name in BOUNDS else "i32"
        else:
            kind = "i32" if name == "ties" else index if name in INDICES else wide if name in WIDE else dtype
            kind = wide if name == "out" and kernel.__name__ in ("_sum_rows", "_attend_rows") else kind
            types[name], hints[k,] = "*" + kind, [["tt.divisibility", 16]]
    source = ASTSource(kernel, types, values, hints)
    made = triton.compile(source, target=GPUTarget("cuda", int(capability), 32), options={"num_warps": warps}).asm
    assert "cubin" in made and not re.search(r"\b(atom|red)\.", made["ptx"]), "adds in any order"


dtype, index, capability, width = sys.argv[1:]
edges, channels, warps = triton_sums.tile_of(int(width))
for weighted, ordered in ((False, False), (True, False), (True, True)):
    compiled(triton_sums._sum_rows, FRESH=not weighted, WEIGHTED=weighted, ORDERED=ordered)
compiled(triton_sums._edge_dots)
for sign in (1, -1):
    compiled(triton_extremum._extremum, SIGN=sign)
compiled(triton_extremum._extremum_adjoint)
compiled(triton_attention._given_adjoint, DROPS=True)
for kind, scores in (("given", 1), ("additive", 1), ("dot", channels), ("mixed", channels)):
    given = {"NUMBER": 0.2, "KIND": kind, "HAS_MIX": kind == "mixed"}
    given |= {"DROPS": kind != "dot", "BLOCK_S": scores}
    compiled(triton_attention._attend_rows, **given)
    if kind != "given":
        for same in {False, kind == "mixed"}:
            compiled(triton_attention._source_adjoint, **given, SAME=same)
        compiled(triton_attention._destination_adjoint, **given)
modules = triton_sums, triton_extremum, triton_attention
known = {name for module in modules for name, one in vars(module).items() if isinstance(one, triton.JITFunction)}
kernels = {name for name in known if name.startswith("_")}  # what they call is another module's, and so public
assert kernels == seen, "a kernel is not compiled here"
"""

EVERY = [(dtype, index, capability, width)
         for number, (dtype, capability) in enumerate(product(("fp32", "bf16", "fp16", "fp64"), ("80", "90")))
         for width, index in (("1", "i32"), (("64", "257")[number % 2], "i64"))]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(
    "dtype, index, capability, width",
    [("fp32", "i32", "80", "32"), *EVERY],
)
def test_kernels_compile_for_a_gpu(dtype, index, capability, width, pytestconfig) -> None:
    pytest.importorskip("triton.backends.nvidia")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(pytestconfig.cache.mkdir("triton"))}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, dtype, index, capability, width],
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
