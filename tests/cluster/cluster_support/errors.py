"""What can go wrong while the tests get themselves a Kubernetes.

ClusterSupportError
├── NoKubernetesError     nothing to run the tests on, and no way to make it
├── CommandFailedError    a step of the build, or kubectl, ended with an error
└── NotReadyError         a process of the control plane ended early, or was not ready in time
"""


class ClusterSupportError(Exception):
    """The base of the three; its message says what to do about it."""


class NoKubernetesError(ClusterSupportError):
    """There is neither a cluster nor programs for one."""


class CommandFailedError(ClusterSupportError):
    """A command ended with an error; the message carries the last lines that it printed."""


class NotReadyError(ClusterSupportError):
    """The control plane did not come up."""
