"""A coordinator as a process of its own that lives as long as its parent.

It reads one line of JSON from its standard input, the arguments of DataParallelInferenceCoordinator by name; writes its
address as a line to its standard output; and ends when the standard input is closed, as it is when the parent dies.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading

from megatron_runtime.data_parallel_inference_coordinator import DataParallelInferenceCoordinator


def main() -> None:
    """Run until SIGTERM, SHUTDOWN, or the end of the standard input."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    options = json.loads(sys.stdin.readline())
    coordinator = DataParallelInferenceCoordinator(None, **options)
    signal.signal(signal.SIGTERM, lambda *_: coordinator.stop())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_stop_at_end_of_input, args=(coordinator,), daemon=True).start()
    print(coordinator.address, flush=True)
    coordinator.start()


def _stop_at_end_of_input(coordinator: DataParallelInferenceCoordinator) -> None:
    # Unbuffered: the interpreter must be able to end while this thread still reads.
    while os.read(sys.stdin.fileno(), 4096):
        pass
    coordinator.stop()


if __name__ == "__main__":
    main()
