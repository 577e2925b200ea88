"""What people ask of a cluster: each command in a file of its own, apart from how it is typed (``cli_options.py``)."""
