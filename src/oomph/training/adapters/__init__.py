"""Training libraries -> their own loops, with batches split and recovered as in a Stepper.

Hugging Face's Trainer, Lightning and accelerate keep their loader, their update and their logs.
Each is imported only when one of its names is used.
"""
