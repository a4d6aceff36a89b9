"""Records -> terminal. Decides nothing."""
