"""Read the hardware: GPUs and processes -> Machine, Device. No other package does."""
