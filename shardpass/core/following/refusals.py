"""What a model is told that mixes rows: the operation, the user's line, and what to do instead."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shardpass.core.following.origin import Origin, repeats_one_row
from shardpass.core.following.rows import Rows
from shardpass.core.following.user_line import UserLine, given_to, is_asked_by, user_line
from shardpass.core.ranks import RowSet
from shardpass.errors import RefusedError

REMEDY = (
    "Use a readout over graph.batch (in DGL shardpass.dgl.mean_nodes), a norm, or shardpass.all_reduce_sum of a sum "
    "over own rows, which take in the rows of all ranks, or compute it before you partition and store it as a field"
)
SUMS = (
    "shardpass.all_reduce_sum adds up what all ranks have, so it takes a sum over own rows, as h.sum(0). For a mean "
    "use a readout over graph.batch, or shardpass.mean(h, None, comm, dim=0); in a loss use shardpass.mean"
)
LOSS = (
    "A loss takes in the rows of all ranks: return the rows, and outside of the model call shardpass.cross_entropy "
    "or shardpass.mean of the losses of single rows (reduction='none')"
)
AROUND = (
    "Outside of a model, use shardpass.cross_entropy, or shardpass.mean of a value for each row (reduction='none'); "
    "for what rows are compared with, shardpass.mean(rows, None, comm, dim=0); and for metrics shardpass.accuracy and "
    "its like"
)
MEAN_OF_COLUMNS = (
    "Outside of a model, use shardpass.mean(rows, None, comm, dim=0), and shardpass.replicated(term, comm) around a "
    "term of the loss that is made of it alone"
)
BRANCH = (
    "Every rank would decide by its own rows. Check it before you partition, or outside of the model for all ranks "
    "together, as in comm.all_reduce(flag, 'max')"
)
MAX_NORM = "Leave max_norm out, and rescale the whole table (torch.renorm of the weight) before the model is called"
STATE = (
    "Use shardpass.NodeEmbedding for parameters of nodes, and a field of the graph for values. If the numbers are "
    "equal by chance, change the width"
)
FIELD = "Store what differs from row to row as a node or edge field of the graph"
ALL_ROWS = (
    "Every rank has other rows there. Where it is to save memory, compute all rows at once (torch.utils.checkpoint "
    "keeps less of them); rows that were joined can be parted where they were joined. Or else compute it before you "
    "partition and store it as a field"
)
NUMBERS = (
    "Rows are numbered anew on every rank: use a mask, compute it before you partition and store it as a field, or let "
    "shardpass.node_ids(graph, ids) index rows by ids of the whole graph"
)

NO_VMAP = (
    "A rank may have no first row. Write the function for all rows at once: reduce over the other dimensions, as in "
    "sum(1, keepdim=True)"
)


def check_plain(origin: Origin | None, tensor: Tensor, dim: int, of: RowSet) -> None:
    """Refuse a tensor without rows that has an entry for each of `of` nevertheless, unless all entries are the same."""
    if tensor.stride(dim) == 0:
        return  # an expansion
    if origin == Origin.STATE:
        raise refusal(f"a parameter or buffer of shape {[*tensor.shape]} has an entry for each of the {of.name}", STATE)
    if origin == Origin.NUMBERS or (origin != Origin.FREE and not repeats_one_row(tensor, dim)):
        raise refusal(
            f"a tensor of shape {[*tensor.shape]} differs from row to row of the {of.name}, and "
            + (
                "the model made it from their numbers"
                if origin == Origin.NUMBERS
                else "is made of no field of the graph"
            ),
            FIELD,
        )


def failure(name: str, error: Exception, rows: list[RowSet], plain: list[Tensor], known: list[RowSet]) -> Exception:
    """What to raise where an operation fails that would not fail on the whole graph; `error` itself if it would.

    Args:
        rows: those of its operands.
        plain: its operands without rows.
        known: all sets of rows.
    """
    for tensor in plain:
        for of in known:
            if of.total != of.count and of.total in [*map(int, tensor.shape)]:
                return whole_graph(tensor, of)
    empty = next((of for of in rows if of.count == 0), None)
    if empty is None:
        return error
    return refusal(f"`{name}` puts rows together, over the {empty.name}, and this rank has none of them ({error})")


def refusal(what: str, remedy: str = "", line: UserLine | None = None) -> RefusedError:
    """An error that says what the user's line does; without `line`, the one that is running."""
    return RefusedError(
        f"{line or user_line()}: {what}. This rank holds a part of them, so the result would differ from "
        f"that of the whole graph. {remedy or REMEDY}"
    )


def whole_graph(tensor: Tensor, of: RowSet) -> RefusedError:
    """An error for a tensor of the whole graph that meets rows of this rank."""
    return RefusedError(
        f"{user_line()}: a tensor of shape {[*tensor.shape]} has an entry for each of the {of.total} {of.name} of the "
        f"whole graph, but this rank holds {of.count} of them, in another order. Store it as a field of the graph when "
        f"you partition, and take it from there, as in graph.train_mask; for parameters use shardpass.NodeEmbedding"
    )


