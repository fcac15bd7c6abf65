"""Benchmarks of speed and memory: `python -m benchmarks.run --help`, `python -m benchmarks.report`."""
