"""What can go wrong while the tests get themselves a Kubernetes, or clients of the endpoint.

ClusterSupportError
├── NoKubernetesError     nothing to run the tests on, and no way to make it
├── NoClientError         no browser, or no packages of npm
├── CommandFailedError    a step of the build, or kubectl, ended with an error
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


class NotReadyError(ClusterSupportError):
    """The control plane did not come up."""
