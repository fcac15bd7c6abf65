"""Features by their name without the type that partitioning puts before it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import dgl
import torch
from torch import Tensor

from shardpass.frontends.sar.common_tuples import CanonicalType


def suffix_key_lookup(
    feature_dict: Mapping[str, Tensor],
    key: str,
    expand_to_all: bool = False,
    type_list: Sequence[str | CanonicalType] | None = None,
) -> Tensor:
    """The feature `key` of `feature_dict`, whose names begin with a type: ``feat`` finds ``paper/feat``, not ``xfeat``.

    If there is no such feature, the result is an empty tensor, int64 [0], and a warning names the features.

    Args:
        feature_dict: `PartitionData.node_features` or the like.
        key: a name without its type, or a full name.
        expand_to_all: whether nodes of the types in `type_list` that lack the feature get zeros. Otherwise such types
            are left out.
        type_list: the types whose rows follow one another in the result, such as `PartitionData.node_type_names`.
            `None` means the one type that has the feature.

    Raises:
        ValueError: several types have it, or `expand_to_all` is asked for, and there is no `type_list`. Or the rows of
            the types differ in shape or dtype, or it is not known how many nodes a type has that lacks it.
    """
    matches = [name for name in feature_dict if name == key or name.endswith(f"/{key}")]
    if expand_to_all and type_list is None:
        raise ValueError("expand_to_all=True needs the type_list, for example partition_data.node_type_names")
    if key in feature_dict:
        return feature_dict[key]
    labels = [kind if isinstance(kind, str) else ":".join(kind) for kind in type_list or ()]
    if type_list is not None:
        matches = [name for name in matches if name[: -len(key) - 1] in labels]
    if not matches:
        among = "" if type_list is None else f" of the types {labels}"
        warnings.warn(
            f"no feature{among} is called {key!r}, so the result is an empty tensor; there are: "
            f"{', '.join(sorted(feature_dict)) or 'none'}",
            stacklevel=2,
        )
        return torch.empty(0, dtype=torch.int64)
    if type_list is not None:
        return _joined(feature_dict, key, labels, expand_to_all)
    if len(matches) > 1:
        raise ValueError(f"{key!r} means {', '.join(matches)}: pass one of them, or the type_list to join them")
    return feature_dict[matches[0]]


def _joined(features: Mapping[str, Tensor], key: str, labels: Sequence[str], expand: bool) -> Tensor:
    """The rows of the types one after the other, with zeros for those that lack the feature or without them."""
    present = {label: features[f"{label}/{key}"] for label in labels if f"{label}/{key}" in features}
    first = next(iter(present.values()))
    parts = []
    for number, label in enumerate(labels):
        if label in present:
            parts.append(present[label])
        elif expand:
            parts.append(first.new_zeros((_count(features, label, number), *first.shape[1:])))
    kinds = {f"{str(part.dtype).removeprefix('torch.')} rows of shape {list(part.shape[1:])}" for part in parts}
    if len(kinds) > 1:
        raise ValueError(f"{key!r} differs between the types {list(labels)}: {' and '.join(sorted(kinds))}")
    return torch.cat(parts)


def _count(features: Mapping[str, Tensor], label: str, number: int) -> int:
    """How many nodes of a type there are, from `dgl.NTYPE` or another feature."""
    if dgl.NTYPE in features:
        return int((features[dgl.NTYPE] == number).sum())
    for name, tensor in features.items():
        if name.startswith(f"{label}/"):
            return tensor.size(0)
    raise ValueError(
        f"the number of nodes of type {label!r} is not known: there is neither {dgl.NTYPE!r} nor a feature"
    )
