"""Trace -> Prediction: what a step will need, and what torch's allocator makes of it. Pure."""
