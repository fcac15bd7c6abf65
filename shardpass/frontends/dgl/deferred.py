"""Edge data that are computed when they are needed: what they are made of.

A `Deferred` can be computed in two ways, which give the same numbers: whole, by the calls that DGL code makes
(`value`), or for some edges inside a body of the engine (`rows`), so that no tensor with a row per edge exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from typing import Any

import torch
from dgl.backend import edge_softmax as dgl_edge_softmax
from torch import Tensor

from shardpass.core.aggregation import dropout_of_edges
from shardpass.core.tracing import Inputs, Program
from shardpass.errors import RefusedError
from shardpass.frontends.dgl.structure import Edges


class Deferred:
    """Edge data ``[num_edges, ...]`` that are not computed yet.

    Args:
        edges: whose data they are.
        parents: other edge data that they are made of.
        tensors: what else they are made of.
        sample: their values for one or two made-up edges: shape and dtype of a row.
    """

    def __init__(self, edges: Edges, parents: Iterable[Deferred], tensors: Iterable[Tensor], sample: Tensor) -> None:
        self.edges, self.sample = edges, sample.detach()
        self.parents, self._tensors = list(parents), list(tensors)
        self._versions = [t._version for t in self._tensors]
        self.conditions = conditions()
        self.requires_grad: bool = torch.is_grad_enabled() and (
            any(p.requires_grad for p in self.parents) or any(t.requires_grad for t in self._tensors)
        )
        self._value: Tensor | None = None
        self._version = 0

    @property
    def is_known(self) -> bool:
        """Whether the value has been computed."""
        return self._value is not None

    def value(self) -> Tensor:
        """The edge data, ``[num_edges, ...]``. Collective on the first use."""
        if self._value is None:
            self.refuse_changes()
            with torch.set_grad_enabled(self.conditions[0]), _autocast(*self.conditions[1:]):
                self._value = self._computed()
            self._version = self._value._version
            self._release()
        return self._value

    def rows(self, run: Run) -> Tensor:
        """The rows of the edges of `run`."""
        raise NotImplementedError

    def describe(self) -> str:
        """How it is computed; equal on ranks that run the same code."""
        raise NotImplementedError

    def refuse_changes(self) -> None:
        """Refuse, if what it is made of was changed in place since.

        Raises:
            RefusedError: it was.
        """
        changed = any(t._version != version for t, version in zip(self._tensors, self._versions))
        if changed or any(p._value is not None and p._value._version != p._version for p in self.parents):
            raise RefusedError(
                "a tensor from which edge data are made (apply_edges, edge_softmax) was changed in place before they "
                "were used. Use the form that returns a new tensor, or take graph.edata[...].clone() first"
            )

    def frozen(self, copies: dict[int, Deferred] | None = None) -> Deferred:
        """A copy that stays as it is now, whatever is computed meanwhile: a body runs again in backward."""
        copies = {} if copies is None else copies
        if id(self) not in copies:
            other = copies[id(self)] = copy(self)
            other.parents = [parent.frozen(copies) for parent in self.parents]
            other._exchange({id(parent): copies[id(parent)] for parent in self.parents})
        return copies[id(self)]

    def _exchange(self, parents: dict[int, Deferred]) -> None:
        """Put other edge data, by id, in the place of those it is made of."""

    def _computed(self) -> Tensor:
        raise NotImplementedError

    def _release(self) -> None:
        self.parents, self._tensors, self._versions = [], [], []


class EdgeCall:
    """One ``apply_edges`` on all edges: the fields that it sets, computed together.

    Args:
        edges: which.
        program: which tensors the function reads.
        body: what it computes on some edges, by field.
        outside: other tensors that it uses.
        compute: the fields of all own edges. Collective.
    """

    def __init__(
        self,
        edges: Edges,
        program: Program,
        body: Callable[[Inputs], dict[str, Tensor]],
        outside: list[Tensor],
        compute: Callable[[], dict[str, Tensor]],
    ) -> None:
        self.edges, self.program, self.body, self.outside = edges, program, body, outside
        self._compute = compute
        self._found: dict[str, Tensor] | None = None

    def computed(self) -> dict[str, Tensor]:
        """The values of all fields."""
        if self._found is None:
            self._found = self._compute()
        return self._found


class EdgeField(Deferred):
    """A field that ``apply_edges`` sets."""

    def __init__(self, call: EdgeCall, name: str, sample: Tensor) -> None:
        program = call.program
        tensors = [t for group in (program.src, program.dst, program.edge) for t in group.values()]
        super().__init__(call.edges, (), [*tensors, *call.outside], sample)
        self.call, self.name = call, name

    def rows(self, run: Run) -> Tensor:
        return run.fields(self.call)[self.name]

    def describe(self) -> str:
        program = self.call.program
        return f"{program.name}({sorted(program.src)}, {sorted(program.dst)}, {sorted(program.edge)}).{self.name}"

    def _computed(self) -> Tensor:
        return self.call.computed()[self.name]

    def _release(self) -> None:
        super()._release()
        del self.call


class RowsOf:
    """Stands for an edge tensor among the arguments of a `TorchCall`: each edge goes with its own row."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class TorchCall(Deferred):
    """What a torch function that treats rows one by one makes of edge data.

    Args:
        function: the function.
        args, kwargs: its arguments, with `Deferred` and `RowsOf` among them.
    """

    def __init__(self, edges: Edges, function: Callable[..., Tensor], args: tuple[Any, ...], kwargs: Any) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs
        given = [*args, *kwargs.values()]
        parents = [a for a in given if isinstance(a, Deferred)]
        tensors = [a for a in given if isinstance(a, Tensor)] + [a.tensor for a in given if isinstance(a, RowsOf)]
        count = parents[0].sample.size(0)

        def sampled(argument: Any) -> Any:
            if isinstance(argument, Deferred):
                return argument.sample
            if isinstance(argument, RowsOf):
                tensor = argument.tensor.detach()
                return tensor if tensor.size(0) == 1 else tensor.new_ones((count, *tensor.shape[1:]))
            return argument

        with torch.no_grad():
            sample = self._called(sampled)
        super().__init__(edges, parents, tensors, sample)

    def rows(self, run: Run) -> Tensor:
        def of(argument: Any) -> Any:
            if isinstance(argument, Deferred):
                return run.rows(argument)
            return run.edge(argument.tensor) if isinstance(argument, RowsOf) else argument

        return self._called(of)

    def edge_tensors(self) -> list[Tensor]:
        """The edge tensors among its arguments."""
        return [a.tensor for a in (*self.args, *self.kwargs.values()) if isinstance(a, RowsOf)]

    def describe(self) -> str:
        def words(argument: Any) -> str:
            if isinstance(argument, Deferred):
                return argument.describe()
            tensor = argument.tensor if isinstance(argument, RowsOf) else argument
            return f"{tensor.dtype}{list(tensor.shape[1:])}" if isinstance(tensor, Tensor) else repr(tensor)

        keywords = [f"{name}={words(value)}" for name, value in self.kwargs.items()]
        return f"{self.function.__name__}({', '.join([*map(words, self.args), *keywords])})"

    def _exchange(self, parents: dict[int, Deferred]) -> None:
        self.args = tuple(parents.get(id(a), a) for a in self.args)
        self.kwargs = {name: parents.get(id(a), a) for name, a in self.kwargs.items()}

    def _computed(self) -> Tensor:
        def whole(argument: Any) -> Any:
            if isinstance(argument, Deferred):
                return argument.value()
            return argument.tensor if isinstance(argument, RowsOf) else argument

        return self._called(whole)

    def _called(self, of: Callable[[Any], Any]) -> Tensor:
        return self.function(*map(of, self.args), **{name: of(value) for name, value in self.kwargs.items()})

    def _release(self) -> None:
        super()._release()
        self.args, self.kwargs = (), {}


