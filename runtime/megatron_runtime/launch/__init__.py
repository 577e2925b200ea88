"""Starts, watches and ends the processes of one pod."""
