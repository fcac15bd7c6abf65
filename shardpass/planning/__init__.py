"""The planner: how much memory each mode and number of ranks will need, before anything runs."""
