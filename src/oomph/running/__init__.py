"""Commands -> Run: where a user's unchanged program runs, and how it ends.

Nothing here needs torch. `sandbox.py` is the door: the rest is what it is made of.
"""
