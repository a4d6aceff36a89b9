"""Predictions -> Plan: which variants exist, which fit, and which one to recommend. No I/O."""