class Softmax(Deferred):
    """``edge_softmax``: of each column of the scores, over the in-edges of a node."""

    def __init__(self, scores: Deferred) -> None:
        super().__init__(scores.edges, [scores], (), scores.sample)

    def rows(self, run: Run) -> Tensor:
        scores, index = run.rows(self.parents[0]), run.inputs.index
        size = (run.inputs.num_dst, *scores.shape[1:])
        place = index.view(-1, *[1] * (scores.dim() - 1)).expand_as(scores)
        top = scores.new_full(size, float("-inf")).scatter_reduce(0, place, scores.detach(), "amax", include_self=False)
        weights = (scores - top.index_select(0, index)).exp()
        return weights / scores.new_zeros(size).index_add(0, index, weights).index_select(0, index)

    def describe(self) -> str:
        return f"softmax({self.parents[0].describe()})"

    def _computed(self) -> Tensor:
        found: Tensor = dgl_edge_softmax(self.edges.index, self.parents[0].value())
        return found


class Dropout(Deferred):
    """Edge data of which some entries are 0: the same ones in every use.

    [Note: dropout of edge data]
    Which entries they are follows from a seed, the edge and the entry. The engine's attention drops weights by the same
    rule, so what it computed on the way can be computed again, whole.

    Args:
        p: probability that an entry is dropped.
        seed: of the random numbers.
    """

    def __init__(self, rows: Deferred, p: float, seed: int) -> None:
        super().__init__(rows.edges, [rows], (), rows.sample)
        self.p, self.seed = p, seed

    def rows(self, run: Run) -> Tensor:
        return torch.nn.functional.dropout(run.rows(self.parents[0]), self.p, True)

    def describe(self) -> str:
        return f"dropout({self.parents[0].describe()}, {self.p})"

    def _computed(self) -> Tensor:
        rows = self.parents[0].value()
        return rows * dropout_of_edges(self.edges.shards, self.seed, rows, self.p)


