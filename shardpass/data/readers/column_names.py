"""What the names of the columns of an edge list say."""

from __future__ import annotations

_SOURCES = ("src", "source", "from")
_DESTINATIONS = ("dst", "dest", "destination", "target", "to")
_WEIGHTS = ("weight", "edge_weight")


def place_of(name: str) -> int | None:
    """0 for a column of sources, 1 for destinations, 2 for weights, `None` if the name does not tell."""
    plain = name.strip(" \t\r\n\"'\ufeff").lower().removesuffix("_id").removesuffix("_ids")
    return next((place for place, names in enumerate((_SOURCES, _DESTINATIONS, _WEIGHTS)) if plain in names), None)


def in_order(names: list[str]) -> bool:
    """Whether the columns may be source, destination and weight: no name says that its column stands elsewhere."""
    return all(place_of(name) in (None, place) for place, name in enumerate(names))
