"""A way to train -> put on the user's model and optimizer. Needs torch.

What is rehearsed is what is applied: the rehearsal is handed the functions of this room.
"""
