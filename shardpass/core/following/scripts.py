"""Modules and functions that TorchScript has compiled: their operations are carried out one by one.

[Note: scripts are read]
TorchScript runs without Python, so that nobody sees what it computes from the number of rows, nor which parameters a
message uses. What is compiled has its code as a graph, though. Where a function mode is on, as it is while rows are
followed and in every message function, the operations of that graph are called from here, with the numbers of rows as
Python code would get them. So they are judged as those of any model, and compute the same. Elsewhere it runs
compiled. What a graph holds that has no line here is refused by its name.
"""

from __future__ import annotations

import math
import operator
import re
from ast import literal_eval
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardpass.core.following.row_count import OwnCount, OwnShape, leaves_of
from shardpass.core.following.script_names import is_compiled_function, methods_with_scripts
from shardpass.core.following.user_line import user_line
from shardpass.core.ranks import torch_private
from shardpass.errors import RefusedError

_ARGUMENT = re.compile(r"(\*)(?=, |$)|(\w+)(?:=(\[[^\]]*\]|[^,]+))?(?=, |$)")
"""In the text of a schema: what separates the arguments that are given by name, or the name and default of one."""


class Script:
    """What takes the place of a function that TorchScript has compiled, or of ``forward`` of a module.

    Args:
        compiled: the function, or the method.
        module: the module of the method.
    """

    def __init__(self, compiled: Any, *module: torch.jit.ScriptModule) -> None:
        self._compiled, self._module = compiled, module
        self._read: tuple[list[str], list[Any], _Block] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch_private.function_modes():
            return self._compiled(*args, **kwargs)
        names, defaults, block = self._read = self._read or self._code()
        values = dict(zip(names, args)) | kwargs
        missing = [name for name, default in zip(names, defaults) if name not in values and default is ...]
        if missing or len(args) > len(names) or not kwargs.keys() <= set(names):
            return self._compiled(*args, **kwargs)  # which says what is wrong
        given = [values.get(name, default) for name, default in zip(names, defaults)]
        out = block.run([*self._module, *given], {})
        return out[0] if len(out) == 1 else tuple(out)

    def _code(self) -> tuple[list[str], list[Any], _Block]:
        arguments = self._compiled.schema.arguments[len(self._module) :]
        defaults = [one.default_value if one.has_default_value() else ... for one in arguments]
        return [one.name for one in arguments], defaults, _Block.of(self._compiled.inlined_graph)


def follow_scripts(model: nn.Module) -> None:
    """Let what is compiled in `model` be followed. In place; copies of compiled modules are made without it."""
    for module in model.modules():
        held = vars(module)
        if not isinstance(module, torch.jit.ScriptModule):
            held.update((name, Script(value)) for name, value in held.items() if is_compiled_function(value))
            held.update((name, method) for name, method in methods_with_scripts(module, Script) if name not in held)
        elif not isinstance(held.get("forward"), Script):
            held["forward"] = Script(module.forward, module)


class _Block(NamedTuple):
    """A sequence of operations. Values have names, those of blocks around it among them."""

    inputs: list[str]
    nodes: list[_Node]
    outputs: list[str]

    @staticmethod
    def of(graph: Any) -> _Block:
        nodes = [_Node.of(node) for node in graph.nodes()]
        return _Block(_names(graph.inputs()), nodes, _names(graph.outputs()))

    def run(self, given: Iterable[Any], values: dict[str, Any]) -> list[Any]:
        """The results, where `values` are those of the blocks around this one."""
        values.update(zip(self.inputs, given))
        for node in self.nodes:
            try:
                out = node.run(values)
            except RefusedError as error:
                if "TorchScript" in str(error):
                    raise
                raise type(error)(f"{error} (in TorchScript, {node.where})") from error
            values.update(zip(node.outputs, out))
        return [values[name] for name in self.outputs]


