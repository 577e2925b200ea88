"""What clients, the coordinator and engines say to each other: frames, their contents, and who may speak."""
