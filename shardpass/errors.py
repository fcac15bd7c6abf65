"""The errors shardpass raises. Each says what was found, what was expected, what to do, and on which rank."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from types import ModuleType, TracebackType


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


class RemoteTracebackError(Exception):
    """The traceback of a process that `spawn` has started, shown as the cause of its exception."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0])


_PLUMBING = frozenset({"shardpass", "torch", "torch_geometric", "dgl", "contextlib", "threading"})
"""Packages whose lines say nothing to the user about an error that shardpass raises."""

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


def advice(error: BaseException) -> str:
    """What to do about an error of torch or Python that does not say so: that memory ran out. Else an empty text."""
    is_lack = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    if is_lack or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error)):
        return (
            "memory ran out: take more ranks, the mode sar, wrap(..., checkpoint='activations') or sp.offload(); "
            "`shardpass plan` estimates what a run needs"
        )
    return ""


def shows_tracebacks() -> bool:
    """Whether the environment variable ``SHARDPASS_DEBUG`` asks for tracebacks."""
    return os.environ.get("SHARDPASS_DEBUG", "") not in ("", "0")


def shorten_tracebacks() -> None:
    """Have an error that ends this process shown with the lines of the user's own files, if shardpass raised it.

    ``sys.excepthook`` is set for that if it is Python's own. Of other errors all lines are shown, and of all errors
    with ``SHARDPASS_DEBUG=1``.
    """
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _show


def tell_launcher(text: str) -> None:
    """Have torchrun end its report with `text`, if torchrun has started this process and knows no better."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or os.path.exists(path):
        return
    told = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": told}, file)
    except OSError:  # its report says less then
        pass


def shorten(error: BaseException) -> bool:
    """Whether shardpass raised `error` by a sentence of its own; its traceback then keeps the user's lines alone."""
    if shows_tracebacks() or isinstance(error, InternalError) or not _is_raised_here(error.__traceback__):
        return False
    error.__traceback__ = _without_plumbing(error.__traceback__)
    if not isinstance(error.__cause__, RemoteTracebackError):
        error.__cause__, error.__suppress_context__ = None, True
    return True


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    error.__traceback__ = trace
    if shorten(error) and error.__traceback__ is not None:
        print("The lines of your own files (SHARDPASS_DEBUG=1 shows all):", file=sys.stderr)
    sys.__excepthook__(kind, error, error.__traceback__)
    if told := advice(error):
        print(f"shardpass: {told}", file=sys.stderr)
    tell_launcher(f"{kind.__name__}: {error}")


def _is_raised_here(trace: TracebackType | None) -> bool:
    """Whether a ``raise`` of this package made the error. A defect raises without one, and needs all of the lines."""
    if trace is None:
        return False
    line = traceback.extract_tb(trace)[-1].line or ""
    while trace.tb_next is not None:
        trace = trace.tb_next
    return _package(trace) == "shardpass" and line.startswith("raise ")


def _without_plumbing(trace: TracebackType | None) -> TracebackType | None:
    if trace is None:
        return None
    rest = _without_plumbing(trace.tb_next)
    if _package(trace) in _PLUMBING:
        return rest
    return TracebackType(rest, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)


def _package(trace: TracebackType) -> str:
    return str(trace.tb_frame.f_globals.get("__name__", "")).split(".")[0]
