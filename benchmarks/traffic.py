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

    GAT, three layers of `HEADS` heads: each row brings its values and a score per head. In ``sar`` mode they travel
    forward, again in backward, and as gradients; ``keep`` and ``halo`` save the second time.

    Raises:
        ValueError: for another model.
    """
    hidden = HIDDEN[model]
    if model == "sage":
        return FLOAT * 2 * (hidden + NUM_CLASSES)
    if model == "gat":
        widths = [hidden + HEADS, hidden + HEADS, HEADS * NUM_CLASSES + HEADS]
        return FLOAT * sum(widths) * (3 if mode == "sar" else 2)
    raise ValueError(f"no formula for {model!r}")
