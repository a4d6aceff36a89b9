"""Is the training still the same, and if not, what has to change with it?"""