class _Node(NamedTuple):
    """An operation.

    Args:
        kind: its name, such as ``aten::add``.
        inputs, outputs: names of values.
        blocks: those of a branch or a loop.
        constant: the value of a constant, or the name of an attribute.
        arguments: the names of its arguments, with their defaults as text; ``*`` stands before those given by name.
        makes_tensors: the result is a tensor, or holds some.
        where: the line of its code.
    """

    kind: str
    inputs: list[str]
    outputs: list[str]
    blocks: list[_Block]
    constant: object
    arguments: list[tuple[str, Any]]
    makes_tensors: bool
    where: str

    @staticmethod
    def of(node: Any) -> _Node:
        kind, constant, outputs = node.kind(), None, list(node.outputs())
        if kind == "prim::Constant" and str(outputs[0].type()) != "NoneType":
            constant = outputs[0].toIValue()
        elif kind == "prim::GetAttr":
            constant = node.s("name")
        text = node.schema() if kind.startswith("aten::") else ""
        found = _ARGUMENT.findall(text[text.find("(") + 1 : text.rfind(") ->")])
        arguments = [(star or name, _default_of(default)) for star, name, default in found]
        makes_tensors = any("Tensor" in str(one.type()) for one in outputs)
        place = re.search(r'File "(.*)", line (\d+)', node.sourceRange())
        where = f"{place[1]}:{place[2]}" if place else kind
        blocks = [_Block.of(block) for block in node.blocks()]
        return _Node(
            kind, _names(node.inputs()), _names(outputs), blocks, constant, arguments, makes_tensors, where
        )  # fmt: skip

    def run(self, values: dict[str, Any]) -> list[Any]:
        """The values of its outputs."""
        if self.kind == "prim::If":
            return self.blocks[0 if values[self.inputs[0]] else 1].run([], values)
        if self.kind == "prim::Loop":
            return self._loop(values)
        args = [values[name] for name in self.inputs]
        if self.kind in ("prim::TupleUnpack", "prim::ListUnpack"):
            return [*args[0]]
        return [self._value(args)]

    def _loop(self, values: dict[str, Any]) -> list[Any]:
        times, goes_on, *carried = (values[name] for name in self.inputs)
        for i in range(times):
            if not goes_on:
                break
            goes_on, *carried = self.blocks[0].run([i, *carried], values)
        return carried

    def _value(self, args: list[Any]) -> Any:
        family, _, name = self.kind.partition("::")
        if self.kind == "prim::Constant":
            return self.constant
        if self.kind == "prim::GetAttr":
            return getattr(args[0], str(self.constant))
        if family == "prim" and name in _PRIMITIVES:
            return _PRIMITIVES[name](*args)
        has_tensors = any(isinstance(leaf, Tensor) for leaf in torch_private.tree_leaves(args))
        if family == "aten" and has_tensors and name in _ASKED:
            out = _ASKED[name](*args)
            return [*out] if type(out) is torch.Size else out
        if family == "aten" and not has_tensors and name in _NUMBERS:
            return _NUMBERS[name](*args)
        if family == "aten" and name in _BY_KEY and has_tensors:
            return _BY_KEY[name](*args)
        if family != "aten" or not self.makes_tensors or not self.arguments:
            raise RefusedError(
                f"{user_line()}: runs `{self.kind}` in code that TorchScript has compiled, at {self.where}, which "
                f"shardpass cannot follow there. Call it uncompiled"
            )
        return self._called(getattr(torch.ops.aten, name), args)

    def _called(self, function: Any, args: list[Any]) -> Any:
        """What an operation of torch gives, called as Python code does, without what is as by default."""
        names = [name for name, _ in self.arguments]
        first = names.index("*") if "*" in names else len(names)
        defaults = dict(self.arguments)
        given, named = list[Any](), dict[str, Any]()
        for place, (name, value) in enumerate(zip((name for name in names if name != "*"), args)):
            if type(value) in (bool, int, float, type(None)) and repr(value) == repr(defaults[name]):
                continue
            if place < first and place == len(given):
                given.append(value)
            else:
                named[name] = value
        return function(*given, **named)


def _names(values: Iterable[Any]) -> list[str]:
    return [value.debugName() for value in values]


def _default_of(text: str) -> Any:
    try:
        return literal_eval(text)
    except (ValueError, SyntaxError):  # no number, such as the name of a layout; or there is none
        return ...


