"""The errors shardpass raises. Each says what was found, what was expected, what to do, and on which rank."""

from __future__ import annotations

from types import ModuleType


class ShardpassError(RuntimeError):
    """The base class of every error that is not about one bad argument."""


class InternalError(ShardpassError):
    """A defect of shardpass itself, never the user's. Please report it."""


class CommunicationError(ShardpassError):
    """Ranks could not talk: a peer died, could not be reached, or did not answer in time."""


class DivergenceError(CommunicationError):
    """Ranks took part in different calls at the same moment, or in one call with different arguments."""


class PeerFailure(CommunicationError):
    """Another rank failed first; its reason is part of the message."""


class RefusedError(NotImplementedError):
    """Something that cannot be exact on a sharded graph, refused by name. The message says why and what to do."""


class NeedsHaloError(RefusedError):
    """A message function needs all in-edges of a node at once. It is exact in ``halo`` mode and refused in others."""


class StoreError(ValueError):
    """A partition directory is missing, torn, altered, or written by another version."""


class CheckpointError(ValueError):
    """A checkpoint is missing, torn, altered, or belongs to another graph, partition or model."""


class MissingDependencyError(ImportError):
    """An optional package is not installed. The message has the pip command."""


_PIP_NAMES = {"sklearn": "scikit-learn", "typer": "typer rich", "rich": "typer rich"}


def require(module: str, extra: str, purpose: str, otherwise: str = "") -> ModuleType:
    """The imported optional `module`.

    Args:
        module: name of the module to import, e.g. ``"mpi4py.MPI"``.
        extra: the extra of shardpass that installs it, e.g. ``"mpi"``; empty if none does.
        purpose: what needs it, as the subject of the error sentence, e.g. ``"the mpi backend"``.
        otherwise: what to do instead of installing it, the end of the error sentence.

    Raises:
        MissingDependencyError: one sentence with the pip command, when the package is not installed.
    """
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        if (error.name or "").split(".")[0] != module.split(".")[0]:
            raise
        package = module.split(".")[0]
        of_extra = f" (shardpass's extra {extra!r})" if extra else ""
        raise MissingDependencyError(
            f"{purpose} needs the package {package!r}, which is not installed: pip install "
            f"{_PIP_NAMES.get(package, package)}{of_extra}{otherwise and ', or ' + otherwise}"
        ) from error
