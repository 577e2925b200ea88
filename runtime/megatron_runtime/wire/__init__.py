"""The messages between clients, coordinator and engines: frames, their contents, and access to the socket."""
