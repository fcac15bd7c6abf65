"""What a comparison is expected to show, each checked against the figures of one run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.run import Record
from benchmarks.traffic import bytes_per_row

MB = 1e6
REFERENCE_FLOATS = {"sage": 2 * 256 + 128 + 2 * 32, "gat": 3 * (2 * (128 + 4) + 4 * 32 + 4)}
"""Numbers that the reference implementation of the method sends for one halo row in one epoch, in ``sar`` mode."""
HEAP = {("sage", 8, True, None): 68, ("sage", 8, False, None): 80, ("sage", 8, True, "activations"): 54}
"""MB per rank for (model, ranks, shared memory, checkpoint) on 50k30."""


def pick(records: list[Record], **wanted: Any) -> Record | None:
    """The first record whose fields are as given; fields that are not named are those of a plain ``sar`` run."""
    wanted["world"] = wanted.pop("ranks")
    wanted = {
        "peer": None, "mode": "sar", "share_memory": True, "checkpoint": None, "huge_pages": True,
        "in_memory": False, **wanted,
    }  # fmt: skip
    return next(
        (one for one in records if all(one.get(name, name != "in_memory") == value for name, value in wanted.items())),
        None,
    )


def cpu(record: Record) -> float:
    """CPU seconds of an epoch, summed over ranks."""
    return float(sum(rank["cpu_seconds"] for rank in record["ranks"]))


def heap(record: Record) -> float:
    """Peak of live memory above the loaded baseline in MB, the largest rank's: the heap between epochs and what an
    epoch adds to what is resident."""
    return float(max(rank["kept_heap_bytes"] + rank["transient_bytes"] for rank in record["ranks"]) / MB)


def sent(record: Record) -> int:
    """Bytes that all ranks sent in the last epoch."""
    return int(sum(rank["bytes_sent"] for rank in record["ranks"]))


def verdicts(found: Record) -> list[str]:
    """One sentence per bar whose configurations were measured: the figures, and whether they bear it out."""
    records = found["records"]
    return [
        f"{text} **{'holds' if good else 'does NOT hold'}**."
        for source in (_speed, _memory, _in_memory, _scaling, _traffic)
        for text, good in source(records)
    ] + _kernel(found["kernels"])


def _speed(records: list[Record]) -> Iterator[tuple[str, bool]]:
    ours = pick(records, graph="50k30", model="sage", ranks=1)
    peers = [
        peer for name in ("dgl", "pyg") if (peer := pick(records, graph="50k30", model="sage", ranks=1, peer=name))
    ]
    if ours and peers:
        best = min(map(cpu, peers))
        yield f"SAGE 50k30, one rank: {cpu(ours):.2f} CPU s, the faster peer {best:.2f}. No more:", cpu(ours) <= best
    for graph, peer, bound in (("50k30", "dgl", 3.5), ("50k30", "pyg", 6), ("20k150", "dgl", 8), ("20k150", "pyg", 25)):
        ours, theirs = (pick(records, graph=graph, model="gat", ranks=1, peer=name) for name in (None, peer))
        if ours and theirs:
            ratio = cpu(theirs) / cpu(ours)
            text = f"GAT {graph}, one rank: {cpu(ours):.2f} CPU s, {peer} {cpu(theirs):.2f}, {ratio:.1f} times ours. "
            yield f"{text}At least {bound}:", ratio >= bound


def _memory(records: list[Record]) -> Iterator[tuple[str, bool]]:
    if ours := pick(records, graph="20k150", model="gat", ranks=1):
        yield f"GAT 20k150, one rank: {heap(ours):.0f} MB. At most 200:", heap(ours) <= 200
    ours, theirs = (pick(records, graph="50k30", model="sage", ranks=1, peer=peer) for peer in (None, "dgl"))
    if ours and theirs:
        ratio = heap(ours) / heap(theirs)
        yield f"SAGE 50k30, one rank: {heap(ours):.0f} MB, {ratio:.2f} times DGL's. At most 1.1:", ratio <= 1.1
    for (model, ranks, share, checkpoint), bound in HEAP.items():
        wanted = {"model": model, "ranks": ranks, "share_memory": share, "checkpoint": checkpoint}
        if ours := pick(records, graph="50k30", **wanted):
            how = "shared memory" if share else "messages"
            how += f", checkpoint={checkpoint}" if checkpoint else ""
            text = f"SAGE 50k30, {ranks} ranks, {how}: {heap(ours):.1f} MB per rank. At most {bound}:"
            yield text, heap(ours) <= bound
    if ours := pick(records, graph="20k150", model="gat", ranks=4):
        yield f"GAT 20k150, 4 ranks: {heap(ours):.1f} MB per rank. At most 60:", heap(ours) <= 60


def _in_memory(records: list[Record]) -> Iterator[tuple[str, bool]]:
    """A graph that ``sp.shard`` was given beside the same in a store, on one rank."""
    for graph, model in (("50k30", "sage"), ("50k30", "gat"), ("20k150", "gat")):
        given, loaded = (pick(records, graph=graph, model=model, ranks=1, in_memory=way) for way in (True, False))
        if given and loaded:
            for unit, of in (("CPU s", cpu), ("MB", heap)):
                text = f"{model.upper()} {graph} by sp.shard, one rank: {of(given):.2f} {unit}, from a store "
                yield f"{text}{of(loaded):.2f}. At most 1.03 times:", of(given) <= 1.03 * of(loaded)


def _scaling(records: list[Record]) -> Iterator[tuple[str, bool]]:
    bounds = (("50k30", "sage", 8, True, 2.0), ("50k30", "sage", 8, False, 2.5), ("20k150", "gat", 4, True, 1.3))
    for graph, model, ranks, share, bound in bounds:
        if ours := pick(records, graph=graph, model=model, ranks=ranks, share_memory=share):
            how = "shared memory" if share else "messages"
            text = f"{model.upper()} {graph}, {ranks} ranks, {how}: {cpu(ours):.2f} CPU s in all. At most {bound}:"
            yield text, cpu(ours) <= bound
    for huge, pages in ((False, "small pages"), (True, "huge pages")):
        one, eight = (pick(records, graph="50k30", model="sage", ranks=ranks, huge_pages=huge) for ranks in (1, 8))
        if one and eight:
            ratio = cpu(eight) / cpu(one)
            text = f"SAGE 50k30, {pages}: CPU s in all on 8 ranks {cpu(eight):.2f}, on one {cpu(one):.2f}, a ratio of "
            yield f"{text}{ratio:.2f}. At most 1.3:", ratio <= 1.3


def _traffic(records: list[Record]) -> Iterator[tuple[str, bool]]:
    runs = [one for one in records if not one["peer"] and one["world"] > 1 and not one["share_memory"]]
    right = [sent(one) == one["halo_rows"] * bytes_per_row(one["model"], one["mode"]) for one in runs]
    if runs:
        yield f"Bytes sent equal the formula to the byte in {sum(right)} of {len(runs)} runs over messages:", all(right)
    for model, mode, bound in (("sage", "sar", 0.82), ("gat", "keep", 0.67)):
        share = bytes_per_row(model, mode) / 4 / REFERENCE_FLOATS[model]
        text = f"{model.upper()} in {mode} mode sends {share:.1%} of what the reference does. At most {bound:.0%}:"
        yield text, round(share, 2) <= bound


def _kernel(kernels: list[Record]) -> list[str]:
    return [
        f"{one['name']}: {one['ratio']:.1f} times the bandwidth bound. At most 4: "
        f"**{'holds' if one['ratio'] <= 4 else 'does NOT hold'}**."
        for one in kernels
        if one["name"].startswith("attention forward")
    ]
