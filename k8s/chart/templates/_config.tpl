{{/* Paceline's configuration, and serveConfigV2, which passes it to Ray Serve. Ray ignores unknown keys silently, so use
only keys that Ray and Paceline define. */}}

{{/* The configuration of the values, completed by the chart. YAML, for fromYaml. */}}
{{- define "paceline.config" -}}
{{- $name := include "paceline.fullname" . -}}
{{- $cache := dict "url" (ternary (printf "redis://%s-cache:6379/0" $name) "none" .Values.cache.enabled) -}}
{{- if include "paceline.cacheSecret" . }}{{ $_ := set $cache "password_file" "/etc/paceline/cache/password" }}{{ end -}}
{{- $known := dict
  "gateway" (dict "host" "0.0.0.0" "http_port" 8000 "grpc_port" 9000 "replicas" 2 "request_timeout_s" 600 "grpc_reflection" true "metrics_host" "0.0.0.0" "metrics_port" 9464)
  "target" (dict "groups" 1 "tensor_parallel" 1 "device" (ternary "cuda" "cpu" (ne "0" (include "paceline.gpus" .Values.target))))
  "draft" (dict "model" "auto" "workers" 1 "device" (ternary "cuda" "cpu" (ne "0" (include "paceline.gpus" .Values.draft))))
  "tenants" (ternary (dict "file" "/etc/paceline/tenants/tenants.json") (dict "open" true) (ne "" .Values.tenants.existingSecret))
  "cache" $cache -}}
{{- $config := mergeOverwrite $known (deepCopy .Values.config) -}}
{{- $target := $config.target -}}
{{- $_ := set $target "max_groups" (default $target.groups $target.max_groups) -}}
{{- if eq 0 (int $config.draft.workers) -}}
{{- $_ := unset $config.draft "max_workers" -}}
{{- else if ne $config.draft.model "none" -}}
{{- $_ := set $config.draft "max_workers" (default $config.draft.workers $config.draft.max_workers) -}}
{{- end -}}
{{- range list "target" "draft" -}}
{{- $section := get $config . -}}
{{- if eq $section.device "auto" }}{{ $_ := set $section "device" (ternary "cuda" "cpu" (ne "0" (include "paceline.gpus" (get $.Values .)))) }}{{ end -}}
{{- end -}}
{{- range $draft := default dict $config.more_drafts -}}
{{- $_ := set $draft "workers" (default 1 $draft.workers) -}}
{{- $_ := set $draft "max_workers" (default $draft.workers $draft.max_workers) -}}
{{- if eq (default "auto" $draft.device) "auto" }}{{ $_ := set $draft "device" $config.draft.device }}{{ end -}}
{{- end -}}
{{- toYaml $config -}}
{{- end }}

{{/* Whether there are draft workers of `draft`: a model, a number above 0, and a drafter that uses them. */}}
{{- define "paceline.firstDraft" -}}
{{- $config := include "paceline.config" . | fromYaml -}}
{{- $drafters := default (list "auto") (dig "speculation" "drafters" list $config) -}}
{{- $asks := or (has "auto" $drafters) (has "draft_model" $drafters) (has "ouroboros" $drafters) -}}
{{- if and $asks (ne $config.draft.model "none") (gt (int $config.draft.workers) 0) }}true{{ end -}}
{{- end }}

{{/* Whether there are any draft workers. */}}
{{- define "paceline.drafts" -}}
{{- $config := include "paceline.config" . | fromYaml -}}
{{- $drafters := default (list "auto") (dig "speculation" "drafters" list $config) -}}
{{- if or (include "paceline.firstDraft" .) (and $config.more_drafts (not (has "none" $drafters))) }}true{{ end -}}
{{- end }}

{{/* The Secret with the password of the shared cache, if there is a cache. */}}
{{- define "paceline.cacheSecret" -}}
{{- if or .Values.cache.enabled (ne "none" (dig "cache" "url" "none" .Values.config)) }}{{ .Values.cache.existingSecret }}{{ end -}}
{{- end }}

{{/* CPUs that Ray schedules on a pod: dict root, group. Routers and gateways: one for each, half of which is for its
replacement in an upgrade. Targets: one for each rank and one for the replica that owns them. Drafts: one for each rank. */}}
{{- define "paceline.rayCpus" -}}
{{- $config := include "paceline.config" .root | fromYaml -}}
{{- if eq .group "router" -}}
{{ ceil (divf (add (int $config.target.max_groups) (int $config.gateway.replicas)) (max 1 (int .root.Values.router.minReplicas))) | int }}
{{- else if eq .group "target" -}}
{{ add1 (int $config.target.tensor_parallel) }}
{{- else -}}
{{ include "paceline.draftRanks" .root }}
{{- end -}}
{{- end }}

{{/* The pools of draft workers. YAML with the key pools, for fromYaml. */}}
{{- define "paceline.draftPools" -}}
{{- $config := include "paceline.config" . | fromYaml -}}
{{- $pools := list -}}
{{- if include "paceline.firstDraft" . }}{{ $pools = append $pools $config.draft }}{{ end -}}
{{- range default dict $config.more_drafts }}{{ $pools = append $pools . }}{{ end -}}
{{- toYaml (dict "pools" $pools) -}}
{{- end }}

{{/* Ranks that a draft pod holds: one for each GPU; without GPUs, the ranks of the largest worker. */}}
{{- define "paceline.draftRanks" -}}
{{- $most := 1 -}}
{{- range (include "paceline.draftPools" . | fromYaml).pools }}{{ $most = max $most (int (default 1 .tensor_parallel)) }}{{ end -}}
{{- $gpus := include "paceline.gpus" .Values.draft | int -}}
{{ ternary $gpus $most (gt $gpus 0) }}
{{- end }}

