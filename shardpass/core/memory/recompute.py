"""Activations that backward computes again instead of keeping them: ``wrap(..., checkpoint="activations")``.

[Note: what is kept, and what is computed again]
Cheap operations stand between two layers that pass messages: a norm, an activation, dropout, a sum with what went
before. Autograd keeps their inputs or results, as it does for a matrix product, although each of them is one pass over
rows that are kept anyway. While the outermost forward of a model runs, `Activations` watches the torch functions that
it calls. It knows a *source* of a tensor if backward can have that tensor without keeping anything new:

* `Kept`: autograd has saved the tensor, or it is an input of the model.
* `Recipe`: a cheap operation has made the tensor from tensors with sources.

A saved-tensor hook gives autograd the source in place of the tensor, and keeps the tensor if it has none.

The results are the same to the last bit, for these reasons:

* A source belongs to a tensor object and its version: after a change in place the tensor has none. The sources of other
  tensors do not depend on it, unless it is kept. Then the change is an error in backward, as it is without hooks.
* A recipe starts from kept tensors, from copies of small operands (weights, running statistics), and from the state of
  a random generator. It runs under the autocast state of forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardpass.core.memory.kept import Kept
from shardpass.core.ranks import Ranks, is_differentiable, torch_private

Checkpoint = Literal["activations"] | None
MAX_STEPS = 32  # of one recipe: a chain of residual sums becomes longer with every layer
SMALL = 8  # an operand this many times smaller than the largest is copied into the recipe

_CHEAP = frozenset(
    """
    add sub mul div true_divide rsub neg exp log sqrt rsqrt square abs clamp pow addcmul maximum minimum where
    __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __div__ __rdiv__ __neg__ __pow__
    relu relu6 elu selu celu leaky_relu prelu gelu silu mish softplus softsign hardtanh hardswish hardsigmoid threshold
    sigmoid tanh logsigmoid tanhshrink softshrink hardshrink glu softmax log_softmax
    layer_norm rms_norm group_norm normalize
    view reshape view_as flatten unflatten unsqueeze squeeze transpose permute t expand expand_as contiguous clone
    detach to float double half bfloat16 type_as cat concat stack
    """.split()
)
"""Names of functions of torch without effects, whose result depends on nothing but their arguments."""


@dataclass(frozen=True)
class Recipe:
    """``function(*args, **kwargs)``, with a `Saved` in the place of each tensor.

    Attributes:
        steps: how many functions it takes, starting from kept tensors.
        autocast: the device type, whether autocast was on, and its dtype.
    """

    function: Callable[..., Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    steps: int
    autocast: tuple[str, bool, torch.dtype]

    def get(self) -> Tensor:
        """The tensor, computed again."""
        args, kwargs = torch_private.tree_map(
            lambda x: x.source.get() if isinstance(x, Saved) else x, (self.args, self.kwargs)
        )
        device, enabled, dtype = self.autocast
        with torch.autocast(device, dtype, enabled, cache_enabled=False):
            return self.function(*args, **kwargs)


@dataclass(eq=False, slots=True)
class Saved:
    """What autograd holds in place of a tensor."""

    source: Kept | Recipe


class Activations(TorchFunctionMode):
    """Notes how cheap operations make their results while the outermost forward of a model runs on this rank."""

    def __init__(self, comm: Ranks) -> None:
        super().__init__()
        self._comm = comm
        self._saved = torch_private.WeakTensorKeyDictionary()  # tensor -> its version, and its Saved

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(not issubclass(kind, Tensor) for kind in types):
            return func(*args, **kwargs)  # something that stands for a tensor, and has no values to keep
        if not torch.is_grad_enabled() or self._comm.watch is not None:
            return func(*args, **kwargs)
        if func is F.batch_norm:
            return self._batch_norm(*args, **kwargs)
        if func is F.dropout:
            return self._dropout(*args, **kwargs)
        out = func(*args, **kwargs)
        if getattr(func, "__name__", "") in _CHEAP:
            self.note(out, func, *args, **kwargs)
        return out

    def pack(self, tensor: Tensor) -> Saved:
        """What autograd holds in place of a tensor that it saves."""
        with torch_private.DisableTorchFunction():
            saved = self._known(tensor) or Saved(Kept(tensor))
            self._remember(tensor, saved)
            return saved

    def note(self, out: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Say that `out` is ``function(*args, **kwargs)``, which is cheap, has no effects, and gives the same bits."""
        with torch_private.DisableTorchFunction():
            operands = [x for x in torch_private.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            if not _is_plain(out) or not operands or any(out is x for x in operands):
                return
            largest = max(x.numel() for x in operands)
            given = {id(x): self._operand(x, largest) for x in operands}
            steps = 1 + sum(_steps(saved) for saved in given.values())
            if None in given.values() or steps > MAX_STEPS:
                return
            args, kwargs = torch_private.tree_map(
                lambda x: given[id(x)] if isinstance(x, Tensor) else x, (args, kwargs)
            )
            device = out.device.type
            autocast = device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
            recipe = Recipe(function, args, kwargs, steps, autocast)
            saved = self._known(out)
            if saved is None:
                self._remember(out, Saved(recipe))
            else:  # the operation itself has saved its result
                saved.source = recipe

    def _operand(self, tensor: Tensor, largest: int) -> Saved | None:
        if tensor.numel() * SMALL <= largest and _is_plain(tensor):
            return Saved(Kept(tensor.detach().clone()))
        return self._known(tensor)

    def _known(self, tensor: Tensor) -> Saved | None:
        """The `Saved` of a tensor that has a source and was not changed since."""
        version, saved = self._saved.get(tensor, (None, None))
        return saved if version == torch_private.version_of(tensor) else None

    def _remember(self, tensor: Tensor, saved: Saved) -> None:
        if _is_plain(tensor):
            self._saved[tensor] = torch_private.version_of(tensor), saved

    def _batch_norm(
        self, input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
        bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
    ) -> Tensor:  # fmt: skip
        out = F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
        mean, var = (None, None) if training else (running_mean, running_var)  # the running ones are not updated again
        self.note(out, F.batch_norm, input, mean, var, weight, bias, training, 0.0, eps)
        return out

    def _dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """Dropout as torch computes it on the CPU, with factors that backward can draw again."""
        if not training or inplace or input.device.type != "cpu" or not input.numel() or not 0 < p < 1:
            return F.dropout(input, p, training, inplace)
        with self._comm.random_lock():
            state = torch.get_rng_state()
            factors = torch.empty_like(input).bernoulli_(1 - p).div_(1 - p)  # from torch's generator, as is followed
        self.pack(state)  # the recipe starts from it
        self.note(factors, _factors, state, input.size(), factors.stride(), input.dtype, p)
        out = input * factors
        self.note(out, torch.mul, input, factors)
        return out


@contextmanager
def recomputed_activations(comm: Ranks, inputs: Any, active: bool = True) -> Iterator[None]:
    """A block in which autograd holds recipes of activations in place of activations, where it can. Not collective.

    The block does nothing without gradients, inside another such block, and inside saved-tensor hooks of the caller
    (such as those of `torch.utils.checkpoint`), which decide then.

    Args:
        comm: the ranks. It says whether a message function is running, and has the lock of a shared generator.
        inputs: what the model is called with, in any structure. The caller is taken to keep it.
        active: `False` to do nothing.
    """
    hooks = torch_private.saved_tensor_hooks()
    if not active or comm.notes is not None or hooks is not None or not torch.is_grad_enabled():
        yield
        return
    comm.notes = noted = Activations(comm)
    for x in torch_private.tree_leaves(inputs):
        if isinstance(x, Tensor) and _is_plain(x) and is_differentiable(x):
            noted.pack(x)
    try:
        with torch.autograd.graph.saved_tensors_hooks(noted.pack, _unpack), noted:
            yield
    finally:
        comm.notes = None


def check_choice(checkpoint: Any) -> None:
    """Raise if `checkpoint` is not one of the choices.

    Raises:
        ValueError: it is neither `None` nor ``"activations"``.
    """
    if checkpoint not in (None, "activations"):
        raise ValueError(f"checkpoint must be None or 'activations', found {checkpoint!r}")


def _unpack(saved: Saved) -> Tensor:
    with torch_private.DisableTorchFunction(), torch.no_grad():
        return saved.source.get()


def _steps(saved: Saved | None) -> int:
    return saved.source.steps if saved is not None and isinstance(saved.source, Recipe) else 0


def _is_plain(value: Any) -> bool:
    return type(value) in (Tensor, nn.Parameter) and not value.is_inference()


def _factors(state: Tensor, size: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, p: float) -> Tensor:
    """What dropout multiplies with: 0 with probability `p`, else ``1 / (1 - p)``, as torch draws it on the CPU.

    Args:
        state: of the random generator before it draws.
    """
    generator = torch.Generator().set_state(state)
    return torch.empty_strided(size, stride, dtype=dtype).bernoulli_(1 - p, generator=generator).div_(1 - p)
