"""Child processes: how one starts, reports to its parent, is restarted after a failure, and ends."""
