# Holds the namespaces of a pod: the kubelet starts it before the pod's containers, and ends it after them.
FROM scratch
COPY busybox /busybox
ENTRYPOINT ["/busybox", "sh", "-c", "trap 'exit 0' TERM INT; while :; do /busybox sleep 86400 & wait $!; done"]
