"""What one operation makes of rows: by its rule, or by the rules of the core operations that it is composed of.

[Note: the number of rows is a symbol]
An operation without a rule runs once more as torch's own decomposition, on tensors without memory in which the number
of rows is a symbol. Each operation of the decomposition is judged. No constant can coincide with a symbol: what asks
for the number, by a branch or a comparison with another size, fails, and is a mixture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardpass.core.following.call import Call, Found, Made
from shardpass.core.following.rows import Rows
from shardpass.core.following.table import judged, rule_of
from shardpass.core.ranks import RowSet, is_out_of_memory, torch_private

_TAKES_SIZES = frozenset("_unsafe_view new_zeros new_empty new_full new_ones affine_grid_generator".split())


class Verdict:
    """What an operation makes of rows.

    Attributes:
        found: for each tensor that it returns, where it holds rows, or what it was made of.
        plain: the operands without rows that have an entry for each row, by position, with the dimension.
        reason: why it cannot be told; empty if it can.
    """

    def __init__(self, found: list[Found], plain: list[tuple[int, int]], reason: str = "") -> None:
        self.found, self.plain, self.reason = found, plain, reason


def verdict_of(
    func: Any, leaves: Sequence[Any], structure: Any, known: Mapping[int, Found], outs: list[Tensor],
    is_zero: Callable[[Tensor], bool] = lambda tensor: False, is_of_script: bool = False,
) -> Verdict:  # fmt: skip
    """What `func`, a primitive operation, makes of rows.

    Args:
        func: as a dispatch mode sees it.
        leaves, structure: its arguments, as `tree_flatten` gives them for ``(args, kwargs)``.
        known: where the leaves hold rows, or what they were made of, by position.
        outs: what it returned, or tensors of these shapes.
        is_zero: whether an operand is known to hold zeros.
        is_of_script: see `Call`.
    """
    marks = {id(leaves[i]): found for i, found in known.items()}
    args, kwargs = torch_private.tree_unflatten(leaves, structure)
    call = Call(func, args, kwargs, outs, lambda tensor: marks.get(id(tensor)), is_zero, is_of_script)
    found = judged(call)
    if found is not None:
        places = {id(leaf): i for i, leaf in enumerate(leaves)}
        return Verdict(found, [(places[id(tensor)], dim) for tensor, dim in call.plain])
    rule = torch_private.decomposition_of(func)
    if rule is None:
        name = func.overloadpacket.__name__
        return Verdict([Made.MIXED] * len(outs), [], f"no rule says what `{name}` makes of rows")
    return composed(rule, leaves, structure, known, len(outs))


def composed(
    function: Callable[..., Any], leaves: Sequence[Any], structure: Any, known: Mapping[int, Found], num_outs: int = 1
) -> Verdict:
    """The verdict on a function that calls other operations, each of which is judged. See `verdict_of`."""
    try:
        return _composed(function, leaves, structure, known)
    except _UnknownError as unknown:
        return Verdict([Made.MIXED] * num_outs, [], str(unknown))
    except Exception as error:  # whatever a decomposition raises for operands that do not fit
        if is_out_of_memory(error):
            raise
        return Verdict([Made.MIXED] * num_outs, [], f"{type(error).__name__}: {str(error).splitlines()[:1]}")


class _UnknownError(Exception):
    """An operation has neither a rule nor a decomposition."""


def _composed(
    function: Callable[..., Any], leaves: Sequence[Any], structure: Any, known: Mapping[int, Found]
) -> Verdict:
    with torch_private.DisableTorchFunction():
        symbols = Symbols()
    with torch_private.DisableTorchFunction(), torch_private.quiet_shapes(), symbols.mode, torch.no_grad():
        twins = [
            symbols.twin(leaf, known.get(i)) if isinstance(leaf, Tensor) else leaf for i, leaf in enumerate(leaves)
        ]
        judge = _Judge({id(twin): known[i] for i, twin in enumerate(twins) if i in known}, twins)
        args, kwargs = torch_private.tree_unflatten(twins, structure)
        with judge:
            outs = function(*args, **kwargs)
    found = [judge.of(out) for out in torch_private.tree_leaves(outs) if isinstance(out, Tensor)]
    return Verdict(found, [])


class Symbols:
    """Tensors without memory, in which the number of rows of each set is a symbol.

    Attributes:
        mode: within it, torch computes shapes only.
    """

    def __init__(self) -> None:
        self._sizes: list[tuple[RowSet, Any]] = []
        self.shapes, self.mode = torch_private.symbolic_shapes()

    def size(self, of: RowSet) -> Any:
        """The symbol for the number of rows of a set."""
        for known, size in self._sizes:
            if known.goes_with(of):
                return size
        size = torch_private.symbolic_size(self.shapes)
        self._sizes.append((of, size))
        return size

    def twin(self, tensor: Tensor, found: Found) -> Tensor:
        """A tensor like `tensor` without memory, with a symbol in the place of its number of rows."""
        shape: list[Any] = [*tensor.shape]
        if isinstance(found, Rows):
            shape[found.dim] = found.outer * self.size(found.of) * found.inner
        return torch.empty(shape, dtype=tensor.dtype, device=tensor.device)


class _Judge(torch_private.TorchDispatchMode):
    """Judges each operation of a decomposition."""

    def __init__(self, known: dict[int, Found], twins: list[Any]) -> None:
        super().__init__()
        self._found: MutableMapping[Tensor, Found] = torch_private.WeakTensorKeyDictionary()
        for twin in twins:
            if isinstance(twin, Tensor) and id(twin) in known:
                self._found[twin] = known[id(twin)]

    def of(self, tensor: Tensor) -> Found:
        """What is known of a tensor."""
        found: Found = self._found.get(tensor)
        return found

    def decomposed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What the decomposition of `func` returns; each of its operations is judged."""
        rule = torch_private.decomposition_of(func)
        if rule is None:
            raise _UnknownError(f"no rule says what `{func.overloadpacket.__name__}` makes of rows")
        with self:
            return rule(*args, **kwargs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = torch_private.tree_leaves((args, kwargs))
        if not any(isinstance(leaf, Tensor) and self.of(leaf) is not None for leaf in leaves):
            if any(isinstance(leaf, torch.SymInt) for leaf in leaves) and func.overloadpacket.__name__ not in (
                "sym_size", "sym_numel"
            ):  # fmt: skip
                raise _UnknownError(f"`{func.overloadpacket.__name__}` is given their number")
            return func(*args, **kwargs)
        if func.namespace == "prim":  # asks for a tensor's device or layout
            return func(*args, **kwargs)
        numbers = any(isinstance(leaf, (torch.SymInt, torch.SymFloat)) for leaf in leaves)
        if numbers and not torch_private.is_view(func) and func.overloadpacket.__name__ not in _TAKES_SIZES:
            raise _UnknownError(f"`{func.overloadpacket.__name__}` computes with their number")
        if rule_of(func) is None:
            return self.decomposed(func, args, kwargs)
        out = func(*args, **kwargs)
        outs = [leaf for leaf in torch_private.tree_leaves(out) if isinstance(leaf, Tensor)]
        call = Call(func, args, kwargs, outs, self.of)
        for one, found in zip(outs, judged(call) or []):
            if found is not None:
                self._found[one] = found
        if call.plain:
            raise _UnknownError("a number for each row is made without them")
        return out
