"""Activations that backward computes again rather than keeps: ``wrap(..., checkpoint="activations")``.

[Note: what is kept, and what is computed again]
Between two layers that pass messages stand cheap operations: a norm, an activation, dropout, a sum with what went
before. Autograd keeps their inputs or results as it keeps those of a matrix product, though each of them is one pass
over rows that are kept anyway. While the outermost forward of a model runs, `Activations` watches torch functions. Of
each result of a known operation it notes how it was made (`Recipe`) from what (`Value`: one state of a tensor, that is
the tensor object and its version). When autograd saves a tensor, it is given a `Saved` in its place (a saved-tensor
hook): the recipe, if all that the recipe starts from is kept anyway, and else the tensor.

What this rests on:

* A tensor is known by a weak reference to the object, never by an address, which is used again once it is freed.
* A change in place makes a new value: the old recipe no longer stands for the tensor, but still for what it was. A kept
  tensor that has changed is an error in backward, as it is without hooks.
* A recipe starts from kept tensors, from copies of small operands (weights, running statistics), and from the state of
  a random generator. It is carried out under the autocast state of forward. Results are the same bits.
* Autograd copies the tensor object it is given, so the result that several nodes share is found by its storage.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from shardpass.backends.communicator import Communicator

Checkpoint = Literal["activations"] | None
MAX_STEPS = 32  # of one recipe: bounds what a chain of residual sums costs
SMALL = 8  # an operand this many times smaller than the largest is copied into the recipe

_NAMES = """
    add sub mul div true_divide rsub neg exp log sqrt rsqrt square abs clamp pow addcmul maximum minimum where
    __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __div__ __rdiv__ __neg__ __pow__
    __iadd__ __isub__ __imul__ __itruediv__ add_ sub_ mul_ div_ neg_ exp_ clamp_ addcmul_
    relu relu_ relu6 elu elu_ selu selu_ celu celu_ leaky_relu leaky_relu_ prelu gelu silu mish softplus softsign
    hardtanh hardtanh_ hardswish hardsigmoid threshold threshold_ sigmoid sigmoid_ tanh tanh_ logsigmoid tanhshrink
    softshrink hardshrink glu softmax log_softmax layer_norm rms_norm group_norm normalize dropout dropout_
    view reshape view_as flatten unflatten unsqueeze squeeze transpose permute t expand expand_as contiguous clone
    detach to float double half bfloat16 type_as cat concat stack max min
""".split()
_DROPOUTS = frozenset([F.dropout, torch.dropout, torch.dropout_])
_PLAIN = (Tensor, nn.Parameter)


class Saved:
    """What autograd holds in the place of a tensor: the tensor itself, or the recipe to make it again."""

    __slots__ = ("__weakref__", "_last", "_layout", "recipe", "tensor", "version")

    def __init__(self, tensor: Tensor | None = None, recipe: Recipe | None = None) -> None:
        self.tensor, self.recipe = tensor, recipe
        self.version = 0 if tensor is None else _version(tensor)
        self._last: StorageWeakRef | None = None  # of the result, while anyone has it
        self._layout: tuple[Any, ...] = ()

    @property
    def intact(self) -> bool:
        """Whether the tensor can be had as it was when it was saved."""
        return self.tensor is None or _version(self.tensor) == self.version

    def get(self) -> Tensor:
        """The tensor as it was when it was saved.

        Raises:
            RuntimeError: it is kept, and was changed in place since.
        """
        if self.tensor is None:
            shared = self._shared()
            return self._made() if shared is None else shared
        if not self.intact:
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self.tensor.type()} {list(self.tensor.shape)}] is at version {_version(self.tensor)}; expected "
                f"version {self.version} instead. With checkpoint='activations' activations are computed again from "
                f"it: leave it as it is until backward is over"
            )
        return self.tensor

    def take(self) -> tuple[Tensor, bool]:
        """What `get` returns, and whether nobody else has or will have it, so that the caller may change it."""
        if self.tensor is not None or self._shared() is not None:
            return self.get(), False
        made = self._made()
        alone, self._last = self._last is not None, None
        return made, alone

    def _shared(self) -> Tensor | None:
        if self._last is None:
            return None
        storage = torch.UntypedStorage._new_with_weak_ptr(self._last.cdata)  # type: ignore[attr-defined]
        if storage is None:
            return None
        dtype, *layout = self._layout
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, *layout)  # type: ignore[call-overload, no-any-return]

    def _made(self) -> Tensor:
        assert self.recipe is not None
        made, alias = self.recipe.carry_out()
        if not alias:  # what shares memory with a kept tensor can change with it
            self._last = StorageWeakRef(made.untyped_storage())
            self._layout = (made.dtype, made.storage_offset(), made.shape, made.stride())
        return made


class Value:
    """One state of a tensor while forward runs; it does not keep the tensor alive.

    Attributes:
        version: of the tensor.
        recipe: how it was made, from values; None where that is not known.
        saved: a weak reference to what autograd was given for it.
    """

    __slots__ = ("recipe", "saved", "version")

    def __init__(self, version: int) -> None:
        self.version = version
        self.recipe: Recipe | None = None
        self.saved: Callable[[], Saved | None] = _nothing

    def save(self, tensor: Tensor | None = None, recipe: Recipe | None = None) -> Saved:
        """A `Saved` that is this value's from now on."""
        saved = Saved(tensor, recipe)
        self.saved = weakref.ref(saved)
        return saved

    def obtain(self) -> Saved | None:
        """What gives this value in backward without keeping anything that is not kept already; None if nothing does."""
        saved = self.saved()
        if saved is not None and saved.intact:
            return saved
        recipe = None if self.recipe is None else self.recipe.bound()
        return None if recipe is None else self.save(recipe=recipe)


