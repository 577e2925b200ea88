"""What can go wrong while the tests get themselves a Kubernetes, or clients of the endpoint.

ClusterSupportError
├── NoKubernetesError     nothing to run the tests on, and no way to make it
├── NoClientError         no browser, or no packages of npm
├── CommandFailedError    a step of the build, or kubectl, ended with an error
├── RequestRefusedError   the API server answered with an error
└── NotReadyError         a process of the control plane ended early, or was not ready in time
"""


class ClusterSupportError(Exception):
    """The base of the others; its message says what to do about it."""


class NoKubernetesError(ClusterSupportError):
    """There is neither a cluster nor programs for one."""


class NoClientError(ClusterSupportError):
    """There is no browser, or no packages of npm or PyPI, for the tests with other people's clients."""


class CommandFailedError(ClusterSupportError):
    """A command ended with an error; the message carries the last lines that it printed."""


class RequestRefusedError(ClusterSupportError):
    """The API server answered with the HTTP status ``status``; the message is its own."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class NotReadyError(ClusterSupportError):
    """The control plane did not come up."""
