"""The names of part files and of the tensors in them. Type and field names are quoted, so that no two can collide."""

from __future__ import annotations

from urllib.parse import quote, unquote

from shardpass.data.raw import EdgeType, NodeType

NAMES_FILE = "names.safetensors"
GRAPH_FILE = "graph.safetensors"
GRAPH_FIELDS = "graph/"
EDGE_ARRAYS = ("src_rows", "row_starts", "halo_rows", "halo_starts", "edge_ids")


def part_file_name(part: int) -> str:
    return f"part-{part:05d}.safetensors"


def node_ids_key(node_type: NodeType) -> str:
    return f"node_ids/{_quoted(node_type)}"


def names_key(node_type: NodeType) -> str:
    """Names that are integers. Those that are strings have `/text` and `/ends` behind it."""
    return f"names/{_quoted(node_type)}"


def node_field_key(node_type: NodeType, name: str) -> str:
    return f"node/{_quoted(node_type)}/{_quoted(name)}"


def edge_array_key(edge_type: EdgeType, name: str) -> str:
    return f"edge/{_quoted(*edge_type)}/{name}"


def edge_field_key(edge_type: EdgeType, name: str) -> str:
    return f"edgefield/{_quoted(*edge_type)}/{_quoted(name)}"


def graph_field_key(name: str) -> str:
    return f"{GRAPH_FIELDS}{_quoted(name)}"


def links_of(edge_type: EdgeType) -> str:
    """What the keys of all that is kept of links of this type begin with."""
    return f"link/{_quoted(*edge_type)}/"


def link_key(edge_type: EdgeType, name: str) -> str:
    return f"{links_of(edge_type)}{_quoted(name)}"


def name_of(key: str) -> str:
    """The name at the end of a key."""
    return unquote(key.rpartition("/")[2])


def is_field(key: str) -> bool:
    """Whether a tensor is a field, and not structure."""
    return key.startswith(("node/", "edgefield/"))


def _quoted(*names: str) -> str:
    return ",".join(quote(name, safe="") for name in names)  # quote() leaves no comma and no slash in a name
