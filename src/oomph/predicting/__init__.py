"""Trace -> Prediction: a step's memory and time, with torch's allocator replayed. No I/O."""
