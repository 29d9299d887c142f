{{/* The pod template of a Ray group: dict root, group (head, router, target, draft). KubeRay adds the command
that starts Ray to the first container. */}}

{{- define "paceline.rayPod" -}}
{{- $root := .root -}}
{{- $group := .group -}}
{{- $isHead := eq $group "head" -}}
{{- $values := $root.Values -}}
{{- $settings := include "paceline.podSettings" . | fromYaml -}}
{{- $config := include "paceline.config" $root | fromYaml -}}
{{- range $name, $number := (default dict $settings.resources.limits) -}}
{{- if and (include "paceline.isGpu" $name) $number -}}
{{- $_ := set $settings "tolerations" (append (default list $settings.tolerations) (dict "key" $name "operator" "Exists" "effect" "NoSchedule")) -}}
{{- end -}}
{{- end -}}
{{- $labels := mergeOverwrite (deepCopy $settings.labels) (include "paceline.podLabels" (dict "root" $root "component" $group) | fromYaml) -}}
metadata:
  labels:
    {{- toYaml $labels | nindent 4 }}
  {{- with $settings.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- /* The head has no class: KubeRay creates the job that removes Ray's state from the head's template, and an
  uninstallation has removed the classes by then. */}}
  {{- $class := "" }}
  {{- if and $values.priorityClasses.enabled (not $isHead) }}
  {{- $class = include "paceline.priorityClass" (dict "root" $root "name" (ternary "draft" "serving" (eq $group "draft"))) }}
  {{- end }}
  {{- include "paceline.placement" (dict "root" $root "settings" $settings "priorityClass" $class) | nindent 2 }}
  restartPolicy: Never  # the autoscaler requires it; KubeRay creates a new pod
  {{- if $isHead }}
  # The autoscaler container requests pods from Kubernetes. KubeRay creates its account and rights.
  automountServiceAccountToken: {{ $values.autoscaler.enabled }}
  {{- else }}
  automountServiceAccountToken: false
  serviceAccountName: {{ include "paceline.serviceAccount" $root | quote }}
  {{- end }}
  terminationGracePeriodSeconds: {{ ternary (include "paceline.grace" $root | int) 60 (eq $group "router") }}
  {{- $spread := and $values.spread.enabled (has $group (list "router" "target")) }}
  {{- if or $settings.topologySpreadConstraints $spread }}
  topologySpreadConstraints:
    {{- with $settings.topologySpreadConstraints }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- if $spread }}
    # Targets go to different nodes, so that they are not lost together. Routers go to different zones.
    - maxSkew: 1
      topologyKey: {{ ternary "kubernetes.io/hostname" "topology.kubernetes.io/zone" (eq $group "target") }}
      whenUnsatisfiable: {{ ternary "DoNotSchedule" "ScheduleAnyway" (eq $group "target") }}
      labelSelector:
        matchLabels:
          {{- include "paceline.selector" (dict "root" $root "component" $group) | nindent 10 }}
    {{- end }}
  {{- end }}
  {{- $prepares := and $values.models.prepare (not $isHead) }}
  {{- if or $prepares $settings.initContainers }}
  initContainers:
    {{- if $prepares }}
    {{- include "paceline.preparation" (dict "root" $root "settings" $settings "name" "prepare-model" "command" (list "paceline" "model" "prepare" $config.target.model)) | nindent 4 }}
    {{- if and (eq $group "draft") (eq $config.draft.model "auto") }}
    {{- include "paceline.preparation" (dict "root" $root "settings" $settings "name" "build-drafter" "command" (list "paceline" "drafter" "build" "--keep" "--target" $config.target.model)) | nindent 4 }}
    {{- end }}
    {{- end }}
    {{- with $settings.initContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
  containers:
    - name: ray-{{ ternary "head" "worker" $isHead }}
      image: {{ include "paceline.image" $root | quote }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      ports:
        - {name: metrics, containerPort: 8080, protocol: TCP}
        {{- if $isHead }}
        - {name: gcs, containerPort: 6379, protocol: TCP}
        - {name: dashboard, containerPort: 8265, protocol: TCP}
        - {name: client, containerPort: 10001, protocol: TCP}
        # KubeRay creates its serve service from ports with these names; without one the RayService never becomes ready.
        - {name: serve, containerPort: {{ $config.gateway.http_port }}, protocol: TCP}
        - {name: serve-grpc, containerPort: {{ $config.gateway.grpc_port }}, protocol: TCP}
        {{- else }}
        - {name: http, containerPort: {{ $config.gateway.http_port }}, protocol: TCP}
        - {name: grpc, containerPort: {{ $config.gateway.grpc_port }}, protocol: TCP}
        {{- end }}
        {{- if eq $group "router" }}
        - {name: gateway-metrics, containerPort: {{ $config.gateway.metrics_port }}, protocol: TCP}
        {{- end }}
      env:
        {{- include "paceline.environment" (dict "root" $root "settings" $settings) | nindent 8 }}
      {{- with $settings.envFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      resources:
        {{- include "paceline.resources" $settings | nindent 8 }}
      securityContext:
        {{- toYaml $settings.containerSecurityContext | nindent 8 }}
      volumeMounts:
        {{- $mounts := include "paceline.ownMounts" $root | fromYamlArray }}
        {{- include "paceline.lastOfEach" (dict "items" (concat $mounts (default list $settings.volumeMounts)) "key" "mountPath") | nindent 8 }}
      {{- include "paceline.probes" (dict "root" $root "group" $group "gateway" $config.gateway) | nindent 6 }}
      {{- if eq $group "router" }}
      lifecycle:
        preStop:
          exec:
            command: [paceline, k8s, drain, --settle-s, "5", --limit-s, {{ sub (include "paceline.grace" $root | int) 5 | quote }}]
      {{- end }}
    {{- with $settings.sidecars }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    {{- $volumes := include "paceline.ownVolumes" (dict "root" $root "settings" $settings) | fromYamlArray }}
    {{- include "paceline.lastOfEach" (dict "items" (concat $volumes (default list $settings.volumes)) "key" "name") | nindent 4 }}
{{- end }}

{{/* Volumes and mounts. Those of the values replace those with the same name or path. */}}
{{- define "paceline.ownMounts" -}}
- {name: scratch, mountPath: /tmp}
- {name: shm, mountPath: /dev/shm}
- {name: models, mountPath: /models{{ if not .Values.models.prepare }}, readOnly: true{{ end }}}
{{- if .Values.tenants.existingSecret }}
- {name: tenants, mountPath: /etc/paceline/tenants, readOnly: true}
{{- end }}
{{- if include "paceline.cacheSecret" . }}
- {name: cache-password, mountPath: /etc/paceline/cache, readOnly: true}
{{- end }}
{{- end }}

{{- define "paceline.ownVolumes" -}}
- name: scratch
  emptyDir: {sizeLimit: {{ include "paceline.canonical" .settings.scratch | quote }}}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ include "paceline.canonical" .settings.shm | quote }}}
- name: models
  persistentVolumeClaim:
    claimName: {{ include "paceline.modelsClaim" .root | quote }}
    {{- if not .root.Values.models.prepare }}
    readOnly: true
    {{- end }}
{{- with .root.Values.tenants.existingSecret }}
# The whole directory is mounted, so that a changed registry becomes visible; a subPath mount is never updated.
- name: tenants
  secret: {secretName: {{ . | quote }}, defaultMode: 288}  # 0440
{{- end }}
{{- with include "paceline.cacheSecret" .root }}
- name: cache-password
  secret: {secretName: {{ . | quote }}, items: [{key: password, path: password}], defaultMode: 288}  # 0440
{{- end }}
{{- end }}

{{/* Environment variables. All writes go below /tmp, because the root file system is read-only. Ray's processes log to the
container's output. */}}
{{- define "paceline.environment" -}}
{{- $own := include "paceline.ownEnvironment" .root | fromYamlArray -}}
{{- include "paceline.lastOfEach" (dict "items" (concat $own .settings.env) "key" "name") -}}
{{- end }}

{{- define "paceline.ownEnvironment" -}}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
- {name: RAY_ENABLE_AUTO_CONNECT, value: "0"}
- {name: RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH, value: cluster.gateway.door.proxy_errors.middlewares}
- {name: RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S, value: "0.05"}
- {name: RAY_SERVE_PROXY_USE_GRPC, value: "1"}
{{- $config := include "paceline.config" . | fromYaml }}
- {name: RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH, value: {{ add (default 4194304 $config.gateway.max_body_bytes) 1048576 | quote }}}
{{- $keys := and (ne "" .Values.tenants.existingSecret) (not $config.tenants.open) }}
{{- $door := dict "asks_for_keys" $keys }}
{{- if $keys }}{{ $_ := set $door "tenants_file" $config.tenants.file }}{{ end }}
{{- range $limit := list "max_body_bytes" "max_connections" }}
{{- with get $config.gateway $limit }}{{ $_ := set $door $limit (int .) }}{{ end }}
{{- end }}
- {name: PACELINE_FRONT_DOOR, value: {{ $door | toJson | quote }}}
- {name: RAY_LOG_TO_STDERR, value: "1"}
- {name: HOME, value: /tmp/home}
- {name: XDG_CACHE_HOME, value: /tmp/cache}
- {name: NUMBA_CACHE_DIR, value: /tmp/cache/numba}
- {name: TRITON_CACHE_DIR, value: /tmp/cache/triton}
- {name: TORCHINDUCTOR_CACHE_DIR, value: /tmp/cache/inductor}
- {name: FLASHINFER_WORKSPACE_BASE, value: /tmp/cache}
- {name: HF_HOME, value: /tmp/cache/huggingface}
- {name: HF_HUB_OFFLINE, value: "1"}
- {name: OMP_NUM_THREADS, value: "1"}
- {name: PACELINE_HOME, value: {{ ternary "/models" "/tmp/paceline" .Values.models.prepare }}}
- {name: PYTHONDONTWRITEBYTECODE, value: "1"}
{{- end }}

{{/* Resources, with ephemeral storage for /tmp if `scratch` is set. */}}
{{- define "paceline.resources" -}}
{{- $resources := deepCopy .resources -}}
{{- range $kind := list "requests" "limits" -}}
{{- $amounts := include "paceline.withoutNulls" (default dict (get $resources $kind)) | fromYaml -}}
{{- if $.scratch }}{{ $_ := set $amounts "ephemeral-storage" (default $.scratch (get $amounts "ephemeral-storage")) }}{{ end -}}
{{- range $name, $amount := $amounts }}{{ $_ := set $amounts $name (include "paceline.canonical" $amount) }}{{ end -}}
{{- $_ := set $resources $kind $amounts -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end }}

{{/* An init container that fills the models' volume. It does nothing if another pod has filled it. */}}
{{- define "paceline.preparation" -}}
- name: {{ .name }}
  image: {{ include "paceline.image" .root | quote }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command: {{ toJson .command }}
  env:
    {{- include "paceline.environment" . | nindent 4 }}
  {{- with .settings.envFrom }}
  envFrom:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  resources:
    {{- include "paceline.resources" (dict "resources" .root.Values.models.resources "scratch" .settings.scratch) | nindent 4 }}
  securityContext:
    {{- toYaml .settings.containerSecurityContext | nindent 4 }}
  volumeMounts:
    - {name: scratch, mountPath: /tmp}
    - {name: models, mountPath: /models}
    {{- with .settings.volumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}

{{/* Probes. Liveness checks only the raylet: Serve's health check watches gateways, routers, targets and draft workers, and
restarts a stopped replica without its neighbours. A router pod is ready when its gateway reports it. */}}
{{- define "paceline.probes" -}}
{{- $raylet := dict "httpGet" (dict "path" "/api/local_raylet_healthz" "port" 52365) -}}
{{- $gcs := dict "httpGet" (dict "path" "/api/gcs_healthz" "port" 8265) -}}
{{- $alive := ternary $gcs $raylet (eq .group "head") -}}
{{- $ready := $alive -}}
{{- $failures := 3 -}}
{{- if eq .group "router" -}}
{{- $failures = 2 -}}
{{- $ready = dict "httpGet" (dict "path" "/readyz" "port" (int .gateway.http_port)) -}}
{{- if eq .root.Values.router.readiness "grpc" }}{{ $ready = dict "grpc" (dict "port" (int .gateway.grpc_port)) }}{{ end -}}
{{- end -}}
startupProbe:
  {{- toYaml $alive | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 60
readinessProbe:
  {{- toYaml $ready | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ $failures }}
livenessProbe:
  {{- toYaml $raylet | nindent 2 }}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 12
{{- end }}
