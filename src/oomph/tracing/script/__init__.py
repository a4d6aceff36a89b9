"""Script -> Trace, Seen: a user's own program, unchanged, up to its second optimizer step.

The tensors of the host are real. Parameters, and all that is on the GPU, are pretended: they have
a size and no memory. Whole numbers, masks and single figures have their true values as well.
What is patched here is patched for the whole process, which is thrown away.
"""
