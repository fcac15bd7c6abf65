"""`diagnose`: who was missing where, in sentences, from the last calls of the ranks of a job."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from shardpass.cli.black_box import BlackBox, CallRecord

Boxes = Mapping[int, BlackBox]
_FIRST = re.compile(r"rank (\d+) (failed|died|ended|was lost) first(?!: CommunicationError)")  # which may be a time-out
_HOW = {
    "failed": "the others ended because it failed",
    "died": "its process died",
    "ended": "its program ended before those of the others",
    "was lost": "its host did not answer",
}
_APART = re.compile(r"rank \d+ failed first: DivergenceError: ")  # each of the ranks that differ says it of itself
_SHOWN = 8


def diagnose(boxes: Boxes) -> list[str]:
    """Sentences: what the ranks of one job say, where each of them was, and which one to look at first."""
    first = next(iter(boxes.values()))
    lines = [f"job {first.job}: {_ranks(boxes)} of {first.size} left a black box."]
    causes = {rank: _cause(box) for rank, box in boxes.items()}
    for cause in dict.fromkeys(causes.values()):
        lines.append(f"{_ranks(rank for rank in boxes if causes[rank] == cause)} said: {cause}")
    missed = {rank: _missed(boxes, box) for rank, box in boxes.items()}
    for rank, box in boxes.items():
        lines += _where(box)
        lines += [_absence(boxes, box, call, other) for call, others in missed[rank] for other in others[:_SHOWN]]
    absent = [rank for rank in range(first.size) if rank not in boxes]
    lines += [_last_heard_of(boxes, rank) for rank in absent[:_SHOWN]]
    waits_for = {rank: {other for _, others in calls for other in others} for rank, calls in missed.items()}
    return [*lines, _verdict(boxes, waits_for)]


def _cause(box: BlackBox) -> str:
    return _APART.sub("", box.why, count=1)


def _missed(boxes: Boxes, box: BlackBox) -> list[tuple[CallRecord, list[int]]]:
    """What a rank was waiting for in the end, each with the ranks that had not done their part."""
    found = []
    for call in _open(box):
        others = [rank for rank in range(box.size) if rank != box.rank] if call.peer < 0 else [call.peer]
        found.append((call, [rank for rank in others if not _has_part(call, box.rank, boxes.get(rank))]))
    return found


def _has_part(call: CallRecord, rank: int, other: BlackBox | None) -> bool:
    """Whether another rank is known to have done its part in a call of ``rank``."""
    if other is None:
        return False
    if call.peer < 0:
        return any((part.path, part.peer) == (call.path, -1) and part.count >= call.count for part in other.calls)
    wanted = (call.path, "send" if call.side == "recv" else "recv", rank, call.number, call.count)
    return any((part.path, part.side, part.peer, part.number, part.count) == wanted for part in other.calls)


def _where(box: BlackBox) -> list[str]:
    """Where a rank was in the end."""
    name = f"rank {box.rank} ({box.host}, process {box.process})"
    if _open(box):
        return [f"{name} had waited {box.at - call.waited:.1f} s in {call.words()}." for call in _open(box)]
    if not box.calls:
        return [f"{name} had made no call."]
    return [f"{name} was in no call. {_last(box)}"]


def _last(box: BlackBox) -> str:
    """The last thing that a rank did before the call in which it was waiting, if it was."""
    done = [call for call in box.calls if not call.is_open]
    if not done:
        return "It had made no call before."
    last = max(done, key=lambda call: call.last_time)
    did = "finished" if last.ended else "posted"
    return f"The last that it {did} was {last.words()}, {box.at - last.last_time:.1f} s before."


def _absence(boxes: Boxes, box: BlackBox, call: CallRecord, other: int) -> str:
    """That another rank has not done its part in a call of this one."""
    if other not in boxes:
        return f"  Nothing is known of the part of rank {other}, which left no black box."
    if boxes[other].calls and boxes[other].calls[0].began > call.began:
        return f"  What rank {other} did then is not among the calls that it has kept."
    verb = {"recv": f"sent it to rank {box.rank}", "send": f"received it from rank {box.rank}"}.get(
        call.side, "came to it"
    )
    return f"  rank {other} never {verb}. {_last(boxes[other])}"


def _last_heard_of(boxes: Boxes, rank: int) -> str:
    """What the others know of a rank without a black box."""
    heard = [
        (call, box)
        for box in boxes.values()
        for call in box.calls
        if call.ended and call.peer in (-1, rank) and call.side != "send"
    ]
    text = f"rank {rank} left no black box: it was killed, or its file is on another host or was not given."
    if not heard:
        return f"{text} The others had not heard of it."
    call, box = max(heard, key=lambda found: found[0].ended)
    did = "it took part in" if call.peer < 0 else f"rank {box.rank} received"
    return f"{text} The last that is known of it: {did} {call.words()}, {box.at - call.ended:.1f} s before the end."


def _verdict(boxes: Boxes, waits_for: Mapping[int, set[int]]) -> str:
    """Which rank to look at first."""
    named = Counter(found.groups() for box in boxes.values() if (found := _FIRST.match(_cause(box))))
    if named:
        ((rank, how), _), *_ = named.most_common(1)
        return f"Look at rank {rank} first: {_HOW[how]}."
    waiting = [rank for rank, others in waits_for.items() if others]
    ends = {other for rank in waiting for other in waits_for[rank] if not waits_for.get(other)}  # where waiting ends
    idle = [rank for rank in sorted(ends) if rank not in boxes or not _open(boxes[rank])]
    if idle:
        where = "was in no call: slow, or on another path" if set(idle) <= set(boxes) else "left no black box"
        return f"Look at {_ranks(idle)} first. The others waited, and it {where}."
    different = _different(boxes)
    if different:
        return different
    if waiting and not ends:
        return f"{_ranks(waiting)} wait for each other in a circle: look for calls that they make in different orders."
    return "No rank is missing: each had come to the calls in which the others waited. What they said tells the cause."


def _open(box: BlackBox) -> list[CallRecord]:
    """The calls for which a rank was waiting in the end: one for each of its threads, or none."""
    return [call for call in box.calls if call.is_open][-_SHOWN:]


def _different(boxes: Boxes) -> str:
    """A sentence if the ranks wait in different calls."""
    waits = {rank: _open(box)[-1] for rank, box in boxes.items() if _open(box)}
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, call in waits.items():
        groups.setdefault((call.kind, call.label), []).append(rank)
    if len(groups) < 2:
        return ""
    places = "; ".join(f"{_ranks(ranks)} in {waits[ranks[0]].call}" for ranks in groups.values())
    most = max(groups.values(), key=len)
    odd = [rank for rank in waits if rank not in most]
    look = "The ranks are in different calls"
    if len(most) > len(odd):
        look = (
            f"Look at {_ranks(odd)} first: {'it was' if len(odd) == 1 else 'they were'} in another call than the others"
        )
    return f"{look} ({places}). {_in_common(boxes)}"


def _in_common(boxes: Boxes) -> str:
    """The last collective in which all ranks have been."""
    done = [
        {(call.path, call.count): call for call in box.calls if call.peer < 0 and call.ended} for box in boxes.values()
    ]
    shared = [call for name, call in done[0].items() if all(name in calls for calls in done)]
    if not shared:
        return "No collective that all of them made is known."
    return f"The last that all of them made was {max(shared, key=lambda call: call.ended).call}."


def _ranks(ranks: Iterable[int]) -> str:
    names = [str(rank) for rank in ranks]
    if len(names) == 1:
        return f"rank {names[0]}"
    shown = names[:_SHOWN] + [f"{len(names) - _SHOWN} more"] * (len(names) > _SHOWN)
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}" if names else "no rank"
