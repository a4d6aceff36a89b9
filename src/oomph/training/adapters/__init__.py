"""Training libraries -> the same loops, whose batches are split and recovered as a Stepper's are.

Hugging Face's Trainer, Lightning and accelerate keep their loader, their update and their logs.
None of them is imported before one of its names is asked for.
"""
