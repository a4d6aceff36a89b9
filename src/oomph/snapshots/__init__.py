"""A memory snapshot, which is a pickle of a stranger -> its checked events and segments."""
