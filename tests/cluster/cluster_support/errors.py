"""What can go wrong while the tests get themselves a Kubernetes, or a browser.

ClusterSupportError
├── NoKubernetesError     nothing to run the tests on, and no way to make it
├── NoBrowserError        no Chromium, and no way to fetch it
├── CommandFailedError    a step of the build, or kubectl, ended with an error
└── NotReadyError         a process of the control plane ended early, or was not ready in time
"""


class ClusterSupportError(Exception):
    """The base of the others; its message says what to do about it."""


class NoKubernetesError(ClusterSupportError):
    """There is neither a cluster nor programs for one."""


class NoBrowserError(ClusterSupportError):
    """There is no Chromium."""


class CommandFailedError(ClusterSupportError):
    """A command ended with an error; the message carries the last lines that it printed."""


class NotReadyError(ClusterSupportError):
    """The control plane did not come up."""
