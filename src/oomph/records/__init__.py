"""What flows through the house: frozen records of the standard library's types only.

`None` always means that nobody could tell; it is never 0, -1 or "N/A".
"""
