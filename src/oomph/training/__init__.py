"""Apply a training variant to the user's model and optimizer, and train with it. Needs torch.

The rehearsal calls these same functions, so it rehearses exactly what is applied.
"""
