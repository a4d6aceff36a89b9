"""The tricks that fit training into memory: one file each."""