def _sliced(rows: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Tensor:
    is_end = isinstance(end, int) and not isinstance(end, OwnCount) and end >= torch.iinfo(torch.int64).max
    key = slice(None if type(start) is int and start == 0 else start, None if is_end else end, step)
    return rows[(slice(None),) * (dim % rows.dim()) + (key,)]


def _indexed(rows: Tensor, indices: list[Any]) -> Tensor:
    return rows[tuple(slice(None) if index is None else index for index in indices)]


def _appended(values: list[Any], value: Any) -> list[Any]:
    values.append(value)
    return values


def _raised(text: Any, *_: Any) -> None:
    raise RuntimeError(text)


def _joined(first: Any, second: Any) -> Any:
    is_shape = isinstance(first, OwnShape) or isinstance(second, OwnShape)
    return OwnShape((*first, *second)) if is_shape else first + second


def _decided(operation: Callable[..., Any], *numbers: Any) -> Any:
    """What `operation` says of numbers, of which either all or none are of own rows, or they are compared with 0."""
    own = [[isinstance(leaf, OwnCount) for leaf in leaves_of(number)] for number in numbers]
    found = next((leaf for leaf in leaves_of(numbers) if isinstance(leaf, OwnCount)), None)
    if found is not None and not all(map(any, own)) and 0 not in [one for one in numbers if type(one) is int]:
        found.refuse()
    return operation(*numbers)


_PRIMITIVES: dict[str, Callable[..., Any]] = {
    "ListConstruct": lambda *values: [*values],
    "TupleConstruct": lambda *values: values,
    "DictConstruct": lambda *values: dict(zip(values[::2], values[1::2])),
    "TupleIndex": operator.getitem,
    "unchecked_cast": lambda value: value,
    "NumToTensor": lambda number: number,
    "Uninitialized": lambda *_: None,
    "RaiseException": _raised,
    "dtype": lambda rows: rows.dtype,
    "device": lambda rows: rows.device,
    "layout": lambda rows: rows.layout,
    "is_cuda": lambda rows: rows.is_cuda,
    "requires_grad": lambda rows: rows.requires_grad,
    "min": lambda *numbers: _decided(min, *numbers),
    "max": lambda *numbers: _decided(max, *numbers),
}

_ASKED: dict[str, Callable[..., Any]] = {
    "size": Tensor.size,
    "len": lambda rows: rows.size(0) if isinstance(rows, Tensor) else len(rows),
    "numel": Tensor.numel,
    "stride": Tensor.stride,
    "dim": Tensor.dim,
    "is_floating_point": Tensor.is_floating_point,
    "is_complex": Tensor.is_complex,
    "item": Tensor.item,
    "Int": int, "IntImplicit": int, "Float": float, "FloatImplicit": float, "Bool": bool, "ScalarImplicit": Tensor.item,
    "equal": torch.equal,
    "allclose": torch.allclose,
    "__getitem__": operator.getitem,  # of a list, or of a dict
    "append": _appended,
    "__is__": operator.is_,
    "__isnot__": operator.is_not,
}  # fmt: skip
"""What is asked of tensors, or of lists of them."""

_BY_KEY: dict[str, Callable[..., Any]] = {"slice": _sliced, "index": _indexed}

_NUMBERS: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: _joined(a, b) if isinstance(a, (list, tuple)) else a + b,
    "sub": operator.sub, "mul": operator.mul, "div": operator.truediv, "floordiv": operator.floordiv,
    "remainder": operator.mod, "neg": operator.neg, "pow": operator.pow, "abs": abs, "sqrt": math.sqrt,
    "eq": lambda a, b: _decided(operator.eq, a, b), "ne": lambda a, b: _decided(operator.ne, a, b),
    "lt": lambda a, b: _decided(operator.lt, a, b), "le": lambda a, b: _decided(operator.le, a, b),
    "gt": lambda a, b: _decided(operator.gt, a, b), "ge": lambda a, b: _decided(operator.ge, a, b),
    "__and__": operator.and_, "__or__": operator.or_, "__not__": operator.not_,
    "__is__": operator.is_, "__isnot__": operator.is_not,
    "__contains__": lambda a, b: _decided(operator.contains, a, b),
    "__getitem__": operator.getitem, "len": len, "append": _appended,
    "slice": lambda values, start=None, end=None, step=1: values[start:end:step],
    "Int": lambda number: number if isinstance(number, OwnCount) else int(number), "Float": float, "Bool": bool,
    "format": lambda text, *values: text.format(*values),
}  # fmt: skip
"""What is computed with numbers, and with lists of them."""
