"""Starts to load rows that a loop compiled by numba gathers some turns later."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

AHEAD = 16  # how many edges before its turn a row is loaded
_LINE = 64  # bytes of a cache line


@intrinsic
def _load_line(typing: Any, array: Any, row: Any, offset: Any) -> Any:
    """Load the cache line at an offset in bytes from the beginning of a row. It is safe for any address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        made = context.make_array(signature.args[0])(context, builder, args[0])
        row_bytes = cgutils.unpack_tuple(builder, made.strides)[0]
        step = builder.add(builder.mul(builder.sext(args[1], row_bytes.type), row_bytes), args[2])
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        line = builder.gep(builder.bitcast(made.data, pointer), [step])
        function = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        load = builder.module.declare_intrinsic("llvm.prefetch", (pointer,), function)
        builder.call(load, [line, number(0), number(3), number(1)])  # to read, keep near, data
        return context.get_dummy_value()

    return types.void(array, row, types.intp), generate


@njit(nogil=True, cache=True, error_model="numpy")
def prefetch(array: Any, row: int) -> None:
    """Start to load row `row` of a contiguous array."""
    for offset in range(0, array.strides[0], _LINE):
        _load_line(array, row, offset)  # type: ignore[call-arg]  # numba gives the first argument


@njit(nogil=True, cache=True, error_model="numpy")
def prefetch_four(columns: Any, first: int, array: Any) -> None:
    """Start to load the rows of the four edges from `first` on, if there are four."""
    if first + 4 <= columns.size:
        for k in range(first, first + 4):
            prefetch(array, columns[k])
