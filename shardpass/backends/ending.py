"""How the end of this process is told to the other ranks, and heard of by them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import threading
from multiprocessing.util import Finalize
from types import FrameType, TracebackType

from shardpass.backends.failure import first_failure, reason_of
from shardpass.backends.primitives import RawCommunicator
from shardpass.errors import PeerFailure, shows_tracebacks, tell_launcher

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
            if not hasattr(error, "add_note"):  # before Python 3.11
                print(f"shardpass: {comm.calls.write(str(error))}", file=sys.stderr, flush=True)
            tell_launcher(str(error))
            comm.give_up()
            return
        reason = reason_of(error)
        tell_launcher(first_failure(comm.rank, reason))
        print(comm.last_words(reason), file=sys.stderr, flush=True)
        comm.announce(reason)

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, PeerFailure) and not shows_tracebacks():
            error, trace = error.with_traceback(None), None  # where this rank waited would hide what has failed
            error.__cause__, error.__suppress_context__ = None, True
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


class Bell:
    """What wakes a thread that waits for sockets: another thread's `ring`, or SIGTERM, if nothing else handles it.

    The main thread may be in the middle of a long call, in which a signal's handler does not run. But its number is
    written to a socket at once.
    """

    def __init__(self) -> None:
        self._far, self._near = socket.socketpair()
        self._far.setblocking(False)
        self._is_closed = False
        self._masks: dict[int, set[int]] = {}  # by thread that forks

    def fileno(self) -> int:
        """For a selector."""
        return self._near.fileno()

    def ring(self) -> None:
        """Wake the thread."""
        with contextlib.suppress(OSError):  # it is awake, and has much to read
            self._far.send(b"\0")

    def rang_for_sigterm(self) -> bool:
        """Whether SIGTERM has come. Call it once there is something to read."""
        return signal.SIGTERM in self._near.recv(4096) and self._hears_sigterm()

    def hear_sigterm(self) -> None:
        """Hear SIGTERM from now on, if nothing else handles it. Call it in the main thread, or it does nothing."""
        if _is_main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            other = signal.set_wakeup_fd(self._far.fileno(), warn_on_full_buffer=False)
            if other == -1:
                signal.signal(signal.SIGTERM, self._handle)
            else:
                signal.set_wakeup_fd(other)

    def _hears_sigterm(self) -> bool:
        return signal.getsignal(signal.SIGTERM) == self._handle

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_closed:  # by a thread that could not take this handler away
            self.close()
            os.kill(os.getpid(), number)

    def before_fork(self) -> None:
        """Hold SIGTERM back: one that is meant for the child must not be heard by this process."""
        if self._hears_sigterm():
            self._masks[threading.get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

    def after_fork(self) -> None:
        """Let it come again."""
        if threading.get_ident() in self._masks:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._masks.pop(threading.get_ident()))

    def close(self) -> None:
        """Hear nothing any more. SIGTERM ends the process again."""
        self._is_closed = True
        if _is_main_thread() and self._hears_sigterm():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
