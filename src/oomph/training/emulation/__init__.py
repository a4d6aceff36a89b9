"""The parts of the emulated GPU (`training/emulated.py`), from the bottom up.

patches -> card (the memory) -> places (what is on the card) -> sizes, accounting (every op)
-> tensors, factories, cuda_answers (what Python asks torch).
"""
