"""Plan -> the settings of the tool that trains: one file per target. Pure.

No target is imported: each export is plain data or text, and the tests hold it against the target.
"""
