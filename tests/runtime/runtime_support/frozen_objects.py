"""Excludes all objects that exist from garbage collection: the last import of a process that others are forked from.

A collection in a forked process would write to every object, and so copy the memory that it shares.
"""

import gc

gc.freeze()
