"""Run a user's script where it can harm nothing."""
