"""Predictions beside published GPU measurements. Models are rebuilt from their paper or code."""
