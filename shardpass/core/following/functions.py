"""What of a model is followed as whole functions: what takes rows out of torch, or counts them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardpass.core.following.call import Made
from shardpass.core.following.failing import explained_failure
from shardpass.core.following.follow import FollowRows
from shardpass.core.following.gradients import follow_function, followed_hook, gradients_taken
from shardpass.core.following.judge import composed
from shardpass.core.following.literal_places import PLACES, bounds_of, check_places
from shardpass.core.following.made_rows import RESHAPES, MadeRows
from shardpass.core.following.origin import Origin
from shardpass.core.following.own_numbers import is_own_number
from shardpass.core.following.refusals import Mixture, counts_for_each_rank, state_beside_rows, whole_beside_rows
from shardpass.core.following.row_count import OwnCount, OwnShape, leaves_of, own_of, plain_sizes
from shardpass.core.following.rows import Rows
from shardpass.core.following.user_line import is_asked_by, is_called_by, user_line
from shardpass.core.ranks import FollowedTensor, is_made_of_parameters, plain_of, torch_private
from shardpass.errors import RefusedError

_LEAVES_TORCH = frozenset(
    "untyped_storage storage tolist numpy __array__ __iter__ __len__ __dlpack__ _shape_as_tensor".split()
)
READS = _LEAVES_TORCH | frozenset("item __bool__ __int__ __float__ __index__ is_nonzero equal allclose".split())
_CONSTRUCTS = frozenset("tensor as_tensor asarray new_tensor".split())
_TAKES_SIZES = frozenset(
    "zeros ones empty rand randn eye arange range randperm new_zeros new_ones new_empty view reshape unflatten expand "
    "broadcast_to repeat tile repeat_interleave narrow slice_scatter split split_with_sizes tensor_split unsafe_split "
    "unsafe_split_with_sizes chunk sum_to_size as_strided set_ sparse_coo_tensor sparse_csr_tensor resize_ "
    "empty_strided new_empty_strided bincount affine_grid affine_grid_generator "
    "__get__ size numel nelement stride __format__ __repr__".split()
)
"""Functions whose numbers are sizes, or places where rows begin and end. Elsewhere a number is a value."""
_SIZES_AT = {
    "full": (0, "size"), "new_full": (1, "size"), "randint": (-1, "size"), "normal": (2, "size"),
    "pad": (1, "pad"), "layer_norm": (1, "normalized_shape"), "rms_norm": (1, "normalized_shape"),
}  # fmt: skip
"""Functions that take values beside sizes: where the sizes stand among the arguments, and their name."""


def _einsum(equation: str, *operands: Any) -> Any:
    return torch.ops.aten.einsum(equation, [*leaves_of(operands)])


ADDS = frozenset("add add_ sub sub_ stack cat __add__ __radd__ __iadd__ __sub__ __rsub__ __isub__".split())
_BY_SYMBOL: dict[str, Callable[..., Any]] = {
    "einsum": _einsum,
    "multi_head_attention_forward": F.multi_head_attention_forward,
}
"""Functions composed of other operations by the sizes: of one row otherwise than of many."""


class FollowFunctions(TorchFunctionMode):
    """While it is on, rows cannot leave torch, and nothing is computed from their number.

    Args:
        follower: knows which tensors hold rows.
    """

    def __init__(self, follower: FollowRows) -> None:
        super().__init__()
        self.follower = follower
        self.made = MadeRows(follower)
        self._is_within = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        leaves = [*leaves_of((args, [*kwargs.values()]))]
        if held := [leaf for leaf in leaves if isinstance(leaf, FollowedTensor)]:  # which the model holds
            for leaf in [one for one in held if one.plain not in self.follower.marks.rows]:
                leaf.around.tell(self.follower.marks, leaf.plain)
            args, kwargs = torch_private.tree_map(plain_of, (args, kwargs))
            return self.__torch_function__(func, (), args, kwargs)
        for leaf in leaves:
            self.note_function(leaf)
        if self.follower.is_paused:
            return func(*plain_sizes(args), **{key: plain_sizes(value) for key, value in kwargs.items()})
        with self.follower.marks.remembered(), self.follower.in_function(name):
            return self._function(func, name, types, args, kwargs)

    def __enter__(self) -> FollowFunctions:
        self._is_within, self.follower.sees_functions = self.follower.sees_functions, True
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *error: Any) -> None:
        self.follower.sees_functions = self._is_within
        super().__exit__(*error)

    def _function(self, func: Any, name: str, types: Any, args: Any, kwargs: Any) -> Any:
        self._recognise((args, kwargs))
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if func is torch.autograd.grad:
            return gradients_taken(self.follower, self.is_alike, self._rows_of, args, kwargs)
        if name == "register_hook" and first is not None:
            return func(first, followed_hook(self.follower, self.block, args[1], self._rows_of(first)))
        self._check_given(name, first, args, kwargs)
        is_whole = self._check_whole(name, (args, kwargs))
        if name == "__setitem__" and type(first) is Tensor and self._is_put_by_mask(*args[1:]):
            func, name, args = torch.Tensor.index_put_, "index_put_", (first, (args[1],), args[2].to(first.dtype))
        if name in _BY_SYMBOL and (out := self._by_symbol(func, name, args, kwargs)) is not None:
            return out
        is_cut = name in PLACES and type(first) in (Tensor, nn.Parameter) and self._is_cut(name, args, kwargs)
        is_cut |= name == "arange" and any(isinstance(one, OwnCount) for one in (*args, *kwargs.values()))
        sizes, given = self.made.sizes(name, args, kwargs), (args, kwargs)
        args, kwargs = plain_sizes(args), {key: plain_sizes(value) for key, value in kwargs.items()}
        try:
            out = func(*args, **kwargs) if name != "one_hot" else self._one_hot(func, args, kwargs)
        except torch_private.RecomputationStops:
            raise
        except Exception as error:  # of any class: functions written in Python check what they are given
            told = explained_failure(self.follower, name, func, *given, error)
            if told is error:
                raise
            raise told from error
        if isinstance(out, OwnCount):  # what stands for an edge_index has told it
            return out
        if any(issubclass(kind, Tensor) and kind not in (Tensor, nn.Parameter) for kind in types):
            self.follower.recognise(out, (args, kwargs))  # a stand-in of the engine's has made it
        if name == "__deepcopy__" and first is not None and (rows := self._rows_of(first)) is not None:
            self.follower.marks.mark(out, rows)  # torch copies the memory, and makes no operation of it
        if first is not None and (name in ("numel", "nelement", "stride") or func == torch_private.NBYTES):
            return self._measured(first, out, name == "stride", (*args[1:], *kwargs.values()))
        if first is not None and (name == "size" or (name == "__get__" and isinstance(out, torch.Size))):
            return self._counted(first, (*args[1:], *kwargs.values()), out)
        if is_cut and isinstance(out, Tensor) and self.follower.marks.rows_of(out) is None:
            self.follower.marks.origins[out] = Origin.NUMBERS
        self._note_made(name, args, kwargs, sizes, out)
        if is_whole:
            self.follower.mark_whole(out)
        return out

    def _check_whole(self, name: str, given: Any) -> bool:
        """Whether values of all rows are `given`, and no rows. Refuse both.

        The gradient of a value of all rows is that of this rank's share. Rows would get, and give, a part of it. Around
        a model nobody sums the gradients that a parameter gets of rows, and what all ranks compute alike would count
        once for each of them.
        """
        marks, tensors = self.follower.marks, [leaf for leaf in leaves_of(given) if isinstance(leaf, Tensor)]
        wholes = [one for one in tensors if one in marks.whole and one.requires_grad]
        is_raw = marks.is_around and marks.has_raw_parameter
        is_alike = marks.is_around and marks.has_alike
        if not wholes and not is_raw and not is_alike:
            return False
        mixed = any(marks.mixtures.get(one) is not None for one in tensors)
        rows = any(marks.rows_of(one) is not None and (one.requires_grad or is_raw) for one in tensors)
        if is_raw and name == "copy_":
            marks.check_result(tensors)
        if (wholes or is_raw) and (rows or (mixed and name not in ADDS)):
            raise (whole_beside_rows if wholes else state_beside_rows)(user_line(), name)
        if is_alike and (wholes or (mixed and name in ADDS)):
            raise counts_for_each_rank(user_line())
        return bool(wholes) and not mixed

    def is_alike(self, tensor: Tensor) -> bool:
        """Whether every rank has the same `tensor`, with a gradient of its own: it is made of sums over all ranks."""
        marks = self.follower.marks
        if not tensor.requires_grad or not marks.known or tensor in marks.whole or tensor in marks.mixtures:
            return False
        return marks.rows_of(tensor) is None and not is_made_of_parameters(tensor)

    def _note_made(self, name: str, args: Any, kwargs: Any, sizes: list[Any], out: Any) -> None:
        """Note what is known of a result by the sizes that the function was given."""
        is_plain = type(out) is Tensor and bool(args) and type(args[0]) in (Tensor, nn.Parameter)
        if name in RESHAPES and is_plain and sizes and not isinstance(sizes[0], torch.dtype):
            self.made.note_reshaped(name, args, kwargs, sizes, out)
        elif name not in RESHAPES:
            self.made.note(name, args, kwargs, sizes, out)
        if name in _CONSTRUCTS:
            self.follower.marks.adopt(out)
        is_divided = name == "kl_div" and "batchmean" in leaves_of((args, [*kwargs.values()]))
        if is_divided and (mixture := self.follower.marks.mixtures.get(out)) is not None:  # a sum, which torch divides
            self.follower.marks.mixtures.add(out, replace(mixture, name=name, is_sum=False))

    def _check_given(self, name: str, first: Tensor | None, args: Any, kwargs: Any) -> None:
        """Refuse what takes rows out of torch, or computes with their number, and ``backward``."""
        if name == "backward":
            raise RefusedError(
                f"{user_line()}: the model calls backward within its forward, which adds this rank's part to `.grad`. "
                f"Use torch.autograd.grad, which returns the gradients of the whole graph"
            )
        if first is not None and name in _LEAVES_TORCH:
            self._check_leaving(name, first)
        mixture = None if first is None else self.follower.marks.mixtures.get(first)
        if mixture is not None and name == "contiguous" and is_called_by("dgl.backend"):  # for a kernel of DGL's
            raise mixture.refusal()
        if first is None or type(first) in (Tensor, nn.Parameter):  # others tell themselves what they are asked
            self._check_numbers(name, args, kwargs)
        if name in _CONSTRUCTS:
            for one in leaves_of((*args, *kwargs.values())):
                self.follower.marks.check_result(one)

    def _is_cut(self, name: str, args: Any, kwargs: Any) -> bool:
        """Whether a tensor without rows is cut at the number of own rows. Refuse plain numbers as places of rows."""
        rows, bounds = self._rows_of(args[0]), [*bounds_of(name, args, kwargs)]
        if self.follower.marks.origins.get(args[0]) == Origin.FREE:  # as of the edges that dropout keeps
            return False
        if rows is None:
            told = self.follower.marks.made_of_counts
            return any(isinstance(bound, OwnCount) or (type(bound) is int and bound in told) for _, bound in bounds)
        check_places(bounds, args[0], rows, self.follower.marks.made_of_counts)
        return False

    def _is_put_by_mask(self, key: Any, value: Any) -> bool:
        """Whether rows are written where a mask picks rows; torch would drop the dimension of one row."""
        is_mask = isinstance(key, Tensor) and key.dtype == torch.bool
        return is_mask and type(value) is Tensor and self._rows_of(value) is not None

    def block(self) -> FollowedBackward:
        """A block of backward whose operations are followed."""
        return FollowedBackward(self.follower)

    def note_function(self, leaf: Any) -> None:
        """Follow the backward of an autograd function of the user's that has made `leaf`."""
        if type(leaf) is Tensor and leaf.grad_fn is not None:  # others would compute themselves
            follow_function(self.follower, self.block, leaf, self.follower.marks.rows_of(leaf))

    def _by_symbol(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """What a function returns, judged as a whole; `None` if its operations are to be judged one by one."""
        leaves, structure = torch_private.tree_flatten((args, kwargs))
        tensors = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        rows = {i: found for i, leaf in tensors.items() if (found := self._rows_of(leaf)) is not None}
        marks = self.follower.marks
        if not rows or any(found.points_to for found in rows.values()) or _draws(func, args, kwargs):
            return None
        if any(type(leaf) not in (Tensor, nn.Parameter) or leaf in marks.mixtures for leaf in tensors.values()):
            return None
        known = [(i, found.dim, found.outer, found.inner, found.of) for i, found in rows.items()]
        given = [(*leaf.shape,) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves]
        key = name, *given, *known
        if key not in marks.verdicts:
            with self.follower.paused():
                marks.verdicts[key] = composed(_BY_SYMBOL[name], leaves, structure, rows)
        verdict, first = marks.verdicts[key], next(iter(rows.values()))
        if verdict.reason:
            return None
        with self.follower.paused():
            outs = func(*args, **kwargs)
        for out, found in zip((leaf for leaf in leaves_of(outs) if isinstance(leaf, Tensor)), verdict.found):
            if isinstance(found, Rows):
                marks.mark(out, found)
            else:
                marks.mixtures.add(out, Mixture(name, user_line(), first.of, found is Made.SUM, marks.remedy))
        return outs

    def _check_number(self, number: Any) -> None:
        """Refuse a plain number that was made of how many rows this rank has, which ``len`` gives away."""
        if (
            isinstance(number, (int, float))
            and not isinstance(number, bool)
            and number in self.follower.marks.made_of_counts
        ):
            raise _of_own_rows(number)

    def _recognise(self, given: Any) -> None:
        if not self.follower.marks.is_around:  # where each operation looks which of its operands may have rows
            with self.follower.paused():
                self.follower.marks.recognise(given)

    def _rows_of(self, tensor: Tensor) -> Rows | None:
        self._recognise(tensor)
        return self.follower.marks.rows_of(tensor)

    def _check_leaving(self, name: str, tensor: Tensor) -> None:
        """Refuse what takes rows out of torch, and note how many of them ``len`` gives away."""
        if name == "untyped_storage" and is_asked_by("dgl.", "shardpass.", "torch."):  # whether two tensors share it
            return
        if name != "__len__":
            self.follower.marks.check_result(tensor)
        if (rows := self._rows_of(tensor)) is None or (name == "__iter__" and rows.dim):
            return
        if name != "__len__":
            raise RefusedError(
                f"{user_line()}: `{name}` takes {rows.of.name} out of torch, where nobody can follow what becomes of "
                f"them. This rank holds a part of them, and the result may differ from that of the whole graph"
            )
        if self.follower.marks.in_full(rows.of).total != rows.size:
            self.follower.marks.note_count(rows.size)

    def _check_numbers(self, name: str, args: Any, kwargs: Any) -> None:
        """Refuse numbers of this rank's rows where they are no sizes."""
        if name in _TAKES_SIZES:
            return
        given = [*args, *kwargs.values()]
        if name in ("__getitem__", "__setitem__"):
            given = [part for part in leaves_of([*args[1:]]) if not isinstance(part, slice)]
        elif name in _SIZES_AT:
            place, key = _SIZES_AT[name]
            sizes = (*args[place:][:1], kwargs.get(key))
            given = [one for one in given if not any(one is size for size in sizes)]
        for number in leaves_of(given):
            if isinstance(number, OwnCount):
                number.refuse()
            if is_own_number(number):
                raise _of_own_rows(number)
            self._check_number(number)

    def _one_hot(self, func: Any, args: Any, kwargs: Any) -> Any:
        """With a number of classes, it looks at all rows only to check them."""
        rows = self._rows_of(args[0]) if args else None
        if len(args) < 2 and kwargs.get("num_classes", -1) == -1:
            if rows is not None:
                raise RefusedError(
                    f"{user_line()}: `one_hot` without num_classes takes the largest number that the {rows.of.name} of "
                    f"this rank have. Pass num_classes, such as graph.num_classes"
                )
            return func(*args, **kwargs)
        with self.follower.paused():
            out = func(*args, **kwargs)
        if rows is not None:
            self.follower.mark(out, rows.of, rows.dim)
        return out

    def _measured(self, tensor: Tensor, out: Any, is_stride: bool, dims: Any) -> Any:
        """A number of entries or bytes, or strides: numbers of rows where the number of rows is a factor of them."""
        rows = self._rows_of(tensor)
        if rows is None:
            return out
        if not is_stride:
            return self.follower.count_of(rows.of, own_of(out))
        per_row = tensor.stride(rows.dim)
        of_rows = [self.follower.count_of(rows.of, one) if one > per_row else one for one in tensor.stride()]
        return of_rows[dims[0]] if dims and dims[0] is not None else tuple(of_rows)

    def _counted(self, tensor: Tensor, dims: Any, out: Any) -> Any:
        if (rows := self._rows_of(tensor)) is None or rows.size != rows.of.count:
            return out
        count = self.follower.count_of(rows.of)
        count.is_of_tensor = True
        if isinstance(out, torch.Size):
            return OwnShape(count if dim == rows.dim else size for dim, size in enumerate(out))
        return count if dims and dims[0] % tensor.dim() == rows.dim else out


class FollowedBackward:
    """A block of backward whose operations are followed. If it never ends, because backward failed, nothing ends it."""

    def __init__(self, follower: FollowRows) -> None:
        self.follower, self.functions = follower, FollowFunctions(follower)

    def __enter__(self) -> None:
        self._was_paused, self.follower.is_paused = self.follower.is_paused, False
        self._comes = not any(mode is self.follower for mode in torch_private.dispatch_modes())
        if self._comes:
            self.follower.__enter__()
        self.functions.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.functions.__exit__(*error)
        if self._comes:
            self.follower.__exit__(*error)
        self.follower.is_paused = self._was_paused


def _of_own_rows(number: float) -> RefusedError:
    return RefusedError(
        f"{user_line()}: computes with {number}, which is made of how many rows this rank holds, and differs on the "
        f"whole graph. Use the numbers of the whole graph (graph.total_nodes, graph.total_edges)"
    )


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether attention drops some of its weights."""
    if func is not F.multi_head_attention_forward:
        return False
    given = inspect.signature(func).bind(*args, **kwargs).arguments
    return bool(given.get("training", True)) and given["dropout_p"] > 0
