"""The coordinator's process: ``python -m megatron_runtime.data_parallel_inference_coordinator.coordinator_process``.

`SupervisedCoordinator` starts it with `CoordinatorProcessOptions` as JSON, and the key in the environment.
"""

from __future__ import annotations

import os
import signal
import sys
from functools import partial

from megatron_runtime.data_parallel_inference_coordinator.coordinator import DataParallelInferenceCoordinator
from megatron_runtime.data_parallel_inference_coordinator.options import CoordinatorProcessOptions
from megatron_runtime.errors import ConfigurationError
from megatron_runtime.processes.parent_link import EXIT_BAD_INPUT, EXIT_DRAINED, EXIT_FAILURE, ParentLink
from megatron_runtime.processes.supervisor import error_report
from megatron_runtime.wire.key_files import publish_key, withdraw_key
from megatron_runtime.wire.security import KEY_VARIABLE

PARENT_TIMEOUT = 8.0
"""Seconds without a heartbeat of the launcher, if it sends heartbeats, after which the coordinator ends."""


def main() -> None:
    """Runs the coordinator until SIGTERM, SHUTDOWN, or the end of the parent process."""
    link = ParentLink.from_arguments()
    options = CoordinatorProcessOptions.deserialize(link.options)
    key = os.environ.get(KEY_VARIABLE)
    try:
        coordinator = DataParallelInferenceCoordinator.from_options(options.coordinator, key=key)
    except ConfigurationError as error:
        link.report(error=error_report(error))
        sys.exit(EXIT_BAD_INPUT)
    port = options.coordinator.inference_coordinator_port
    if not options.may_use_other_port and not coordinator.address.endswith(f":{port}"):
        # Peers use the given port only, which may be free again soon.
        print(f"port {port} is in use", file=sys.stderr)
        sys.exit(EXIT_FAILURE)
    signal.signal(signal.SIGTERM, lambda *_: coordinator.stop())
    if options.coordinator.schedule_output_path is not None:
        link.take_death_of_parent_as(signal.SIGTERM)  # the routing trace is written at the end
    coordinator.on_tick = partial(_tick, link, coordinator)
    coordinator.on_weights = lambda weights: link.report(weights=weights)
    if key is not None and options.publishes_key:
        publish_key(coordinator.address, key)
    link.report(phase="Serving", address=coordinator.address)
    coordinator.start()
    if options.publishes_key:
        withdraw_key(coordinator.address)
    sys.exit(EXIT_DRAINED)


def _tick(link: ParentLink, coordinator: DataParallelInferenceCoordinator) -> None:
    """End the coordinator when its launcher hangs. Engines stay with a coordinator that answers, so one that cannot be
    controlled must not continue."""
    link.beat()
    if link.parents_silence() >= PARENT_TIMEOUT:
        print(f"no heartbeat of the launcher for {PARENT_TIMEOUT:g} s: ending", file=sys.stderr)
        coordinator.stop()


if __name__ == "__main__":
    main()
