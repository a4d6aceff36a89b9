"""Workload -> Trace: run a training step on tensors that take no memory. Needs torch.

These modules patch torch for the whole process, so they run in a child and never in the user's own
process.
"""
