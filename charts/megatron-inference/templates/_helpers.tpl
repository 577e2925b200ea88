{{- /* Shorter than a name may be, so that there is room for a suffix. */ -}}
{{- define "megatron-inference.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 54 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 54 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "megatron-inference.selectorLabels" -}}
app.kubernetes.io/name: megatron-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "megatron-inference.labels" -}}
{{ include "megatron-inference.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- /* Shorter than the full name, because the suffix is longer than that of other objects. */ -}}
{{- define "megatron-inference.activatorName" -}}
{{- printf "%s-activator" (include "megatron-inference.fullname" . | trunc 53 | trimSuffix "-") -}}
{{- end -}}

{{- define "megatron-inference.activatorSelectorLabels" -}}
app.kubernetes.io/name: megatron-activator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "megatron-inference.activatorLabels" -}}
{{ include "megatron-inference.activatorSelectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- /* Peers that reach the HTTP port of models by default; empty for everyone. */ -}}
{{- define "megatron-inference.clientsFrom" -}}
{{- $peers := .Values.networkPolicy.clientsFrom | default list -}}
{{- if and $peers .Values.activator.enabled -}}
{{- $namespace := dict "matchLabels" (dict "kubernetes.io/metadata.name" .Release.Namespace) -}}
{{- $pods := dict "matchLabels" (include "megatron-inference.activatorSelectorLabels" . | fromYaml) -}}
{{- $peers = append $peers (dict "namespaceSelector" $namespace "podSelector" $pods) -}}
{{- end -}}
{{- toJson $peers -}}
{{- end -}}

{{- /* Labels or annotations. Their values may be numbers or booleans, which Kubernetes only accepts as text. */ -}}
{{- define "megatron-inference.strings" -}}
{{- range $key, $value := . }}
{{ $key | quote }}: {{ kindIs "string" $value | ternary $value (toJson $value) | quote }}
{{- end }}
{{- end -}}

{{- define "megatron-inference.serviceAccountName" -}}
{{- .Values.serviceAccount.name | default (include "megatron-inference.fullname" .) -}}
{{- end -}}

{{- define "megatron-inference.registry" -}}
{{- required "registry: is empty; set it to the path of the images that you built, such as registry.example.com/megatron, or to localhost/megatron-inference for images that are loaded into the nodes" .Values.registry | trimSuffix "/" -}}
{{- end -}}

{{- define "megatron-inference.image" -}}
{{- if .Values.image.repository -}}
{{ .Values.image.repository }}
{{- else -}}
{{ include "megatron-inference.registry" . }}/operator
{{- end -}}
:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- /* The default image of pods of models; the operator substitutes {device}. */ -}}
{{- define "megatron-inference.runtimeImage" -}}
{{- if .Values.runtime.image -}}
{{ .Values.runtime.image }}
{{- else -}}
{{ include "megatron-inference.registry" . }}/runtime:{{ .Chart.AppVersion }}-{device}
{{- end -}}
{{- end -}}

{{- define "megatron-inference.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "megatron-inference.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- /* What the operator may do wherever it serves resources; manifests/rbac.yaml grants the same. */ -}}
{{- define "megatron-inference.rules" -}}
- apiGroups: [inference.megatron.dev]
  resources: [megatroninferences]
  verbs: [get, list, watch]
- apiGroups: [inference.megatron.dev]
  resources: [megatroninferences/status]
  verbs: [patch]
- apiGroups: [inference.megatron.dev]    # required by admission for ownerReferences that block deletion
  resources: [megatroninferences/finalizers]
  verbs: [update]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [services]
  verbs: [get, list, watch, create, patch]
- apiGroups: [""]                        # the keys of each resource, by name; no list or watch
  resources: [secrets]
  verbs: [get, create]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies, ingresses]
  verbs: [get, list, watch, create, patch, delete]
{{- if .Values.operator.podDisruptionBudgets }}
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, create, patch, delete]
{{- end }}
{{- if .Values.operator.modelCaches }}
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, create, delete]
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get, list, create, patch, delete]
{{- end }}
- apiGroups: [gateway.networking.k8s.io]
  resources: [httproutes]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [inference.networking.k8s.io]
  resources: [inferencepools]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [scheduling.x-k8s.io, scheduling.volcano.sh]
  resources: [podgroups]
  verbs: [get, list, create, patch, delete]
- apiGroups: [scheduling.k8s.io]
  resources: [podgroups, workloads]
  verbs: [get, list, create, patch, delete]
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads]
  verbs: [delete]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create]
{{- end -}}

{{- /* Removes the CEL rules from a schema, in place, for crds.rules=false. The operator checks the same rules. */ -}}
{{- define "megatron-inference.withoutRules" -}}
{{- $_ := unset . "x-kubernetes-validations" -}}
{{- range . -}}
{{- if kindIs "map" . -}}
{{- include "megatron-inference.withoutRules" . -}}
{{- end -}}
{{- end -}}
{{- end -}}