class Run:
    """One run of a body that computes edge data on the way.

    Args:
        inputs: of the body.
        names: prefixes of the tensors of each `EdgeCall`, and names of edge tensors, by id.
    """

    def __init__(self, inputs: Inputs, names: dict[int, str]) -> None:
        self.inputs, self._names = inputs, names
        self._rows: dict[int, Tensor] = {}
        self._fields: dict[int, dict[str, Tensor]] = {}

    def rows(self, data: Deferred) -> Tensor:
        """The rows of edge data for the edges of this run."""
        if id(data) not in self._rows:
            self._rows[id(data)] = self.edge(data.value()) if data.is_known else data.rows(self)
        return self._rows[id(data)]

    def edge(self, tensor: Tensor) -> Tensor:
        """The rows of an edge tensor; the tensor itself where ranks found it to be none."""
        return self.inputs.edge.get(self._names[id(tensor)], tensor)

    def fields(self, call: EdgeCall) -> dict[str, Tensor]:
        """What an ``apply_edges`` gives for the edges of this run."""
        if id(call) not in self._fields:
            prefix, inputs = self._names[id(call)], self.inputs
            src, dst, edge = (
                {name: rows[prefix + name] for name in given}
                for given, rows in (
                    (call.program.src, inputs.src),
                    (call.program.dst, inputs.dst),
                    (call.program.edge, inputs.edge),
                )
            )
            self._fields[id(call)] = call.body(Inputs(src, dst, edge, inputs.index, inputs.num_dst))
        return self._fields[id(call)]


def lineage(data: Deferred) -> Iterator[Deferred]:
    """`data` and everything it is made of that is not computed yet, and what is known at its borders; once each."""
    seen, stack = set(), [data]
    while stack:
        node = stack.pop()
        if id(node) not in seen:
            seen.add(id(node))
            yield node
            stack += [] if node.is_known else reversed(node.parents)


def conditions() -> tuple[bool, bool, torch.dtype]:
    """Under what torch functions run now: gradients, autocast and its dtype."""
    device = "cuda" if torch.is_autocast_enabled("cuda") else "cpu"
    return torch.is_grad_enabled(), torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def _autocast(enabled: bool, dtype: torch.dtype) -> AbstractContextManager[Any]:
    if conditions()[1:] == (enabled, dtype):
        return nullcontext()
    device = "cuda" if torch.cuda.is_available() and torch.cuda.is_initialized() else "cpu"
    return torch.autocast(device, dtype=dtype, enabled=enabled)
