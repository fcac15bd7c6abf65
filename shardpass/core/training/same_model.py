"""Whether ranks hold the same model: what is the same by construction, and is compared, since a script can change it.

[Note: the same model]
`wrap` compares the models of ranks word by word and makes their numbers the same. From then on every outermost call of
the model begins with one small collective, in which each rank tells a digest of those words, and two numbers of each
parameter and buffer. It is the same collective in training, in evaluation and without gradients, so no rank decides by
itself whether to take part, and a change on one rank is found in the next call, whatever it was. Numbers of a model on
a device are those of the call before, where gradients are on: to read those of this call would be to wait for it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardpass.core.ranks import Ranks, describe, digest, dtype_name, is_local, torch_private
from shardpass.errors import DivergenceError

LIBRARIES = frozenset("builtins torch torch_geometric dgl lightning pytorch_lightning shardpass".split())
"""Packages whose modules nobody's user wrote."""

_UNLIKE = 1e-4  # of the norm of a parameter, as processors may round differently in every step
_OPTION = (bool, float, complex, str, torch.dtype)
_COUNTS_BATCHES = "num_batches_tracked"  # no numbers follow from it that are not compared
_ADDRESS = "_torchdynamo_wrapper_id"  # where a module that torch.compile has made was when it was made


class _LastCall:
    """The digest of a model in words, and what it was made of: most calls find that as it was. And its numbers."""

    def __init__(self) -> None:
        self._state: list[Any] = []
        self._digest = 0
        self._copied: tuple[Tensor, torch.cuda.Event | None] | None = None

    def digest(self, model: nn.Module, named: Iterable[tuple[str, Tensor]]) -> int:
        """As ``digest`` of all lines."""
        if (state := _state(model)) != self._state:
            self._state, self._digest = state, digest("\n".join(_lines(model, named)))
        return self._digest

    def numbers(self, now: Tensor, at_once: bool) -> Tensor:
        """The numbers `now` on the host; those of the call before where they are on a device, but for `at_once`."""
        if now.device.type == "cpu":
            return now
        before, copied = self._copied, torch.cuda.Event() if now.is_cuda else None
        self._copied = now.to("cpu", non_blocking=True), copied
        if copied is not None:
            copied.record()
        if not at_once and before is not None and len(before[0]) == len(now):
            return _read(before)
        return _read(self._copied)


def _read(copied: tuple[Tensor, torch.cuda.Event | None]) -> Tensor:
    """The numbers, once they are on the host."""
    if copied[1] is not None:
        copied[1].synchronize()
    return copied[0]


def _state(model: nn.Module) -> list[Any]:
    """What `_lines` reads, which takes far longer to put into words than to compare."""
    found: list[Any] = []
    for module in model.modules():
        held, kind = vars(module), type(module)
        found.append(kind)
        for name, value in held.items():
            if isinstance(value, _OPTION) or value is None or type(value) is int:
                found += (name, type(value), value)
            elif isinstance(value, (tuple, list, int)) and _is_option(value, True):
                found += (name, repr(value))
        for tensors in (torch_private.parameters_of(module), torch_private.buffers_of(module)):
            found += [
                (name, type(one), one.shape, one.dtype, one.requires_grad)
                for name, one in tensors.items()
                if one is not None
            ]
        found.append([name for name, _ in torch_private.children_of(module).items()])
    return found


