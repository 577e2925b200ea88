"""The coordinator's process: ``python -m megatron_runtime.data_parallel_inference_coordinator.coordinator_process``.

`SupervisedCoordinator` starts it. Its options are arguments of DataParallelInferenceCoordinator by name, and
``may_move``: whether another port will do if the wanted one is taken. The key comes in the environment.
"""

from __future__ import annotations

import os
import signal
import sys
from functools import partial

from megatron_runtime.data_parallel_inference_coordinator.coordinator import DataParallelInferenceCoordinator
from megatron_runtime.errors import ConfigurationError
from megatron_runtime.processes.parent_link import EXIT_BAD_INPUT, EXIT_DRAINED, EXIT_FAILURE, ParentLink
from megatron_runtime.processes.supervisor import error_report
from megatron_runtime.wire.security import KEY_VARIABLE

PARENTS_SILENCE = 8.0
"""Seconds without a sign of life of a launcher that gives them, after which the coordinator ends."""


def main() -> None:
    """Runs the coordinator until SIGTERM, SHUTDOWN, or the death of the parent."""
    link = ParentLink.from_arguments()
    may_move = link.options.pop("may_move")
    try:
        coordinator = DataParallelInferenceCoordinator(None, key=os.environ.get(KEY_VARIABLE), **link.options)
    except ConfigurationError as error:
        link.report(error=error_report(error))
        sys.exit(EXIT_BAD_INPUT)
    port = link.options["inference_coordinator_port"]
    if not may_move and not coordinator.address.endswith(f":{port}"):
        # Nobody would look for it at another port; the one it should have may be free again soon.
        print(f"port {port} is taken", file=sys.stderr)
        sys.exit(EXIT_FAILURE)
    signal.signal(signal.SIGTERM, lambda *_: coordinator.stop())
    if link.options.get("schedule_output_path") is not None:
        link.take_death_of_parent_as(signal.SIGTERM)  # the routing trace is written at the end
    coordinator.on_tick = partial(_tick, link, coordinator)
    coordinator.on_weights = lambda weights: link.report(weights=weights)
    link.report(phase="Serving", address=coordinator.address)
    coordinator.start()
    sys.exit(EXIT_DRAINED)


def _tick(link: ParentLink, coordinator: DataParallelInferenceCoordinator) -> None:
    """Engines stay with a coordinator that answers them, so one that nobody controls any more must not go on."""
    link.beat()
    if link.parents_silence() >= PARENTS_SILENCE:
        print(f"the launcher gave no sign of life for {PARENTS_SILENCE:g} s: ending", file=sys.stderr)
        coordinator.stop()


if __name__ == "__main__":
    main()
