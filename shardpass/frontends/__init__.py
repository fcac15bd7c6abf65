"""Frontends: what users write for PyG, DGL or SAR, translated for the engine. Each imports its own library."""
