"""A device whose memory the host cannot touch, made of CPU memory: what would fail on a GPU fails on it.

torch lets a backend be written in Python. Its tensors here hold a tensor on the CPU, which only the operations of this
file reach. An operation on tensors of the device and of the CPU together is an error, as it is on a GPU, and what is
copied between the two is written down.
"""

from __future__ import annotations

import importlib
import linecache
import pkgutil
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch_geometric
from torch import Tensor, nn
from torch.utils import backend_registration
from torch.utils._pytree import tree_map

NAME = "fakedevice"
_BETWEEN = tuple(str(Path(module.__file__).parent) for module in (torch, torch_geometric))
aten = torch.ops.aten
_INDEXED = (aten.index, aten.index_put, aten.index_put_, aten._unsafe_index, aten._index_put_impl_)


@dataclass(frozen=True)
class Crossing:
    """What was copied between the device and the host.

    Attributes:
        waits: the host goes on only once the device has come to it.
        line: that did it, outside of torch and PyG.
    """

    to_host: bool
    num_elements: int
    dtype: torch.dtype
    waits: bool
    line: str


CROSSINGS: list[Crossing] = []


def _note(tensor: Tensor, to_host: bool, non_blocking: bool = False) -> None:
    frame: Any = sys._getframe()
    while (name := frame.f_code.co_filename).startswith(_BETWEEN) or name == __file__:
        frame = frame.f_back
    line = f"{name}:{frame.f_lineno} {linecache.getline(name, frame.f_lineno).strip()}"
    CROSSINGS.append(Crossing(to_host, tensor.numel(), tensor.dtype, not non_blocking, line))


class DeviceTensor(Tensor):
    """A tensor on the device."""

    raw: Tensor

    @staticmethod
    def __new__(cls: type, raw: Tensor) -> Any:
        """`raw`: what it holds, on the CPU."""
        out = Tensor._make_wrapper_subclass(
            cls, raw.size(), raw.stride(), raw.storage_offset(), dtype=raw.dtype, device=torch.device(NAME, 0)
        )
        out.raw = raw
        return out

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not all(issubclass(kind, DeviceTensor) for kind in types):
            return NotImplemented  # another kind of tensor knows what to do
        return _run(func, args, dict(kwargs or {}))

    def as_subclass(self, cls: Any) -> Any:
        """torch has this only for tensors that are no subclass themselves."""
        with torch._C.DisableTorchFunctionSubclass():
            out = aten.alias(self)
        if not issubclass(DeviceTensor, cls):
            out.__class__ = _class_on_device(cls)
        return out

    def tolist(self) -> Any:
        """As `as_subclass`."""
        _note(self, True)
        return self.raw.tolist()

    def __repr__(self) -> str:
        return f"on the device: {self.raw}"


@cache
def _class_on_device(cls: type) -> type:
    """One class for all tensors of it, as `torch.nn.Parameter` wants."""
    return type(cls.__name__, (cls, DeviceTensor), {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if func is aten.copy_.default and isinstance(args[0], DeviceTensor) != isinstance(args[1], DeviceTensor):
        _note(args[1], not isinstance(args[0], DeviceTensor))
        _raw(args[0]).copy_(_raw(args[1]))
        return args[0]
    if kwargs.get("device") is not None:
        to_host = torch.device(kwargs["device"]).type == "cpu"
        kwargs["device"] = "cpu"
        if to_host:
            _note(args[0], True, kwargs.get("non_blocking", False))
            return func(*tree_map(_raw, args), **tree_map(_raw, kwargs))
    if func.overloadpacket in _INDEXED and isinstance(args[0], DeviceTensor):  # numbers on the host are copied
        args = (args[0], [_moved(one) for one in args[1]], *args[2:])
    wrapped: dict[int, Tensor] = {}

    def unwrapped(value: Any) -> Any:
        if isinstance(value, DeviceTensor):
            wrapped[id(value.raw)] = value
            return value.raw
        if isinstance(value, Tensor) and value.dim():
            raise RuntimeError(f"{func}: a tensor {list(value.shape)} on the CPU among tensors on the device")
        return value

    def rewrapped(value: Any) -> Any:
        return wrapped.get(id(value)) if id(value) in wrapped else DeviceTensor(value) if _is_tensor(value) else value

    return tree_map(rewrapped, func(*tree_map(unwrapped, args), **tree_map(unwrapped, kwargs)))


def _moved(index: Tensor | None) -> Tensor | None:
    if index is None or isinstance(index, DeviceTensor):
        return index
    _note(index, False)
    return DeviceTensor(index)


def _raw(value: Any) -> Any:
    return value.raw if isinstance(value, DeviceTensor) else value


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


class _Module:
    """What torch asks the module of a device for."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass


class _Named(type):
    """The class of `plain_type`."""

    def __call__(cls, *args: Any) -> Any:
        found = type(*args)
        if found is DeviceTensor:
            return nn.Parameter if getattr(args[0], "_is_param", False) else Tensor
        return found

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, type)


class plain_type(metaclass=_Named):
    """As `type`, but a tensor of the device is an ordinary one, as on a GPU."""


def _take_for_ordinary() -> None:
    """Let the engine take tensors of the device for ordinary ones wherever it asks for their type."""
    of_dgl = ["shardpass.frontends.dgl"] if "dgl" in sys.modules else []
    for package in ("shardpass.core", "shardpass.frontends.pyg", *of_dgl):
        for found in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            with suppress(ImportError):  # of triton
                importlib.import_module(found.name)
    for name, module in sys.modules.items():
        if name.startswith("shardpass."):
            vars(module).setdefault("type", plain_type)


_LIBRARIES: list[torch.library.Library] = []


def register() -> None:
    """Make the device known to torch, for the rest of this process."""
    if _LIBRARIES:
        return
    _take_for_ordinary()
    backend_registration._setup_privateuseone_for_python_backend(NAME, _Module())
    library = torch.library.Library("aten", "IMPL")
    for name in torch._C._dispatch_get_all_op_names():
        operation = _factory(name)
        if operation is not None:
            library.impl(name.removeprefix("aten::"), _on_device(operation), "PrivateUse1")

    def copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
        _note(source, isinstance(source, DeviceTensor), non_blocking)
        _raw(target).copy_(_raw(source))
        return target

    library.impl("_copy_from", copy_from, "PrivateUse1")
    _LIBRARIES.append(library)  # what is registered lasts as long as it


def _factory(name: str) -> Any:
    """The operation of this name if it makes a tensor on a device out of numbers alone."""
    short, _, overload = name.removeprefix("aten::").partition(".")
    operation = getattr(getattr(aten, short, None), overload or "default", None) if name.startswith("aten::") else None
    if operation is None or torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"):
        return None
    arguments = operation._schema.arguments
    is_factory = any(a.name == "device" for a in arguments) and not any("Tensor" in str(a.type) for a in arguments)
    return operation if is_factory else None


def _on_device(operation: Any) -> Any:
    def make(*args: Any, **kwargs: Any) -> Tensor:
        return DeviceTensor(operation(*args, **{**kwargs, "device": "cpu"}))

    return make
