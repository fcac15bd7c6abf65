"""The bytes that an epoch must send, from the numbers of rows that ranks need of each other and the models' widths."""

from __future__ import annotations

from benchmarks.graphs import NUM_CLASSES
from benchmarks.worker import HIDDEN

HEADS, FLOAT = 4, 4


def bytes_per_row(model: str, mode: str) -> int:
    """Bytes that one halo row costs in one epoch of a benchmark model, from the third epoch on.

    GraphSAGE, three layers: the sums of the constant features are kept, so the first layer sends nothing. The second
    sends rows of the hidden width forward and their gradients back, fetching nothing again, since a sum needs no rows
    in backward. The third maps its rows to the classes first.

    GAT, three layers of `HEADS` heads: forward, each row brings its values and a score per head. In ``sar`` mode,
    backward pulls: gradient, delta, log-sum-exp and score of a destination travel, and the gradient of its score goes
    back. The graphs are undirected, so as many destinations as sources are wanted. In ``keep`` and ``halo`` mode rows
    are not fetched again, and pushing their gradients moves less.

    Raises:
        ValueError: for another model.
    """
    hidden = HIDDEN[model]
    if model == "sage":
        return FLOAT * 2 * (hidden + NUM_CLASSES)
    if model == "gat":
        values = hidden + hidden + HEADS * NUM_CLASSES
        return FLOAT * (2 * values + 3 * HEADS * (5 if mode == "sar" else 2))
    raise ValueError(f"no formula for {model!r}")
