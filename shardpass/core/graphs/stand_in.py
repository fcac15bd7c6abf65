"""What the stand-ins for ``edge_index`` and ``batch`` share, and the questions that they answer as any tensor does."""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from shardpass.core.exchange import HaloPlan
from shardpass.core.following import OwnShape, RowCount, user_line
from shardpass.core.graphs.given import as_given
from shardpass.core.ranks import FollowedTensor, HoldsEdges, RowSet, torch_private
from shardpass.errors import InternalError, RefusedError

S = TypeVar("S", bound="StandIn")

_DESCRIBES = frozenset(
    "size dim numel nelement stride __len__ is_floating_point is_complex is_signed ndimension element_size get_device "
    "is_contiguous data_ptr __hash__ storage_offset is_inference new_ones new_zeros new_full new_empty ones_like "
    "zeros_like full_like empty_like rand_like requires_grad_ is_same_size".split()
)
_PROPERTIES = frozenset(
    "shape dtype device layout is_cuda is_cpu is_sparse is_sparse_csr is_quantized is_meta is_mps is_nested is_mkldnn "
    "is_xpu is_vulkan is_ipu ndim requires_grad is_leaf grad_fn grad itemsize nbytes names output_nr _version".split()
)
PRINTS = frozenset(["__repr__", "__str__", "__format__"])


_TO_A_SIZE = frozenset("item __int__ __index__ tolist to cpu long int detach".split())
_COMPARES = frozenset("lt le gt ge eq ne __lt__ __le__ __gt__ __ge__ __eq__ __ne__".split())


class StandIn(Tensor):
    """A tensor of a sharded graph whose numbers mean something else on every rank. It carries out few operations.

    Attributes:
        counts_last: its last dimension counts edges.
        reduces: scatters by it take in the rows of all ranks.
    """

    counts_last = reduces = False

    @property
    def plain(self) -> Tensor:
        """The numbers as they look from outside, as an ordinary tensor."""
        raise NotImplementedError

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} belongs to its process; save the store's path instead")

    def __copy__(self: S) -> S:
        return self

    def __deepcopy__(self: S, memo: dict[int, Any]) -> S:
        return self

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "materialise") or issubclass(kind, FollowedTensor) for kind in types):
            return NotImplemented  # it computes its own values on this use, or stands for another, and asks again
        return cls.answer(func, getattr(func, "__name__", ""), args, kwargs or {})

    @classmethod
    def answer(cls, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the torch function `func` of this name returns.

        Raises:
            RefusedError: it would depend on the numbers.
        """
        raise NotImplementedError


def first_of(kind: type[S], args: tuple[Any, ...], kwargs: dict[str, Any]) -> S:
    """The first argument of this class, also within lists and tuples."""
    for arg in (*args, *kwargs.values()):
        for leaf in arg if isinstance(arg, (list, tuple)) else (arg,):
            if isinstance(leaf, kind):
                return leaf
    raise InternalError(f"a function was intercepted that was given no {kind.__name__}")


def describes(func: Any) -> bool:
    """Whether a torch function only describes a tensor, and its result does not depend on the numbers in it."""
    name = getattr(func, "__name__", "")
    return name in _DESCRIBES or (
        name == "__get__" and getattr(getattr(func, "__self__", None), "__name__", "") in _PROPERTIES
    )


def as_tensor(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `func`, which only describes a tensor, says of a stand-in among its arguments."""
    with torch_private.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


class EdgeListCount(RowCount):
    """The size of what stands for ``edge_index``. Whether it is 0 is refused where `NoneHere` could not answer."""

    def __eq__(self, other: object) -> Any:
        if type(other) is int and other == 0 and self.of.total is not None:
            raise RefusedError(
                f"{user_line()}: whether there are {self.own} {self.of.name} is asked of this rank, which has a part "
                f"of them. Ask `> 0`, which is answered for all ranks, or leave it out: layers take lists without edges"
            )
        return super().__eq__(other)

    __hash__ = RowCount.__hash__  # type: ignore[assignment]


class NoneHere(int):
    """The number 0 of a rank without edges, where other ranks have some: it is 0 as a size, but no branch takes it so.

    What is equal to 0 is left, since sizes are compared so too.
    """

    def __bool__(self) -> bool:
        return True

    def __gt__(self, other: int) -> bool:
        return other < 1

    def __ge__(self, other: int) -> bool:
        return other <= 1

    def __lt__(self, other: int) -> bool:
        return other > 1

    def __le__(self, other: int) -> bool:
        return other >= 1


def counted_last(out: Any, name: str, args: tuple[Any, ...], of: RowSet, is_operand: bool = False) -> Any:
    """`out`, which describes a tensor whose last dimension is `of`: their number may be a size, but no operand.

    Args:
        is_operand: there are none, and nobody follows it, so it may be one; but whether there are any is answered for
            all ranks.
    """
    if is_operand and not of.total:
        return out
    count: Any = NoneHere() if is_operand else EdgeListCount(of.count, of)
    if isinstance(out, torch.Size):
        return OwnShape([*out[:-1], count])
    if name in ("numel", "nelement"):
        return count if is_operand else EdgeListCount(out, of)
    return count if name == "size" and args[1:] in ((1,), (-1,)) else out


class LargestId(Tensor):
    """What ``edge_index.max()`` gives: the number of own nodes less one, which may become a size, but no operand."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        with torch_private.DisableTorchFunctionSubclass():
            if name in PRINTS or name in _TO_A_SIZE or describes(func):
                return func(*args, **(kwargs or {}))
            if len(args) == 2 and isinstance(args[0], LargestId) and type(args[1]) is int:
                if name in ("add", "__add__", "__radd__") and args[1] == 1:
                    return func(*args).as_subclass(LargestId)
                if name in _COMPARES and abs(int(args[0]) - args[1]) < 2:  # with the number of own nodes
                    return func(*args)
        raise RefusedError(
            f"{user_line()}: `{name}` computes with the largest id, but ids are numbered per rank. It may only become "
            f"a size, as in int(edge_index.max()) + 1. For the number of nodes of the whole graph use graph.total_nodes"
        )


def largest(found: Any, is_asked_by_user: bool) -> Any:
    """The largest id `found`, as code of the user's or of a library gets it."""
    return found.as_subclass(LargestId) if is_asked_by_user and found.dim() == 0 else found


def marked(mine: StandIn, out: Any, plan: HaloPlan, name: str = "") -> Any:
    """`out`, of which the engine says what its rows are: numbers of destinations, or something of each edge.

    Args:
        mine: a list of edges, or source rows, of which the function `name` has made it.
    """
    if name == "max":
        return largest(out, plan.comm.runs_user_code)
    if not plan.comm.is_followed and plan.comm.forward is not None:
        return out
    with torch_private.DisableTorchFunctionSubclass():
        count = mine.size(-1)
        for tensor in out if isinstance(out, tuple) else (out,):
            if type(tensor) is Tensor:
                plan.comm.forget_rows(tensor)
            if isinstance(tensor, Tensor) and not isinstance(tensor, HoldsEdges) and count in tensor.shape:
                is_row = isinstance(mine, HoldsEdges) and type(tensor) is Tensor and tensor.dim() == 1
                dim = [*tensor.shape].index(count)
                plan.comm.mark_rows(tensor, plan.edge_set(count), dim, points_to=plan.dst_set if is_row else None)
    return torch_private.tree_map(lambda one: as_given(one, plan.comm) if type(one) is Tensor else one, out)
