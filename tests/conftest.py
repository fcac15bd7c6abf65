"""Shared by all tests: one thread per rank, so that runs on few cores stay quick; Triton's kernels without a GPU.

A test marked ``ranks(2)`` is run by two ranks at once, and has its rank's own communicator as ``comm``. The marker
without a number takes it from the argument ``ranks`` of the test, which parametrize gives.
"""

import inspect
import os
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from shardpass.core.kernels import gpu
from shardpass.testing import run

if not torch.cuda.is_available():  # read when triton is imported, which nothing before has done
    os.environ.setdefault("TRITON_INTERPRET", "1")


try:
    from hypothesis import Phase, settings
except ImportError:  # a machine with a GPU may have little more than torch
    pass
else:  # for `make mutants`
    settings.register_profile("no shrinking", phases=[Phase.explicit, Phase.reuse, Phase.generate])


@pytest.fixture
def comm() -> None:
    """For a test marked ``ranks``: in its place, `pytest_pyfunc_call` gives every rank its own communicator."""


def pytest_pyfunc_call(pyfuncitem) -> bool | None:
    marker = pyfuncitem.get_closest_marker("ranks")
    if marker is None:
        return None
    test, found = pyfuncitem.obj, pyfuncitem.funcargs
    given = {name: found[name] for name in inspect.signature(test).parameters if name != "comm"}
    run(lambda comm: test(comm=comm, **given), *marker.args or [found["ranks"]])
    return True


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def black_boxes(tmp_path_factory) -> None:
    """Where ranks write their last calls, in the many tests that make them fail."""
    os.environ["SHARDPASS_BLACK_BOX"] = str(tmp_path_factory.mktemp("black boxes"))


@pytest.fixture
def triton_dispatch(monkeypatch):
    """The device whose tensors Triton's kernels take in a test: the GPU, or else the CPU, interpreted."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        return torch.device("cuda")
    monkeypatch.setattr(gpu, "is_compiled_for", lambda device: True)
    return torch.device("cpu")


@pytest.fixture
def triton_device(triton_dispatch, monkeypatch):
    """As `triton_dispatch`, for a test in which kernels run."""
    if triton_dispatch.type == "cuda":
        yield triton_dispatch
        return
    from triton.runtime.interpreter import GridExecutor, InterpretedFunction

    from shardpass.core.kernels import triton_attention, triton_extremum, triton_scores, triton_sums

    for module in (triton_attention, triton_extremum, triton_scores, triton_sums):
        for function in list(vars(module).values()):
            if isinstance(function, InterpretedFunction):
                function.rewrite()  # once, here: Python 3.11 cannot parse in two threads at once

    run, lock, launched = GridExecutor.__call__, threading.Lock(), []

    def one_at_a_time(executor, *args, **options):  # the interpreter has one state for all threads
        with lock:
            launched.append(executor)
            return run(executor, *args, **options)

    monkeypatch.setattr(GridExecutor, "__call__", one_at_a_time)
    yield triton_dispatch
    assert launched, "no kernel of Triton ran"


@pytest.fixture
def any_order(triton_device):
    """Has `device`, and ``turned(True)``, within which the programs of a kernel run in the opposite order.

    On a GPU they run in an order of its own anyway.
    """

    @contextmanager
    def turned(backwards):
        if not backwards or triton_device.type == "cuda":
            yield
            return
        from triton.runtime.interpreter import interpreter_builder

        def last_first(*program):
            place(*(n - 1 - k for n, k in zip(interpreter_builder.grid_dim, program)))

        place = interpreter_builder.set_grid_idx
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(interpreter_builder, "set_grid_idx", last_first)
            yield

    return SimpleNamespace(device=triton_device, turned=turned)
