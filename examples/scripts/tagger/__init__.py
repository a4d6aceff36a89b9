"""Tags words with a bidirectional GRU: python -m tagger.train"""