@dataclass(frozen=True)
class Mixture:
    """What was made of several rows of this rank. It may go to the other ranks, but not back into the model.

    Args:
        name: the operation.
        line: of the user's code.
        of: the rows.
        is_sum: it is a sum over own rows, so that the sum over ranks is that of the whole graph.
        is_direct: nothing but copies and views came after the operation, so that of a maximum that over ranks is one.
        remedy: what to do instead, if that is known where it is made.
    """

    name: str
    line: UserLine
    of: RowSet
    is_sum: bool = False
    remedy: str = ""
    is_direct: bool = True

    def check_reduced(self, op: str) -> None:
        """Refuse a reduction by `op` over ranks that is not that of the whole graph."""
        if self.is_sum if op == "sum" else self.is_direct and self.name in (op, f"a{op}"):
            return
        remedy = SUMS if op == "sum" else f"The {op} of all ranks is that of the {op} of each, as h.a{op}(0) is"
        raise refusal(f"`{self.name}` makes no {op} of the {self.of.name}", remedy, self.line)

    def refusal(self, decides: bool = False) -> RefusedError:
        """Why it cannot be used here, where it `decides` something or becomes a number."""
        is_users = not is_asked_by("torch_geometric.")
        remedy = self.remedy or (BRANCH if decides and is_users else "")
        return refusal(f"`{self.name}` puts rows together, over the {self.of.name}", remedy, line=self.line)


def whole_beside_rows(line: UserLine, name: str) -> RefusedError:
    """Why a value of all rows cannot be used for single rows."""
    return RefusedError(
        f"{line}: `{name}` puts a loss or a mean over the rows of all ranks beside rows of this rank. Its value is "
        f"that of all rows, but its gradient is this rank's share. For a mean that rows are compared with, call "
        f"shardpass.mean(rows, None, comm, dim=0), or detach() it"
    )


def added_by_rows(line: UserLine, at: Rows) -> RefusedError:
    """Why rows cannot say where something is added to a tensor of a script's own."""
    if at.points_to is None:
        remedy = "as torch.bincount and F.one_hot(y, classes).sum(0) do, and give that to shardpass.all_reduce_sum"
    else:
        remedy = "as torch.zeros(num_nodes).scatter_add(0, index, values) does"
    return RefusedError(
        f"{line}: rows of this rank decide where something is added to a tensor of your own, and nobody follows what "
        f"you make of that. Make a new one of them, {remedy}"
    )


def own_gradient(line: UserLine) -> RefusedError:
    """What is to be known of the gradient of a script's own tensor, which is not refused."""
    return RefusedError(
        f"{line}: a tensor of your own that requires a gradient has met rows. Its gradient is this rank's share. Add "
        f"it up before you use it: by comm.all_reduce, or by shardpass.all_reduce_sum if a loss is made of it. Or make "
        f"the tensor a parameter of a module that is wrapped"
    )


def plain_length(line: UserLine) -> RefusedError:
    """What is to be known of `len`, which is not refused."""
    return RefusedError(
        f"{line}: `len` is a plain number, though it is this rank's. Take rows.size(0) if you compute with it, or "
        f"shardpass.total(rows.size(0), comm) for the number of all ranks"
    )


def state_beside_rows(line: UserLine, name: str) -> RefusedError:
    """Why a parameter cannot meet rows outside of the model."""
    return RefusedError(
        f"{line}: `{name}` applies a parameter, or a gradient by one, to rows outside of the wrapped model, where "
        f"its gradient is not summed over ranks. Do that in a method of the model, or wrap the module that holds the "
        f"parameter too (shardpass.pyg.wrap, shardpass.dgl.wrap)"
    )


def weighed_in_model(line: UserLine) -> RefusedError:
    """Why a wrapped model cannot be given a value of all rows."""
    return RefusedError(
        f"{line}: a wrapped model is given a loss, or another value of the rows of all ranks. The gradients of its "
        f"parameters are summed over ranks, so they would count once for each of them. Weigh losses by parameters of a "
        f"module that is not wrapped, or outside of the model, as in model.weight * loss"
    )


def counts_once(line: UserLine) -> RefusedError:
    """Why a value of all rows is not replicated."""
    return RefusedError(
        f"{line}: shardpass.replicated is for what every rank computes alike, of sums over the rows of all ranks. The "
        f"gradient of this value is that of this rank's share already. Leave shardpass.replicated out"
    )


def whole_already(line: UserLine) -> RefusedError:
    """Why a value of all rows is not to be added up as rows are."""
    return RefusedError(
        f"{line}: this value takes in the rows of all ranks already, and its gradient is this rank's share. Expected "
        f"rows of this rank. Leave the second mean or sum over ranks out"
    )


def counts_for_each_rank(line: UserLine) -> RefusedError:
    """Why what every rank computes alike cannot be differentiated as it is."""
    return RefusedError(
        f"{line}: every rank computes this alike, of sums over the rows of all ranks. Gradients are summed over "
        f"ranks, so it would count once for each of them. Call shardpass.replicated(term, comm) on it, before you add "
        f"it to other terms"
    )


def first_refusal(error: RefusedError) -> RefusedError:
    """`error`, or the refusal that a library has caught, and looked into, when it was raised."""
    while isinstance(error.__context__, RefusedError) and not error.__suppress_context__:
        error = error.__context__
    return error


def refuse_own_graph() -> None:
    """Refuse rows for a kernel of DGL's that runs on a graph of the script's own."""
    index = given_to("dgl._sparse_ops", "gidx")
    if index is not None and not getattr(index, "has_own_rows", False):
        what = "DGL reads rows by the numbers that a graph of its own has"
        raise RefusedError(f"{user_line()}: {what}. {NUMBERS}")


def raise_in_backward(tensor: Tensor, refused: RefusedError) -> None:
    """Raise `refused` where backward comes to `tensor`."""

    def refuse(_: Tensor) -> None:
        raise refused

    if tensor.requires_grad:
        tensor.register_hook(refuse)


def within_no_sync(line: UserLine) -> RefusedError:
    return RefusedError(
        f"{line}: torch.autograd.grad by parameters within no_sync would give what this rank's rows give. Call it "
        f"outside of no_sync"
    )
