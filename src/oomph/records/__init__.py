"""Frozen records, made of the standard library's types only, that the modules exchange.

`None` always means unknown; unknown is never 0, -1 or "N/A".
"""
