"""Run -> Report: did it run out of memory, how busy were the GPUs, and why not busier. Pure."""
