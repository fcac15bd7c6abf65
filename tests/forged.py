"""Stores that were changed on purpose, with checksums that fit again: what a stranger may hand you."""

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

_NUMPY = {"I32": "<i4", "I64": "<i8", "F32": "<f4", "F64": "<f8", "BOOL": "?"}


def document_of(store: Path) -> dict[str, Any]:
    """The JSON of a store's manifest."""
    found: dict[str, Any] = json.loads((store / "manifest.json").read_bytes())
    return found


def seal(store: Path, document: Any) -> None:
    """Write a manifest with the checksum of its own text."""
    text = json.dumps({**document, "sha256": "0" * 64}, indent=1)
    (store / "manifest.json").write_text(text.replace("0" * 64, hashlib.sha256(text.encode()).hexdigest(), 1))


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    """The header of a part file, and the bytes behind it."""
    content = path.read_bytes()
    length = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:length]), content[length:]


def reseal(store: Path) -> None:
    """Write the checksums and sizes that the part files have now into the manifest."""
    document = document_of(store)
    for record in [*document["files"], *filter(None, map(document.get, ("names", "graph_file")))]:
        path = store / record["name"]
        content = path.read_bytes()
        length = 8 + int.from_bytes(content[:8], "little")
        record["bytes"], record["header_sha256"] = len(content), hashlib.sha256(content[:length]).hexdigest()
        places = {key: entry["data_offsets"] for key, entry in json.loads(content[8:length]).items()}
        record["tensors"] = {
            key: hashlib.sha256(content[length + start : length + stop]).hexdigest()
            for key, (start, stop) in places.items()
        }
    seal(store, document)


def set_header(store: Path, part: int, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the header of a part file, and seal the store again."""
    path = store / f"part-{part:05d}.safetensors"
    header, data = header_of(path)
    change(header)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    reseal(store)


def set_numbers(store: Path, part: int, key: str, change: Callable[[np.ndarray], None]) -> None:
    """Change the numbers of a tensor of a part file in place, and seal the store again."""
    path = store / f"part-{part:05d}.safetensors"
    header, data = header_of(path)
    entry, content = header[key], bytearray(path.read_bytes())
    start = len(content) - len(data) + entry["data_offsets"][0]
    count = entry["data_offsets"][1] - entry["data_offsets"][0]
    change(np.frombuffer(memoryview(content)[start : start + count], _NUMPY[entry["dtype"]]))
    path.write_bytes(content)
    reseal(store)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the values of a JSON document are, those of lists and objects included."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from leaves(item, (*path, key))


def changed(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy of a JSON document with another value at `path`; `KeyError` as the value removes what is there."""
    copied = json.loads(json.dumps(document))
    *way, last = path
    parent = copied
    for key in way:
        parent = parent[key]
    if value is KeyError:
        del parent[last]
    else:
        parent[last] = value
    return copied
