{{/* Names, labels, numbers, and common parts of objects and pods. */}}

{{- define "paceline.name" -}}
{{ default .Chart.Name .Values.nameOverride }}
{{- end }}

{{- define "paceline.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{ .Values.fullnameOverride }}
{{- else if contains (include "paceline.name" .) .Release.Name -}}
{{ .Release.Name }}
{{- else -}}
{{ printf "%s-%s" .Release.Name (include "paceline.name" .) }}
{{- end -}}
{{- end }}

{{- define "paceline.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{ default (include "paceline.fullname" .) .Values.serviceAccount.name }}
{{- else -}}
{{ default "default" .Values.serviceAccount.name }}
{{- end -}}
{{- end }}

{{- define "paceline.modelsClaim" -}}
{{ default (printf "%s-models" (include "paceline.fullname" .)) .Values.models.existingClaim }}
{{- end }}

{{- define "paceline.priorityClass" -}}
{{ printf "%s-%s-%s" .root.Release.Namespace (include "paceline.fullname" .root) .name }}
{{- end }}

{{- define "paceline.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ default $.Chart.AppVersion .tag }}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Labels that select the pods of a component: dict root, component. KubeRay does not change these two. */}}
{{- define "paceline.selector" -}}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* A pod selector over several components: dict root, components. */}}
{{- define "paceline.selectorOfSeveral" -}}
matchLabels:
  app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
matchExpressions:
- {key: app.kubernetes.io/component, operator: In, values: {{ toJson .components }}}
{{- end }}

{{/* Labels of pods. They omit the chart's version, so that a new version alone does not replace pods. */}}
{{- define "paceline.podLabels" -}}
app.kubernetes.io/name: {{ include "paceline.name" .root | quote }}
{{ include "paceline.selector" . }}
{{- end }}

{{- define "paceline.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
{{ include "paceline.podLabels" . }}
{{- end }}

{{/* Name, namespace, labels, annotations: dict root, component, and optional name, suffix, labels, annotations,
clusterWide. */}}
{{- define "paceline.metadata" -}}
name: {{ default (printf "%s%s" (include "paceline.fullname" .root) (default "" .suffix)) .name | quote }}
{{- if not .clusterWide }}
namespace: {{ .root.Release.Namespace | quote }}
{{- end }}
labels:
  {{- toYaml (mergeOverwrite (deepCopy .root.Values.commonLabels) (default dict .labels) (include "paceline.labels" . | fromYaml)) | nindent 2 }}
{{- with mergeOverwrite (deepCopy .root.Values.commonAnnotations) (default dict .annotations) }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Bytes of a quantity such as 512Mi or 4G. */}}
{{- define "paceline.bytes" -}}
{{- floor (include "paceline.number" . | float64) | int64 -}}
{{- end }}

{{- define "paceline.number" -}}
{{- $text := toString . -}}
{{- $units := dict "" 1 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- $unit := regexFind "[A-Za-z]*$" $text -}}
{{- mulf (trimSuffix $unit $text | float64) (get $units $unit) -}}
{{- end }}

{{/* A quantity of any kind in thousandths. */}}
{{- define "paceline.thousandths" -}}
{{- $text := toString . -}}
{{- if hasSuffix "m" $text }}{{ trimSuffix "m" $text }}{{ else }}{{ mulf 1000 (include "paceline.number" $text | float64) }}{{ end -}}
{{- end }}

{{/* A quantity in Kubernetes' canonical form: 1Gi for 1024Mi, 500m for 0.5. The operator rewrites the RayService in this form
and becomes the owner of every field that it changes, which would make Helm's next upgrade fail. */}}
{{- define "paceline.canonical" -}}
{{- $text := toString . -}}
{{- $unit := regexFind "[A-Za-z]*$" $text -}}
{{- if hasSuffix "i" $unit -}}
{{- $bytes := include "paceline.bytes" $text | int64 -}}
{{- $canonical := toString $bytes -}}
{{- range $name := list "Ki" "Mi" "Gi" "Ti" -}}
{{- $size := include "paceline.bytes" (printf "1%s" $name) | int64 -}}
{{- if and $bytes (eq 0 (int64 (mod $bytes $size))) }}{{ $canonical = printf "%d%s" (div $bytes $size) $name }}{{ end -}}
{{- end -}}
{{- $canonical -}}
{{- else -}}
{{- $units := dict "m" 1 "" 1000 "k" 1000000 "M" 1000000000 "G" 1000000000000 "T" 1000000000000000 -}}
{{- $thousandths := mulf (trimSuffix $unit $text | float64) (get $units $unit) | ceil | int64 -}}
{{- $canonical := "0" -}}
{{- range $name := list "m" "" "k" "M" "G" "T" -}}
{{- $size := get $units $name | int64 -}}
{{- if and $thousandths (eq 0 (int64 (mod $thousandths $size))) }}{{ $canonical = printf "%d%s" (div $thousandths $size) $name }}{{ end -}}
{{- end -}}
{{- $canonical -}}
{{- end -}}
{{- end }}

{{/* Whether a resource is a GPU, or a part or share of one, by the resource names of the vendors' device plugins. */}}
{{- define "paceline.isGpu" -}}
{{- if regexMatch "/(gpu|gpu\\.shared|mig-.*|i915|xe)$" . }}true{{ end -}}
{{- end }}

{{/* GPUs of a container's limits. */}}
{{- define "paceline.gpus" -}}
{{- $count := 0 -}}
{{- range $name, $number := (default dict .resources.limits) -}}
{{- if include "paceline.isGpu" $name }}{{ $count = add $count (int $number) }}{{ end -}}
{{- end -}}
{{- $count -}}
{{- end }}

{{/* A map without the keys that a later values file has set to null. YAML, for fromYaml. */}}
{{- define "paceline.withoutNulls" -}}
{{- $kept := dict -}}
{{- range $key, $value := . -}}
{{- if not (kindIs "invalid" $value) }}{{ $_ := set $kept $key $value }}{{ end -}}
{{- end -}}
{{- toYaml $kept -}}
{{- end }}

{{/* The items, with only the last of those that have the same key: dict items, key. YAML, for fromYamlArray. */}}
{{- define "paceline.lastOfEach" -}}
{{- $last := dict -}}
{{- range $index, $item := .items }}{{ $_ := set $last (get $item $.key) $index }}{{ end -}}
{{- $kept := list -}}
{{- range $index, $item := .items -}}
{{- if eq $index (get $last (get $item $.key)) }}{{ $kept = append $kept $item }}{{ end -}}
{{- end -}}
{{- toYaml $kept -}}
{{- end }}

{{/* Settings of a pod: dict root, group (one of head, router, target, draft, cache, gcs). Lists of `pods` come first;
keys and named items of the group take precedence. YAML, for fromYaml. */}}
{{- define "paceline.podSettings" -}}
{{- $common := .root.Values.pods -}}
{{- $own := default dict (get .root.Values .group) -}}
{{- $settings := mergeOverwrite (deepCopy $common) (deepCopy $own) -}}
{{- range list "env" "envFrom" "volumes" "volumeMounts" "initContainers" "sidecars" "tolerations" "topologySpreadConstraints" -}}
{{- $_ := set $settings . (concat (default list (get $common .)) (default list (get $own .))) -}}
{{- end -}}
{{- range $list, $key := dict "env" "name" "volumes" "name" "volumeMounts" "mountPath" "initContainers" "name" "sidecars" "name" -}}
{{- $_ := set $settings $list (include "paceline.lastOfEach" (dict "items" (get $settings $list) "key" $key) | fromYamlArray) -}}
{{- end -}}
{{- range list "annotations" "labels" "nodeSelector" -}}
{{- $_ := set $settings . (include "paceline.withoutNulls" (get $settings .) | fromYaml) -}}
{{- end -}}
{{- toYaml $settings -}}
{{- end }}

{{/* Scheduling, user and security context of a pod: dict root, settings, priorityClass. */}}
{{- define "paceline.placement" -}}
securityContext:
  {{- toYaml .settings.securityContext | nindent 2 }}
enableServiceLinks: false
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .settings.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- with .settings.schedulerName }}
schedulerName: {{ . | quote }}
{{- end }}
{{- with default .priorityClass .settings.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .settings.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .settings.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .settings.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
