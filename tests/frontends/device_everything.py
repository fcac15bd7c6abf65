"""All programs of one rank on the fake device, some cases of each, in one process."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import shardpass as sp

from .device_callers import different_of_pyg
from .device_program import SOME, compare, train_on_both
from .fake_device import NAME

STEP = 15
"""Of a script's tensors, every so many."""


def everything(comm: Any, folder: str) -> tuple[Any, Any, dict[str, str], dict[str, str]]:
    """What `compare`, `train_on_both`, `different_of_pyg` and `different_of_dgl` return."""
    script = NAME, f"{folder}/script", sp.Options(), STEP
    compared = compare(comm, NAME, f"{folder}/store", "sar", SOME)
    both = train_on_both(comm, NAME, f"{folder}/train", folder)
    pyg, dgl = different_of_pyg(comm, *script), {}
    if find_spec("dgl") is not None:
        from .device_callers_dgl import different_of_dgl

        dgl = different_of_dgl(comm, *script)
    return compared, both, pyg, dgl
