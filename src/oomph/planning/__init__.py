"""Predictions -> Plan: which ways to train there are, which fit, and which one to take. Pure."""