@dataclass(frozen=True)
class Recipe:
    """``function(*args, **kwargs)``, in which a `Value` (while noted) or a `Saved` (once bound) stands for a tensor.

    Attributes:
        steps: how many functions it takes from kept tensors on.
        autocast: device type, whether autocast was on, and its dtype.
        in_place: the function changes its first argument.
        item: which of several results.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    steps: int
    autocast: tuple[str, bool, torch.dtype]
    in_place: bool = False
    item: int | None = None

    def bound(self) -> Recipe | None:
        """The recipe in terms of what is kept; None if some of it is not."""
        found = {leaf: leaf.obtain() for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Value)}
        if any(saved is None for saved in found.values()):
            return None
        args, kwargs = tree_map(lambda x: found[x] if isinstance(x, Value) else x, (self.args, self.kwargs))
        return replace(self, args=args, kwargs=kwargs)

    def carry_out(self) -> tuple[Tensor, bool]:
        """The tensor, and whether it shares memory with something that it was made from."""
        function, args, alone = self.function, self.args, False
        changing = _changing(function)
        if (self.in_place or changing is not None) and args and isinstance(args[0], Saved):
            first, alone = args[0].take()
            args = (first.clone() if self.in_place and not alone else first, *args[1:])
            function = changing if alone and changing is not None else function
        args, kwargs = tree_map(lambda x: x.get() if isinstance(x, Saved) else x, (args, self.kwargs))
        device, enabled, dtype = self.autocast
        changed = enabled or torch.is_autocast_enabled(device)
        with torch.autocast(device, dtype, enabled, cache_enabled=False) if changed else nullcontext():
            made = function(*args, **kwargs)
        made = made if self.item is None else made[self.item]
        address = made.untyped_storage().data_ptr()
        given = tree_leaves((args[alone or self.in_place :], kwargs))
        return made, any(isinstance(x, Tensor) and x.untyped_storage().data_ptr() == address for x in given)


class Activations(TorchFunctionMode):
    """Notes how the results of cheap operations are made while the outermost forward of a model runs on this rank."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        self._comm = comm
        self._values = WeakTensorKeyDictionary()
        places = (torch, torch._C._nn, F, Tensor)
        self._cheap = {getattr(place, name) for place in places for name in _NAMES if hasattr(place, name)}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(not issubclass(kind, Tensor) for kind in types):
            return func(*args, **kwargs)  # something that stands for a tensor, and has no values to keep
        if not torch.is_grad_enabled() or self._comm.order.inside is not None:
            return func(*args, **kwargs)
        if func is F.batch_norm:
            return self._batch_norm(*args, **kwargs)
        if func in _DROPOUTS:
            return self._dropout(func, args, kwargs)
        return self._watched(func, *args, **kwargs) if func in self._cheap else func(*args, **kwargs)

    def pack(self, tensor: Tensor) -> Saved:
        """What autograd holds in the place of a tensor it saves."""
        with torch._C.DisableTorchFunction():
            if type(tensor) not in _PLAIN:
                return Saved(tensor if tensor.grad_fn is None else tensor.detach())
            value = self._value(tensor)
            return value.obtain() or value.save(tensor.detach())  # not the tensor: its graph may hold what is returned

    def note(self, out: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Say that `out` is ``function(*args, **kwargs)``, which is cheap, without effects, and gives the same bits."""
        with torch._C.DisableTorchFunction():
            recipe = self._recipe(function, args, kwargs)
            if recipe is not None:
                self._note(out, recipe)

    def _watched(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            recipe = self._recipe(function, args, kwargs)
            operands = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            before = _version(operands[0]) if operands else 0
        out = function(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            if any(out is x for x in operands):
                changed = bool(args) and out is args[0] and out is operands[0] and _version(out) != before
                recipe = replace(recipe, in_place=True) if recipe is not None and changed else None
            if recipe is not None:
                self._note(out, recipe)
        return out

    def _recipe(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recipe | None:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if not tensors or any(type(x) not in _PLAIN or x.is_inference() for x in tensors):
            return None
        largest = max(x.numel() for x in tensors)
        known = {id(x): self._operand(x, largest) for x in tensors}
        args, kwargs = tree_map(lambda x: known[id(x)] if isinstance(x, Tensor) else x, (args, kwargs))
        steps = 1 + sum(v.recipe.steps for v in known.values() if isinstance(v, Value) and v.recipe is not None)
        device = tensors[0].device.type
        autocast = (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        return Recipe(function, args, kwargs, steps, autocast) if steps <= MAX_STEPS and "out" not in kwargs else None

    def _operand(self, tensor: Tensor, largest: int) -> Value | Saved:
        small = tensor.numel() * SMALL <= largest
        return Saved(tensor.detach().clone()) if small else self._value(tensor)

    def _value(self, tensor: Tensor) -> Value:
        """The value that the tensor has now."""
        value = self._values.get(tensor)
        if value is None or value.version != _version(tensor):
            value = self._values[tensor] = Value(_version(tensor))
        return value  # type: ignore[no-any-return]

    def _note(self, out: Any, recipe: Recipe) -> None:
        for item, tensor in [(None, out)] if isinstance(out, Tensor) else enumerate(out):
            if type(tensor) is Tensor:
                value = self._value(tensor)
                value.recipe = replace(recipe, item=item)
                saved = value.saved()
                bound = value.recipe.bound() if saved is not None else None
                if saved is not None and bound is not None:  # the operation itself has saved its result
                    saved.tensor, saved.recipe = None, bound

    def _batch_norm(
        self, input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
        bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
    ) -> Tensor:  # fmt: skip
        out = F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
        mean, var = (None, None) if training else (running_mean, running_var)  # the running ones are not updated again
        self.note(out, F.batch_norm, input, mean, var, weight, bias, training, 0.0, eps)
        return out

    def _dropout(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Dropout as torch computes it on the CPU, with a factor that can be drawn again."""
        names = ("input", "p", "training", "inplace")
        given = {"p": 0.5, "training": True, "inplace": function is torch.dropout_, **dict(zip(names, args)), **kwargs}
        x, p = given["input"], given["p"]
        if not given.get("train", given["training"]) or x.device.type != "cpu" or not x.numel() or not 0 < p < 1:
            return self._watched(function, *args, **kwargs)
        with self._comm.random_lock():
            generator = torch.Generator()
            generator.set_state(state := torch.get_rng_state())
            kept = torch.empty_like(x)
            drawn = (kept.size(), kept.stride(), kept.dtype, p)
            kept = _factors(generator, *drawn)
            torch.set_rng_state(generator.get_state())
        self._value(kept).recipe = Recipe(_factors, (Saved(state), *drawn), {}, 1, ("cpu", False, torch.float32))
        return self._watched(Tensor.mul_ if given["inplace"] else _times, x, kept)


@contextmanager
def recomputed_activations(comm: Communicator, inputs: Any, active: bool = True) -> Iterator[None]:
    """While the block runs, autograd keeps recipes of activations where it can. Nothing is communicated.

    Does nothing without gradients, inside another such block, and under saved-tensor hooks of the caller's own (such as
    those of `torch.utils.checkpoint`), which decide then.

    Args:
        comm: the ranks; tells whether a message function is running, and has the lock of a shared generator.
        inputs: of the model, in any structure: they are taken to be kept by the caller.
        active: False: do nothing.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)  # type: ignore[attr-defined]
    if not active or comm.order.activations is not None or hooks is not None or not torch.is_grad_enabled():
        yield
        return
    comm.order.activations = noted = Activations(comm)
    kept = [noted.pack(x) for x in tree_leaves(inputs) if type(x) in _PLAIN and x.is_floating_point()]
    try:
        with torch.autograd.graph.saved_tensors_hooks(noted.pack, _unpack), noted:
            yield
    finally:
        comm.order.activations = None
        kept.clear()


def check_choice(checkpoint: Any) -> None:
    """Raise if `checkpoint` is not one of the choices.

    Raises:
        ValueError: naming them.
    """
    if checkpoint not in (None, "activations"):
        raise ValueError(f"checkpoint is None or 'activations', got {checkpoint!r}")


def _unpack(saved: Saved) -> Tensor:
    with torch._C.DisableTorchFunction(), torch.no_grad():
        return saved.get()


def _factors(
    drawn_from: Tensor | torch.Generator, size: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, p: float
) -> Tensor:
    """What dropout multiplies with: 0 with probability `p`, else ``1 / (1 - p)``, as torch draws it on the CPU."""
    if isinstance(drawn_from, Tensor):
        drawn_from = torch.Generator().set_state(drawn_from)
    kept = torch.empty_strided(size, stride, dtype=dtype)
    return kept.bernoulli_(1 - p, generator=drawn_from).div_(1 - p)


def _times(rows: Tensor, factors: Tensor) -> Tensor:
    return rows * factors


def _relu_(input: Tensor, inplace: bool = False) -> Tensor:
    return torch.relu_(input)


def _changing(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """What computes the same in place; None where that is not worth it, or not known."""
    if function in (F.relu, torch.relu, Tensor.relu):
        return _relu_
    return Tensor.mul_ if function is _times else None


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _nothing() -> None:
    return None
