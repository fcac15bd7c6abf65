"""What is known of tensors: where they hold rows, where those without come from, which were made of several rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardpass.core.following.left_behind import tensors_within
from shardpass.core.following.origin import Origin
from shardpass.core.following.refusals import ALL_ROWS, AROUND, LOSS, Mixture, check_plain, refusal
from shardpass.core.following.rows import Rows
from shardpass.core.following.user_line import user_line
from shardpass.core.ranks import HoldsEdges, RowSet, is_parameter, leaves_within, torch_private
from shardpass.errors import RefusedError

_MASKS = 8
"""How many masks are remembered. The same mask picks the same rows, of labels and of results, in any call."""

Known = tuple[Rows | None, Origin | None, bool | None]
"""What is known of a tensor: where it holds rows, where it comes from if it has none, whether it is of all rows."""


class Mixtures:
    """Tensors that were made of several rows, by their memory: what is a view or another name of one is one too."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[Any, Mixture]] = {}

    def get(self, tensor: Tensor) -> Mixture | None:
        """What `tensor` was made of; `None` if it is no mixture."""
        if not self._found or (place := torch_private.storage_of(tensor)) is None:
            return None
        memory, mixture = self._found.get(place[0], (None, None))
        return None if memory is None or memory.expired() else mixture

    def add(self, tensor: Tensor, mixture: Mixture) -> None:
        """Note that `tensor` is one."""
        if (place := torch_private.storage_of(tensor)) is not None:
            self._found[place[0]] = place[1], mixture

    def pop(self, tensor: Tensor, default: None = None) -> None:
        """Note that `tensor` is none."""
        if self._found and (place := torch_private.storage_of(tensor)) is not None:
            self._found.pop(place[0], default)

    def prune(self) -> None:
        """Forget tensors that are gone."""
        self._found = {number: kept for number, kept in self._found.items() if not kept[0].expired()}

    def __contains__(self, tensor: Tensor) -> bool:
        return self.get(tensor) is not None

    def __bool__(self) -> bool:
        return any(not memory.expired() for memory, _ in self._found.values())


