"""The example programs of SAR's documentation, written anew for it. ``start.py`` starts one on one rank, or by fork."""
