"""Writes and reads heartbeats, and watches the processes of one node."""
