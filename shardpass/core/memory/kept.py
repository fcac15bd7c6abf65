"""A tensor that stays in memory until backward, and a check that nobody changes it in the meantime."""

from __future__ import annotations

from torch import Tensor, nn

from shardpass.core.ranks import torch_private


class Kept:
    """A saved tensor as it is. Autograd leaves the check for in-place changes to those who install hooks."""

    def __init__(self, tensor: Tensor) -> None:
        # detached, because the tensor's own graph may hold this object
        self._tensor = tensor.detach() if type(tensor) in (Tensor, nn.Parameter) else tensor
        self._version = torch_private.version_of(tensor)

    def get(self) -> Tensor:
        """The tensor.

        Raises:
            RuntimeError: it was changed in place after it was saved.
        """
        version = torch_private.version_of(self._tensor)
        if version != self._version:
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self._tensor.type()} {list(self._tensor.shape)}] is at version {version}; expected version "
                f"{self._version} instead. The forward pass ran under sp.offload or wrap(checkpoint='activations'), "
                f"and this tensor was left in memory: do not change it before backward has ended"
            )
        return self._tensor