def alike(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The names of the parameters that are the same on all ranks, and the parameters; the same object once."""
    for name, parameter in model.named_parameters():
        if not is_local(parameter):
            yield name, parameter


def first_difference(model: nn.Module, named: Iterable[tuple[str, Tensor]], comm: Ranks, label: str) -> str | None:
    """The sentence that the models differ, with what differs first; `None` if nothing does. Collective.

    Args:
        named: the parameters and buffers that are the same on every rank.
        label: names the call.
    """
    first, *others = [[*found, "nothing more"] for found in comm.all_gather_object([*_lines(model, named)], label)]
    for rank, other in enumerate(others, 1):
        for left, right in zip(first, other):
            if left != right:
                is_per_node = re.sub(r"\[\d+", "[", left) == re.sub(r"\[\d+", "[", right)
                hint = ", and take shardpass.NodeEmbedding(graph, width) for rows of own nodes" if is_per_node else ""
                return (
                    f"the models differ: {left} on rank 0, {right} on rank {rank}; build the same model on every "
                    f"rank{hint}"
                )
    return None


def refuse_unlike(model: nn.Module, comm: Ranks, buffers: Collection[str] = (), at_once: bool = True) -> None:
    """Raise on every rank unless ranks hold the same model. Collective. See [Note: the same model].

    Args:
        buffers: the names of those that are compared.
        at_once: compare numbers of a model on a device as they are now, and not as they were in the call before.

    Raises:
        DivergenceError: an option of a layer, a training mode, or what a parameter or buffer is, differs between ranks;
            or its values do.
    """
    if comm.size == 1:
        return
    label = "the same model on every rank"
    compared = {name for name in buffers if not name.endswith(_COUNTS_BATCHES)}
    named = [*alike(model), *(found for found in model.named_buffers() if found[0] in compared)]
    tensors, last = [tensor for _, tensor in named], comm.caches.of(_LastCall, model)
    words = last.digest(model, named) >> 10  # so many bits are exact in float64
    is_late = not at_once and comm.device.type != "cpu"
    rooms = [_UNLIKE if one.is_floating_point() or one.is_complex() else 0.0 for one in tensors]
    for some_wait in (False, True):
        numbers = last.numbers(_numbers(tensors, comm.device), at_once or some_wait)
        room = numbers[:, 1:] * torch.tensor(rooms, dtype=torch.float64)[:, None]
        first = torch.tensor([[words, is_late, 0]], dtype=torch.float64)
        every = torch.stack(comm.all_gather(torch.cat([first, torch.cat([numbers, room], 1)]), label))
        if bool((every[:, 0, 1] == every[0, 0, 1]).all()):  # or else their numbers are of different calls
            break
    found, room = every[:, 1:, :2], every[:, 1:, 2:].amin(0)
    is_same = (found == found[0]) | (found.isnan() & found[0].isnan()) | ((found - found[0]).abs() <= room)
    alike_in_words, alike_in_numbers = torch.stack([(every[:, 0, 0] == every[0, 0, 0]).all(), is_same.all()]).tolist()
    if not alike_in_words:
        raise DivergenceError(
            f"{first_difference(model, named, comm, label)}, and change it on every rank alike, its training mode too. "
            f"What is a rank's own belongs outside of the model, or into an attribute whose name begins with _"
        )
    for rank, number in () if alike_in_numbers else (~is_same.all(2)).nonzero().tolist():
        name, tensor = named[number]
        raise DivergenceError(
            f"{'parameter' if isinstance(tensor, nn.Parameter) else 'buffer'} {name!r} is not the same on rank 0 and "
            f"rank {rank}. To wrap the model makes it the same. If it is wrapped, something has changed it since: "
            f"load_state_dict() on some ranks only, or reset_parameters(), for which each rank has random numbers of "
            f"its own. Load on every rank, or before wrap; reset in `with shardpass.seed(number, comm):`; or call "
            f"shardpass.sync_parameters(model, comm) after it. Or a rank takes other steps than the others; or the "
            f"parameter meets rows outside of the model, where its gradient is not summed: do that in a method of it"
        )


def _lines(model: nn.Module, named: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
    """What is the same on every rank, in words: parameters and buffers without their values, and options."""
    for name, parameter in model.named_parameters():
        if is_local(parameter):
            yield f"{name}: {dtype_name(parameter.dtype)}, rows of own nodes of shape {[*parameter.shape[1:]]}"
    for name, tensor in named:
        is_frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
        yield f"{name}: {describe(tensor)}{' without a gradient' if is_frozen else ''}"
    yield "no more parameters"
    for path, module in model.named_modules():
        kind = type(module)
        yield f"{path or 'the model'}: {kind.__name__}"
        has_own_rows = any(map(is_local, module.parameters(recurse=False)))
        is_library = kind.__module__.partition(".")[0] in LIBRARIES and not has_own_rows
        for name, value in sorted(vars(module).items()):
            if (is_library or name[0] != "_") and name != _ADDRESS and _is_option(value, is_library):
                yield f"{path}.{name} = {value!r}"


def _is_option(value: Any, is_library: bool) -> bool:
    """Whether it is plain. Whole numbers and lists on a user's own module may be of this rank: its rows, its times."""
    if value is None or isinstance(value, _OPTION):
        return True
    if isinstance(value, (tuple, list) if is_library else tuple):
        return all(_is_option(entry, is_library) for entry in value)
    return is_library and isinstance(value, int)


def _numbers(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """The sum and the norm of the values of each tensor, ``[len(tensors), 2]``."""
    plain = [torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach() for tensor in tensors]
    values = [value if value.is_floating_point() else value.double() for value in plain]
    double = torch.float64
    found = [n for v in values for n in (v.sum(dtype=double), torch.linalg.vector_norm(v, dtype=double))]
    if not found:
        return torch.zeros((0, 2), dtype=double, device=device)
    return torch.stack([number.to(device) for number in found]).view(-1, 2)
