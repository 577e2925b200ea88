"""The coordinator's process: ``python -m megatron_runtime.launch.coordinator_process``."""

from __future__ import annotations

import os
import signal
import sys

from megatron_runtime.config import DEFAULT_MAX_REQUESTS, PrefixCachingCoordinatorPolicy
from megatron_runtime.data_parallel_inference_coordinator import DataParallelInferenceCoordinator
from megatron_runtime.errors import ConfigurationError
from megatron_runtime.launch.keeper import error_report
from megatron_runtime.launch.parent_link import EXIT_BAD_INPUT, EXIT_DRAINED, EXIT_FAILURE, ParentLink
from megatron_runtime.wire.security import KEY_VARIABLE


def main() -> None:
    """Runs the coordinator until SIGTERM."""
    link = ParentLink.from_arguments()
    options = link.options
    try:
        coordinator = DataParallelInferenceCoordinator(
            None,
            options["data_parallel_size"],
            inference_coordinator_port=options["port"],
            block_size_tokens=options["block_size_tokens"],
            enable_prefix_caching=options["prefix_caching"],
            prefix_caching_coordinator_policy=PrefixCachingCoordinatorPolicy(options["policy"]),
            prefix_caching_routing_alpha=options["routing_alpha"],
            max_requests=options["max_requests"] or DEFAULT_MAX_REQUESTS,
            host=options["host"],
            key=os.environ.get(KEY_VARIABLE),
            initial_state=options["initial_state"],
            request_timeout=options["request_timeout"],
        )
    except ConfigurationError as error:
        link.report(error=error_report(error))
        sys.exit(EXIT_BAD_INPUT)
    if not coordinator.address.endswith(f":{options['port']}"):
        # Nobody would look for it at another port; the one it should have may be free again soon.
        print(f"port {options['port']} is taken", file=sys.stderr)
        sys.exit(EXIT_FAILURE)
    signal.signal(signal.SIGTERM, lambda *_: coordinator.stop())
    link.report(phase="Serving")
    coordinator.start()
    sys.exit(EXIT_DRAINED)


if __name__ == "__main__":
    main()
