"""The output of a trained model for every node, written layer by layer, so that an interrupted run can continue."""

from shardpass.core.inference.layerwise import infer

__all__ = [
    "infer",
]
