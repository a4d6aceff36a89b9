"""Plan -> processes: by torchrun on this machine, or as a job of a scheduler."""
