"""Run -> Report: what happened, and why the GPU was not busy. Pure: reads and prints nothing."""
