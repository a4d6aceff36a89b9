"""Workload -> Trace: one training step on tensors that have no memory. Needs torch.

What is patched here is patched for the whole process: it is done in a child, never in the
process of the user.
"""
