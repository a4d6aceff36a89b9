"""Script -> Trace, Seen: run a user's own program, unchanged, to its second optimizer step.

Tensors on the host are real. Parameters and all tensors on the GPU are pretended: they have a size
but no memory. Integers, masks and scalars also keep their true values. The patches hold for the
whole process, which is thrown away.
"""
