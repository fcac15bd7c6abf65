"""What a wrapped model does around its own code whenever it is called from outside."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardpass.core.memory import Checkpoint, recomputed_activations
from shardpass.core.ranks import Ranks, chained
from shardpass.core.selfcheck import Frontend, check_model
from shardpass.core.training import note_forward


class Unchecked:
    """The copy of a model for the self-check, until the model was called on a graph in both training modes.

    Args:
        pristine: the copy, from before the model was wrapped, or `None` where nothing is to be checked.
    """

    def __init__(self, pristine: nn.Module | None) -> None:
        self.pristine = pristine
        self._seen: set[bool] = set()

    def is_new(self, training: bool) -> bool:
        """Whether the model has not been called on a graph in this training mode."""
        return training not in self._seen

    def check(
        self, frontend: Frontend, model: nn.Module, comm: Ranks, args: Any, kwargs: Any, method: str = "forward"
    ) -> None:
        """Run the self-check of `model` in its present training mode. Collective.

        Raises:
            RefusedError: on every rank, where the model mixes nodes outside of message passing.
        """
        pristine = self.pristine
        self._seen.add(model.training)
        if len(self._seen) == 2:
            self.pristine = None
        if pristine is not None:
            check_model(frontend, pristine, model, comm, args, kwargs, method)


class OutermostCall:
    """A method of a wrapped model as its user calls it. A frontend derives from it.

    Args:
        model: the wrapped model.
        comm: the ranks.
        unchecked: shared by all methods of the model.
        checkpoint: whether activations are computed again in backward.
    """

    def __init__(self, model: nn.Module, comm: Ranks, unchecked: Unchecked, checkpoint: Checkpoint) -> None:
        self.model, self.comm, self.unchecked, self.checkpoint = model, comm, unchecked, checkpoint

    def run(self, function: Callable[..., Any], args: Any, kwargs: Any, graph_is_hidden: bool) -> Any:
        """What ``function(*args, **kwargs)`` returns, run as one forward pass. Collective.

        Args:
            graph_is_hidden: the self-check has not seen the graph, which is not among the arguments.
        """
        if torch.is_grad_enabled() and self.comm.forward is None:
            note_forward(self.model)
        recomputes = self.checkpoint is not None and self.model.training
        with recomputed_activations(self.comm, (args, kwargs), recomputes):
            return chained(self.comm, function, *args, graph_is_hidden=graph_is_hidden, **kwargs)

    def __reduce__(self) -> Any:
        raise TypeError(
            "a wrapped model holds a communicator, which belongs to its process: save model.state_dict() (or "
            "shardpass.save_checkpoint), and wrap a new model before it is loaded"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> OutermostCall:
        copied = memo[id(self)] = type(self).__new__(type(self))
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied
