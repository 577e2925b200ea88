"""Runs an engine for a coordinator: its loop, its connection, and the lock step of several ranks."""
