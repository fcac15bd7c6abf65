"""How the end of this process is told to the other ranks, and heard of by them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing.util import Finalize
from types import FrameType, TracebackType

from shardpass.backends.failure import first_failure, reason_of
from shardpass.backends.raw import RawCommunicator
from shardpass.errors import PeerFailure

_SUPERVISED = ("TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_SIZE")  # set by launchers that outlive the ranks they start


def launcher() -> int:
    """The process that started this one and that waits for it; 0 if this one may outlive whatever started it."""
    return os.getppid() if any(name in os.environ for name in _SUPERVISED) else 0


def end_all_on_exception(comm: RawCommunicator) -> None:
    """Have every rank told of an exception that ends this process.

    A child of multiprocessing ends without ``sys.excepthook`` and, if it was forked, without ``atexit``. It runs its
    finalizers, while the exception that ends it is still being handled.
    """
    previous = sys.excepthook

    def tell(error: BaseException) -> None:
        if isinstance(error, PeerFailure):
            comm.give_up()
            return
        reason = reason_of(error)
        print(f"shardpass: {first_failure(comm.rank, reason)}", file=sys.stderr, flush=True)
        comm.announce(reason)

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        previous(kind, error, trace)
        tell(error)

    def end_child() -> None:
        error = sys.exc_info()[1]
        if isinstance(error, Exception) or (isinstance(error, SystemExit) and error.code):
            tell(error)
        comm.close()

    sys.excepthook = hook
    if multiprocessing.parent_process() is not None:
        Finalize(None, end_child, exitpriority=0)


def _leave_to_the_watch(number: int, frame: FrameType | None) -> None:
    """The handler of SIGTERM. The watch ends the process, since the main thread may be in the middle of a long call."""


def sigterm_is_ours() -> bool:
    """Whether SIGTERM still has the handler of `hear_sigterm`."""
    return signal.getsignal(signal.SIGTERM) is _leave_to_the_watch


def hear_sigterm(bell: int) -> bool:
    """Have SIGTERM write its number to the file ``bell``, if nothing else handles it. False if that cannot be."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return False
    other = signal.set_wakeup_fd(bell, warn_on_full_buffer=False)
    if other != -1:
        signal.set_wakeup_fd(other)
        return False
    signal.signal(signal.SIGTERM, _leave_to_the_watch)
    return True


def let_sigterm_end() -> None:
    """Undo `hear_sigterm`, as far as nothing has changed since."""
    if threading.current_thread() is threading.main_thread() and sigterm_is_ours():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
