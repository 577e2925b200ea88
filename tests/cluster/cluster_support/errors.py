"""Errors while the tests provide a Kubernetes, or clients of the endpoint.

ClusterSupportError
├── NoKubernetesError     no Kubernetes, and no way to build one
├── NoClientError         no browser, or no npm packages
├── CommandFailedError    a build step, or kubectl, failed
├── RequestRefusedError   the API server rejected a request
└── NotReadyError         a process of the control plane ended early or was not ready in time
"""


class ClusterSupportError(Exception):
    """Base class; the message has the remedy."""


class NoKubernetesError(ClusterSupportError):
    """There is neither a cluster nor programs for one."""


class NoClientError(ClusterSupportError):
    """There is no browser, or no npm or PyPI packages, for the tests with external clients."""


class CommandFailedError(ClusterSupportError):
    """A command failed; the message has the last lines of its output."""


class RequestRefusedError(ClusterSupportError):
    """The API server answered with the HTTP status ``status`` and this message."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class NotReadyError(ClusterSupportError):
    """The control plane did not become ready."""
