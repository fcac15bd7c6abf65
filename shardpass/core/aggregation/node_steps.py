"""A node function written down as it runs once, and repeated in later calls: what it does to finished reductions.

A node function such as PyG's ``aggregate`` runs on a made-up edge, and most of what it does is about that edge. What
its result is made of are a few functions of torch, applied to the reductions and to what the layer holds. Where all
that it depends on is known, and equal in two calls, those functions are too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardpass.core.ranks import torch_private
from shardpass.core.tracing import METADATA_OPS, tensors_in, writes_in_place

_READS_NO_VALUES = METADATA_OPS.union(["__get__", "__repr__"])


class _Value(NamedTuple):
    """Stands for a reduction, or for what a step has made, by its number."""

    number: int


class _Step(NamedTuple):
    function: Callable[..., Any]
    args: tuple[object, ...]
    kwargs: dict[str, object]
    reads: frozenset[int]
    made: list[int]


class NodeSteps:
    """The steps from reductions to the result of a node function.

    Args:
        steps: in order. Those that the result does not hang on are left out.
        result: the number of its value.
    """

    def __init__(self, steps: Sequence[_Step], result: int) -> None:
        self._result, self._steps, needed = result, list[_Step](), {result}
        for step in reversed(steps):
            if needed.intersection(step.made):
                self._steps.insert(0, step)
                needed |= step.reads

    def run(self, reductions: Sequence[Tensor]) -> Tensor:
        """What the node function makes of `reductions`. It shares no memory with them."""
        values = dict(enumerate(reductions))
        for function, args, kwargs, _, made in self._steps:
            out = function(*_filled(args, values), **{name: _filled(arg, values) for name, arg in kwargs.items()})
            values.update(zip(made, tensors_in([out])))
        result: Tensor = values[self._result]
        return result.clone() if _storage(result) in map(_storage, reductions) else result


class NodeStepsWriter:
    """Writes down what a node function does, while it runs for the first time.

    Args:
        lasting: tensors that are the same in later calls, such as parameters.
        num_reductions: of the call.
    """

    def __init__(self, lasting: Iterable[Tensor], num_reductions: int) -> None:
        self._lasting, self._made_up = {id(one) for one in lasting}, set[int]()
        self._steps: list[_Step] = []
        self._numbers: dict[int, int] = {}  # of values, by the id of their tensor
        self._count = num_reductions
        self._held: list[Any] = []  # so that ids stay theirs
        self._is_known, self._settings = True, _settings()

    def begin(self, made_up: Sequence[Tensor]) -> None:
        """Begin with the tensors of the made-up edge. What is made of them alone is no step."""
        self._held.append(made_up)
        self._made_up.update(map(id, made_up))

    def note(self, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Note a call that gave `out`."""
        operands, found = tensors_in((*args, *kwargs.values())), tensors_in([out])
        num_tensors = sum(isinstance(leaf, Tensor) for leaf in torch_private.tree_leaves((args, kwargs, out)))
        # Steps do not say what a block such as torch.no_grad() has set, and do not look into nested lists and mappings.
        self._is_known &= _settings() == self._settings and num_tensors == len(operands) + len(found)
        is_made_up = [id(one) not in self._numbers and id(one) in self._made_up for one in operands]
        self._held.append(out)
        if operands and all(is_made_up):
            self._made_up.update(map(id, found))
        elif found and not any(is_made_up) and not writes_in_place(name, kwargs):
            self._is_known &= all(id(one) in self._numbers or id(one) in self._lasting for one in operands)
            self._write(function, args, kwargs, found)
        else:
            self._is_known &= name in _READS_NO_VALUES and not found

    def note_reduction(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> None:
        """Note that a scatter gave `out`, which holds the reduction of this number."""
        self._held.append(out)
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0) % out.dim()
        self._write(_rows_along, (_Value(number), dim, out.dtype), {}, [out])

    def finish(self, result: Any) -> NodeSteps | None:
        """The steps, if they are the same in later calls."""
        number = self._numbers.get(id(result)) if self._is_known and isinstance(result, Tensor) else None
        return None if number is None else NodeSteps(self._steps, number)

    def _write(self, function: Any, args: Any, kwargs: Any, found: Sequence[Tensor]) -> None:
        reads: set[int] = set()
        args, kwargs = self._named(args, reads), {key: self._named(arg, reads) for key, arg in kwargs.items()}
        made = list(range(self._count, self._count + len(found)))
        self._count += len(found)
        self._numbers.update(zip(map(id, found), made))
        self._steps.append(_Step(function, args, kwargs, frozenset(reads), made))

    def _named(self, arg: Any, reads: set[int]) -> Any:
        """`arg` with values in the place of tensors. Their numbers go into `reads`."""
        number = self._numbers.get(id(arg)) if isinstance(arg, Tensor) else None
        if number is not None or type(arg) is _Value:
            arg = arg if number is None else _Value(number)
            reads.add(arg.number)
            return arg
        return type(arg)(self._named(one, reads) for one in arg) if type(arg) in (tuple, list) else arg


# Not a function within `NodeSteps.run`: one that calls itself would hold the tensors until Python looks for cycles.
def _filled(arg: Any, values: dict[int, Tensor]) -> Any:
    if type(arg) is _Value:
        return values[arg.number]
    return type(arg)(_filled(one, values) for one in arg) if type(arg) in (tuple, list) else arg


def _rows_along(rows: Tensor, dim: int, dtype: Any) -> Tensor:
    return (rows.movedim(0, dim) if dim else rows).to(dtype)


def _storage(tensor: Tensor) -> int:
    return torch_private.storage_number(tensor.untyped_storage())


def _settings() -> tuple[bool, ...]:
    return torch.is_grad_enabled(), *(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))
