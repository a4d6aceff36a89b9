"""Predict a few models, train them for a few steps on the GPU here, and compare."""
