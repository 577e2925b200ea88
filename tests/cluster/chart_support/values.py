"""Configurations of the chart, as flags for Helm."""

MONITORED = tuple(
    f"--set=metrics.{each}.enabled=true" for each in ("serviceMonitor", "podMonitor", "prometheusRule", "dashboard")
)
VARIANTS: dict[str, tuple[str, ...]] = {
    "default": (),
    "confined": ("--set=namespaces={alpha,beta}", "--set=crds.install=false"),
    "bare": ("--set=rbac.create=false", "--set=serviceAccount.create=false", "--set=serviceAccount.name=mine"),
    "full": (
        "--set=replicas=3",
        "--set=podDisruptionBudget.enabled=true",
        "--set=logging.verbose=true",
        "--set=operator.modelCacheRetention=86400",
        "--set=imagePullSecrets[0].name=pull",
        "--set=serviceAccount.annotations.team=platform",
        "--set=podAnnotations.team=platform",
        "--set=podLabels.team=platform",
        "--set=nodeSelector.disk=ssd",
        "--set=tolerations[0].operator=Exists",
        "--set=priorityClassName=system-cluster-critical",
        "--set-json=affinity="
        '{"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms":'
        ' [{"matchExpressions": [{"key": "disk", "operator": "Exists"}]}]}}}',
    ),
    "activated": (
        "--set=activator.enabled=true",
        '--set-json=networkPolicy.clientsFrom=[{"podSelector": {}}]',
        "--set=operator.podDisruptionBudgets=false",
        "--set=operator.modelCaches=false",
    ),
    "activated in some namespaces": (
        "--set=activator.enabled=true",
        "--set=namespaces={alpha,beta}",
        "--set=activator.apiKeySecrets={users}",
        "--set=activator.endpoint.namespace=alpha",
        '--set-json=activator.endpoint.selector="team in (a, b),tier"',
    ),
    "open": ("--set=networkPolicy.enabled=false",),
    "unwatched": ("--set-json=networkPolicy.metricsFrom=[]",),
    "watched": (*MONITORED, "--set=metrics.labels.release=prometheus", "--set=metrics.interval=10s"),
    "watched in some namespaces": (*MONITORED, "--set=namespaces={alpha}"),
    "watchful": ("--set=podDisruptionBudget.enabled=true", "--set=podDisruptionBudget.minAvailable=1"),
}
