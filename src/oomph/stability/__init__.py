"""Check whether a trick leaves training unchanged and, if not, what has to change with it."""
