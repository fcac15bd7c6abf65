"""The PyG frontend: unmodified PyG models on a sharded graph."""

from shardpass.frontends.pyg.wrap import wrap

__all__ = ["wrap"]