@dataclass
class Marks:
    """What is known of tensors, for as long as they live.

    Attributes:
        rows: where they hold rows.
        origins: where tensors without rows come from.
        drawn: tensors without rows that random numbers of this rank went into.
        mixtures: what they are made of that were made of several rows.
        known: the sets of rows that tensors from outside are recognised by, by their number of rows.
        by_name: the sets by the names of their types, under which mappings hold their rows.
        verdicts: what was found out of operations, by operation and shapes.
        refusals: what the model was refused in this forward. It may have caught the error and gone on.
        is_around: what runs is no code of the model's, but made of what it returned.
        near: the only sets that plain tensors are recognised by; `None` if it is all of `known`.
        refused: why what a script has made of results may not be differentiated.
        has_alike: a script gives what all ranks compute alike to the function that runs.
        has_raw_parameter: a script gives a parameter to the function that runs, or what is made of one.
        selections: masks, the last ones first, with the sets that they pick; shared by all that follows on a rank.
        whole: values of all rows, whose gradient is that of this rank's share.
        is_in_loss: a loss function of torch's is running.
        made_of_counts: numbers that are made of how many rows this rank has, which ``len`` and ``max`` gave away.
    """

    rows: MutableMapping[Tensor, Rows] = field(default_factory=torch_private.WeakTensorKeyDictionary)
    origins: MutableMapping[Tensor, Origin] = field(default_factory=torch_private.WeakTensorKeyDictionary)
    drawn: MutableMapping[Tensor, bool] = field(default_factory=torch_private.WeakTensorKeyDictionary)
    mixtures: Mixtures = field(default_factory=Mixtures)
    known: list[RowSet] = field(default_factory=list)
    by_name: dict[Any, RowSet] = field(default_factory=dict)
    verdicts: dict[Any, Any] = field(default_factory=dict)
    made_of_counts: set[float] = field(default_factory=set)
    refusals: list[RefusedError] = field(default_factory=list)
    refused: MutableMapping[Tensor, RefusedError] = field(default_factory=torch_private.WeakTensorKeyDictionary)
    near: list[RowSet] | None = None
    is_in_loss: bool = False
    is_around: bool = False
    has_alike: bool = False
    has_raw_parameter: bool = False
    whole: MutableMapping[Tensor, bool] = field(default_factory=torch_private.WeakTensorKeyDictionary)
    selections: list[tuple[Tensor, int, RowSet]] = field(default_factory=list)

    @property
    def remedy(self) -> str:
        """What to do in the place of what puts rows together, if that depends on where it stands."""
        return AROUND if self.is_around else LOSS if self.is_in_loss else ""

    def note_count(self, count: int) -> None:
        """Note that the model was told the number of own rows as a plain `int`."""
        near = [n for n in (count - 1, count, count + 1) if n > 0]
        made = {number for n in near for number in (math.sqrt(n), math.log(n), math.log2(n), 1 / n, n**-0.5)}
        self.made_of_counts |= {number for number in made if round(number, 6) != number}  # not 0.1, which may be any
        if count > 1:
            self.made_of_counts.add(count)

    def note_state(self, model: nn.Module) -> None:
        """Note that parameters and buffers of a model are no rows."""
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor not in self.rows:
                self.origins[tensor] = Origin.STATE

    def note_made_of_state(self, made: Any) -> None:
        """Note that tensors are made of parameters and buffers only."""
        for leaf in torch_private.tree_leaves(made):
            if isinstance(leaf, Tensor) and leaf not in self.rows:
                self.origins[leaf] = Origin.STATE

    def mark(self, tensor: Tensor, rows: Rows) -> None:
        """Note where a tensor holds rows."""
        self.forget(tensor)
        self.rows[tensor] = rows

    def rows_of(self, tensor: Tensor) -> Rows | None:
        """Where a tensor holds rows, as far as that is known."""
        rows: Rows | None = self.rows.get(tensor)
        return rows if rows is not None and rows.fit(tensor) else None

    def forget(self, tensor: Tensor) -> None:
        """Know nothing of a tensor any more."""
        self.mixtures.pop(tensor)  # first, since it asks torch for memory, which is followed where code of a model runs
        for kept in (self.rows, self.origins, self.drawn):
            kept.pop(tensor, None)

    def known_of(self, tensor: Tensor) -> Known:
        """What is known of `tensor`, but for mixtures."""
        return self.rows.get(tensor), self.origins.get(tensor), self.whole.get(tensor)

    def know(self, tensor: Tensor, known: Known) -> None:
        """Know `known` of `tensor`, as far as it fits."""
        rows, origin, whole = known
        if rows is not None and rows.fit(tensor):
            self.rows[tensor] = rows
        if origin is not None:
            self.origins[tensor] = origin
        if whole is not None:
            self.whole[tensor] = whole

    def copy(self, tensor: Tensor, like: Tensor) -> None:
        """Know of `tensor`, which shares the memory of `like`, what is known of that."""
        self.know(tensor, self.known_of(like))

    def adopt_from(self, others: Marks, tensor: Tensor) -> None:
        """Know of `tensor` what the marks of another model know of it."""
        self.know(tensor, others.known_of(tensor))
        if tensor in others.refused:
            self.refused[tensor] = others.refused[tensor]
        if (mixture := others.mixtures.get(tensor)) is not None:
            self.mixtures.add(tensor, mixture)

    @contextmanager
    def remembered(self) -> Iterator[None]:
        """A block whose refusal is remembered: a model that catches it would go on with something else.

        A refusal that explains an error of torch is not: on a rank without rows the engine may mend that.
        """
        try:
            yield
        except RefusedError as error:
            if error.__cause__ is None:
                self.refusals.append(error)
            raise

    def check_refusals(self) -> None:
        """Raise the first refusal of this forward, which the model has caught."""
        if self.refusals:
            raise self.refusals[0]

    def end_forward(self) -> None:
        """Hold no longer what only a forward that has ended needs, and tensors that are gone."""
        self.refusals.clear()
        self.made_of_counts.clear()
        self.mixtures.prune()

    def adopt(self, value: Any) -> None:
        """Note that the tensors in `value` of which nothing is known are constants, made of plain numbers."""
        for leaf in torch_private.tree_leaves(value):
            if isinstance(leaf, Tensor) and not self._is_known(leaf):
                if self.is_filled(leaf):
                    self._recognise(leaf, ())
                else:
                    self.origins[leaf] = Origin.CONSTANT

    def recognise(self, value: Any, among: Sequence[RowSet] = (), is_given: bool = False) -> None:
        """Recognise the tensors in `value` by their sizes, where nothing is known of them.

        Args:
            among: the sets whose rows they may well hold, the likeliest first, where several sets have as many.
            is_given: the caller has given them, or the model keeps them, so that they may be arrays of NumPy's.
        """
        if isinstance(value, Mapping):
            for place, (name, one) in enumerate(value.items()):
                unnamed = among if place == 0 else ()
                self.recognise(one, [self.by_name[name]] if name in self.by_name else unnamed, is_given)
            return
        if isinstance(value, (tuple, list)) and any(isinstance(one, Mapping) for one in value):
            for one in value:
                self.recognise(one, among, is_given)
            return
        for place, leaf in enumerate(leaves_within(value)):
            if isinstance(leaf, Tensor) and not self._is_known(leaf):
                if is_given or not torch_private.is_foreign(leaf):
                    self._recognise(leaf, among if place == 0 else ())
                else:
                    self.origins[leaf] = Origin.CONSTANT

    def recognise_told(self, leaves: Sequence[Any]) -> None:
        """Recognise those of `leaves` of which the engine has told the rows."""
        for leaf in leaves:
            if isinstance(leaf, Tensor) and not self._is_known(leaf) and (told := _told(leaf)) is not None:
                self.rows[leaf] = told

    def _is_known(self, leaf: Tensor) -> bool:
        return not self.is_filled(leaf) and any(leaf in kept for kept in (self.rows, self.origins, self.mixtures))

    def is_filled(self, leaf: Tensor) -> bool:
        """Whether a kernel of another library has written into it, which torch does not see."""
        origin = self.origins.get(leaf)
        return origin == Origin.EMPTY or (origin == Origin.ZEROS and bool(leaf.any()))

    def _recognise(self, leaf: Tensor, among: Sequence[RowSet]) -> None:
        if is_parameter(leaf):
            self.origins[leaf] = Origin.STATE
            return
        if self.is_around and (told := _told(leaf)) is not None:
            self.rows[leaf] = told
            return
        among_these = self.known if self.near is None else self.near
        few = (0, 1) if self.is_around and leaf.dim() == 2 else (0,)  # in a script, which may have transposed them
        for dim in few if leaf.dim() < 3 else (0, -2, 1):  # [N, F], [B, N, F] and [B, N, T, F]
            fits = [known for known in among_these if leaf.dim() and known.count == leaf.size(dim)]
            likely = next((one for one in among if leaf.dim() and one.count == leaf.size(dim) > 0), None)
            if fits or likely is not None:
                of = likely or (fits[0] if len(fits) == 1 else RowSet.one_of(fits))
                self.rows[leaf] = Rows(dim % leaf.dim(), of)
                self.origins.pop(leaf, None)
                return
        self.origins[leaf] = Origin.CONSTANT

    def in_full(self, of: RowSet) -> RowSet:
        """The same set, with how many rows all ranks have if that is known."""
        return next((known for known in self.known if of.total is None and known == of), of)

    def sets_in(self, value: Any) -> list[RowSet]:
        """The sets whose rows the tensors in `value` are known to hold."""
        found = [self.rows.get(leaf) for leaf in torch_private.tree_leaves(value) if isinstance(leaf, Tensor)]
        return [rows.of for rows in found if rows is not None]

    def origin_of(self, operand: Tensor) -> Origin:
        """From what an operation takes a tensor without rows."""
        found = self.origins.get(operand, Origin.CONSTANT)
        if found == Origin.ZEROS:
            return Origin.CONSTANT
        if found == Origin.STATE and not {known.count for known in self.known}.intersection(operand.shape):
            return Origin.CONSTANT  # it has no entry per row, and nor has what is made of it
        return found

    def selection(self, mask: Tensor, of: RowSet, count: int) -> RowSet:
        """The `count` rows of a set that `mask` picks; the same set for the same mask."""
        before = of.count if of.picked_from is None else of.picked_from
        if of.is_of_edges:
            return RowSet(of.name, count, of.root, before)
        for place, (known, version, found) in enumerate(self.selections):
            same = known is mask or (known.shape == mask.shape and torch.equal(known.to(mask.device), mask))
            if same and found.picked_from == before and torch_private.version_of(known) == version:
                self.selections.insert(0, self.selections.pop(place))
                return found
        name = of.name if of.name.startswith("picked ") else f"picked {of.name}"
        found = RowSet(name, count, ("picked", object()), before)
        self.selections[:] = [(mask, torch_private.version_of(mask), found), *self.selections[: _MASKS - 1]]
        return found

    def check_result(self, result: Any) -> None:
        """Refuse a result of the model that was made of several rows."""
        for leaf in torch_private.tree_leaves(result):
            if isinstance(leaf, Tensor) and (mixture := self.mixtures.get(leaf)) is not None:
                raise mixture.refusal()

    def _check_relations(self, given: Any) -> None:
        """Refuse rows of edges beside a graph of other edges, which a layer takes for those of its own."""
        leaves = leaves_within(given)
        relations = {of.relation for of in self.known}  # not the union of several, which a model may put together
        held = [of for leaf in leaves if isinstance(leaf, HoldsEdges) for of in leaf.edge_sets]
        edges = [of for of in held if of.relation in relations]
        for of in self.sets_in(leaves):
            if edges and of.is_of_edges and all(of.is_other_than(other) for other in edges):
                raise RefusedError(
                    f"{user_line()}: rows of {of.name} of another relation than those of the graph that they are "
                    f"given with. Edges are numbered anew in each relation: pass fields of the edges themselves"
                )

    def _check_ends(self, given: Sequence[Any]) -> None:
        """Refuse rows of one type of nodes beside edges that begin or end at another, where a layer takes both."""
        ends = [leaf.end_sets for leaf in given if isinstance(leaf, HoldsEdges) and leaf.end_sets is not None]
        pairs = [one for one in given if isinstance(one, (tuple, list)) and len(one) == 2]
        if not pairs and (alone := next((one for one in given if isinstance(one, Tensor)), None)) is not None:
            pairs = [(alone, None)]  # rows of sources, whatever else the layer takes for those of destinations
        for value, of in [pair for one in pairs for pair in zip(one, ends[0])] if len(ends) == 1 else []:
            rows = self.rows.get(value) if isinstance(value, Tensor) else None
            if rows is not None and rows.of.is_other_type(of):
                raise RefusedError(f"{user_line()}: expected a row for each of the {of.name}, found {rows.of.name}")

    def _check_names(self, given: Any) -> None:
        """Refuse rows of one type, or edges between others, under a name by which a layer takes them."""
        for name, value in given.items() if isinstance(given, Mapping) else ():
            of, rows = self.by_name.get(name), self.rows.get(value) if isinstance(value, Tensor) else None
            if of is not None and rows is not None and rows.of.is_other_type(of):
                raise RefusedError(f"{user_line()}: rows of {rows.of.name} are given as {name!r}")
            ends = value.end_sets if isinstance(value, HoldsEdges) else None
            types = [self.by_name.get(end) for end in (name[0], name[-1])] if isinstance(name, tuple) else []
            for found, wanted in zip(ends or (), types):
                if wanted is not None and found.is_other_type(wanted):
                    raise RefusedError(
                        f"{user_line()}: {name!r} holds edges of another relation, which begin or end at {found.name}"
                    )

    def check_left_behind(self, *places: Any) -> None:
        """Refuse what was made of several rows and can be read after a forward, in what a model returned or kept."""
        for tensor in tensors_within(*places) if self.mixtures else ():
            self.check_result(tensor)

    def check_arguments(self, args: Any, kwargs: Any) -> None:
        """Refuse tensors among the arguments of a known module that have rows which are not those of the graph."""
        given = [*args, *kwargs.values()]
        self.check_result(given)
        unknown = [leaf for leaf in leaves_within(given) if isinstance(leaf, Tensor) and not self._is_known(leaf)]
        self.recognise(given)
        for leaf in unknown:  # library code that nobody follows may have put the rows of several sets together
            if (found := self.rows.get(leaf)) is not None:
                self.rows[leaf] = replace(found, of=replace(found.of, root=None))
        self._check_relations(given)
        self._check_ends(given)
        for one in given:
            self._check_names(one)
        weights = leaves_within(_called(kwargs, "weight"))
        for leaf in leaves_within(given):
            rows = self.rows_of(leaf) if isinstance(leaf, Tensor) else None
            if rows is not None and rows.dim == 1 and leaf.dim() == 2:
                raise refusal(
                    f"a layer is given the {rows.of.name} along dimension 1 of shape {[*leaf.shape]}", ALL_ROWS
                )
            if any(leaf is weight for weight in weights):
                continue  # a parameter of a layer that is given its own, whatever its size
            is_plain = type(leaf) is Tensor or isinstance(leaf, nn.Parameter)  # not what stands for edge_index
            if is_plain and leaf in self.origins and leaf.dim():
                of = next((rows for rows in self.known if leaf.size(0) in (rows.count, rows.total)), None)
                is_matrix = self.origins[leaf] == Origin.STATE and leaf.numel() > leaf.size(0)
                if of is not None and not (is_matrix and of.is_of_edges):  # a weight of as many rows by chance
                    check_plain(self.origins[leaf], leaf, 0, of)


def _called(kwargs: Any, name: str) -> list[Any]:
    """What keyword arguments hold under a name, in mappings of keyword arguments too."""
    found = []
    for key, value in kwargs.items():
        found += [value] if key == name else _called(value, name) if isinstance(value, dict) else []
    return found


def _told(leaf: Tensor) -> Rows | None:
    """The rows that the engine has told `leaf` to hold, or the tensor of which it is a view, when no model ran."""
    told = getattr(torch_private.base_of(leaf), "shardpass_rows", {}).get(leaf.storage_offset())
    if told is None:
        return None
    shape, of, dim, points_to = told
    if leaf.shape == shape:
        return Rows(dim, of, points_to=points_to)
    is_alike = dim == 0 and leaf.dim() > 0 and leaf.size(0) == shape[0]
    return Rows(0, of, points_to=points_to) if is_alike else None
