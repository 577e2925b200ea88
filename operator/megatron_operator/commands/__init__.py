"""The user commands, one per file. ``cli_options.py`` declares their arguments and options."""
