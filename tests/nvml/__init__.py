"""The test machine: fake NVIDIA drivers that real tools run on. See machine.py."""
