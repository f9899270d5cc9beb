"""Connects the monitors of several nodes, and authenticates their messages."""
