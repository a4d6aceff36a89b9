"""A command or training script -> its run directory, and back: watch, record, read again."""
