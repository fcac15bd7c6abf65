"""The engine over a simulated transport: every run is a function of a seed, and time passes only when it is told to."""
