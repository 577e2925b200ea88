"""Runs an engine for a coordinator: its loop, its connection, and lock step of several ranks."""