{{/* A deployment of draft workers: dict root, name, draft. */}}
{{- define "paceline.draftDeployment" -}}
{{- $hasGpu := ne "0" (include "paceline.gpus" .root.Values.draft) -}}
{{- $ranks := int (default 1 .draft.tensor_parallel) -}}
- name: {{ .name }}
  ray_actor_options: {num_cpus: 1, {{ if $hasGpu }}num_gpus: 1, {{ end }}resources: {draft: 0.001}{{ if and $hasGpu (gt $ranks 1) }}, runtime_env: {env_vars: {RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES: "1"}}{{ end }}}
  {{- if gt $ranks 1 }}
  # All ranks in one pod.
  placement_group_strategy: STRICT_PACK
  placement_group_bundles:
  {{- range until $ranks }}
  - {CPU: 1.0, draft: 0.001{{ if $hasGpu }}, GPU: 1.0{{ end }}}
  {{- end }}
  {{- end }}
{{- end }}

{{/* Minimum and maximum number of a group's pods: dict root, group, needed. needed: ignore the group's values and return
what the configuration requires. YAML with min and max, for fromYaml. */}}
{{- define "paceline.bounds" -}}
{{- $config := include "paceline.config" .root | fromYaml -}}
{{- $group := get .root.Values .group -}}
{{- $least := $config.target.groups -}}
{{- $most := $config.target.max_groups -}}
{{- if eq .group "draft" -}}
{{- $each := include "paceline.draftRanks" .root | int -}}
{{- $workers := 0 -}}
{{- $mostWorkers := 0 -}}
{{- $least = 0 -}}
{{- $most = 0 -}}
{{- range (include "paceline.draftPools" .root | fromYaml).pools -}}
{{- $ranks := int (default 1 .tensor_parallel) -}}
{{- if eq $ranks 1 -}}
{{- $workers = add $workers (int .workers) -}}
{{- $mostWorkers = add $mostWorkers (int .max_workers) -}}
{{- else -}}
{{- $fit := max 1 (div $each $ranks) -}}
{{- $least = add $least (ceil (divf (int .workers) $fit)) -}}
{{- $most = add $most (ceil (divf (int .max_workers) $fit)) -}}
{{- end -}}
{{- end -}}
{{- $least = add $least (ceil (divf $workers $each)) -}}
{{- $most = add $most (ceil (divf $mostWorkers $each)) -}}
{{- end -}}
{{- if eq .group "router" }}{{ $least = 1 }}{{ $most = 1 }}{{ end -}}
min: {{ ternary $least (default $least $group.minReplicas) (default false .needed) | int }}
max: {{ ternary $most (default $most $group.maxReplicas) (default false .needed) | int }}
{{- end }}

{{- define "paceline.serveConfig" -}}
{{- $config := include "paceline.config" . | fromYaml -}}
{{- $gateway := $config.gateway -}}
{{- $hasGpu := ne "0" (include "paceline.gpus" .Values.target) -}}
proxy_location: EveryNode
http_options:
  host: 0.0.0.0
  port: {{ $gateway.http_port }}
  request_timeout_s: {{ $gateway.request_timeout_s }}
  keep_alive_timeout_s: 90
grpc_options:
  port: {{ $gateway.grpc_port }}
  grpc_servicer_functions:
  - cluster.gateway.grpc.registration.add_inference
  - cluster.gateway.grpc.registration.add_health
  request_timeout_s: {{ $gateway.request_timeout_s }}
  enable_reflection: {{ $gateway.grpc_reflection }}
applications:
- name: paceline
  route_prefix: /
  import_path: cluster.app:build
  args:
    {{- toYaml $config | nindent 4 }}
  # Each pod offers a custom resource named after its group. Replicas request a small part of it, so Ray places them there.
  deployments:
  - name: Gateway
    # max_surge_percent: the new replica starts before the old one ends, which then finishes its streams.
    max_surge_percent: 100
    graceful_shutdown_timeout_s: {{ $gateway.request_timeout_s }}
    ray_actor_options: {num_cpus: 0.5, resources: {router: 0.001}}
  - name: Router
    max_surge_percent: 100
    ray_actor_options: {num_cpus: 0.5, resources: {router: 0.001}}
  - name: TargetGroup
    {{- if .Values.upgrade.secondTarget }}
    max_surge_percent: 100
    {{- end }}
    ray_actor_options: {num_cpus: 0.1, resources: {target: 0.001}}
    # The replica and its ranks, all in one pod.
    placement_group_strategy: STRICT_PACK
    placement_group_bundles:
    - {CPU: 0.1, target: 0.001}
    {{- range until (int $config.target.tensor_parallel) }}
    - {CPU: 1.0, target: 0.001{{ if $hasGpu }}, GPU: 1.0{{ end }}}
    {{- end }}
  {{- if include "paceline.firstDraft" . }}
  {{- include "paceline.draftDeployment" (dict "root" $ "name" "DraftPool" "draft" $config.draft) | nindent 2 }}
  {{- end }}
  {{- if include "paceline.drafts" . }}
  {{- range $name, $draft := default dict $config.more_drafts }}
  {{- include "paceline.draftDeployment" (dict "root" $ "name" (printf "DraftPool-%s" $name) "draft" $draft) | nindent 2 }}
  {{- end }}
  {{- end }}
{{- end }}

{{/* Seconds until a pod with open streams is ended: the wait of Serve's proxy, the longest stream, and a margin. */}}
{{- define "paceline.grace" -}}
{{- $config := include "paceline.config" . | fromYaml -}}
{{ add 30 (ceil $config.gateway.request_timeout_s | int) 20 }}
{{- end }}
