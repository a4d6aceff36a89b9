"""Plan -> settings of other tools, job scripts, code, edits of a script. Pure functions.

No target is imported: each export is plain data or text, and the tests check it against the target.
"""
