{{/* Checks that values.schema.json cannot express: values that must agree. Each message names the values and the limit. */}}
{{- define "paceline.checks" -}}
{{- $values := .Values -}}
{{- $config := include "paceline.config" . | fromYaml -}}
{{- $name := include "paceline.fullname" . -}}
{{- if gt (len $name) 40 -}}
{{- fail (printf "the full name %s has %d characters; the limit is 40, because KubeRay appends to it: set fullnameOverride" $name (len $name)) -}}
{{- end -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) -}}
{{- fail (printf "the full name is %q; it must be a DNS label that begins with a letter: set fullnameOverride" $name) -}}
{{- end -}}
{{- if $config.gateway.tls -}}
{{- fail "config.gateway.tls is for `paceline serve`; here TLS ends at gateway or ingress" -}}
{{- end -}}
{{- $drafts := include "paceline.drafts" . -}}
{{- range $group, $fields := dict "target" (list "groups" "max_groups") "draft" (list "workers" "max_workers") -}}
{{- $section := get $config $group -}}
{{- $least := int (get $section (first $fields)) -}}
{{- $most := int (get $section (last $fields)) -}}
{{- if and (gt $least $most) (or (ne $group "draft") (include "paceline.firstDraft" $)) -}}
{{- fail (printf "config.%s.%s is %d; it must not exceed %s, %d" $group (first $fields) $least (last $fields) $most) -}}
{{- end -}}
{{- end -}}
{{- range $group := list "router" "target" "draft" -}}
{{- if or (ne $group "draft") $drafts -}}
{{- $bounds := include "paceline.bounds" (dict "root" $ "group" $group) | fromYaml -}}
{{- $needed := include "paceline.bounds" (dict "root" $ "group" $group "needed" true) | fromYaml -}}
{{- if lt (int $bounds.max) (int $needed.max) -}}
{{- fail (printf "%s.maxReplicas is %d; config.%s asks for up to %d pods" $group (int $bounds.max) $group (int $needed.max)) -}}
{{- end -}}
{{- if gt (int $bounds.min) (int $bounds.max) -}}
{{- fail (printf "%s.minReplicas is %d; it must not exceed maxReplicas, %d" $group (int $bounds.min) (int $bounds.max)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $gpus := include "paceline.gpus" $values.target | int -}}
{{- $ranks := int $config.target.tensor_parallel -}}
{{- if and (gt $gpus 0) (lt $gpus $ranks) -}}
{{- fail (printf "target.resources.limits has %d GPUs; config.target.tensor_parallel %d needs as many in one pod" $gpus $ranks) -}}
{{- end -}}
{{- $draftGpus := include "paceline.gpus" $values.draft | int -}}
{{- $draftRanks := 1 -}}
{{- range (include "paceline.draftPools" . | fromYaml).pools }}{{ $draftRanks = max $draftRanks (int (default 1 .tensor_parallel)) }}{{ end -}}
{{- if and (gt $draftGpus 0) (lt $draftGpus $draftRanks) -}}
{{- fail (printf "draft.resources.limits has %d GPUs; tensor_parallel %d of a draft worker needs as many in one pod" $draftGpus $draftRanks) -}}
{{- end -}}
{{- range $group := list "target" "draft" -}}
{{- $has := gt (include "paceline.gpus" (get $values $group) | int) 0 -}}
{{- $device := get (get $config $group) "device" -}}
{{- if and (not $has) (hasPrefix "cuda" $device) -}}
{{- fail (printf "config.%s.device is %s; %s.resources.limits has no GPU" $group $device $group) -}}
{{- end -}}
{{- end -}}
{{- range $group := list "head" "router" "target" "draft" -}}
{{- $given := get $values $group -}}
{{- $shm := include "paceline.bytes" $given.shm | int64 -}}
{{- if lt $shm 157286400 -}}
{{- fail (printf "%s.shm is %s; the least is 150Mi, because half of it is Ray's object store" $group $given.shm) -}}
{{- end -}}
{{- $memory := default "" (dig "limits" "memory" "" $given.resources) -}}
{{- if and $memory (ge $shm (include "paceline.bytes" $memory | int64)) -}}
{{- fail (printf "%s.shm is %s; it must be less than resources.limits.memory, %s, which it is part of" $group $given.shm $memory) -}}
{{- end -}}
{{- end -}}
{{- range $group := list "head" "router" "target" "draft" -}}
{{- $resources := (get $values $group).resources -}}
{{- $limits := default dict $resources.limits -}}
{{- range $name, $request := default dict $resources.requests -}}
{{- if and (include "paceline.isGpu" $name) (not (hasKey $limits $name)) -}}
{{- fail (printf "%s.resources.requests has %s; resources.limits must have it, too" $group $name) -}}
{{- end -}}
{{- $limit := default (ternary (get $values $group).scratch "" (eq $name "ephemeral-storage")) (get $limits $name) -}}
{{- if and $limit $request (gt (include "paceline.thousandths" $request | float64) (include "paceline.thousandths" $limit | float64)) -}}
{{- fail (printf "%s.resources.requests.%s is %v; it must not exceed the limit, %v" $group $name $request $limit) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if gt (include "paceline.gpus" $values.head | int) 0 -}}
{{- fail "head.resources.limits has a GPU; the head does no work" -}}
{{- end -}}
{{- if eq (int $config.gateway.http_port) (int $config.gateway.grpc_port) -}}
{{- fail (printf "config.gateway.http_port and grpc_port are both %d" (int $config.gateway.http_port)) -}}
{{- end -}}
{{- range $field := list "http_port" "grpc_port" -}}
{{- $port := get $config.gateway $field | int -}}
{{- if or (has $port (list 6379 8265 8080 10001 52365)) (and (ge $port 10002) (lt $port 20000)) -}}
{{- fail (printf "config.gateway.%s is %d; Ray listens there itself, as on 6379, 8080, 8265, 52365 and 10001 to 19999" $field $port) -}}
{{- end -}}
{{- if lt $port 1024 -}}
{{- fail (printf "config.gateway.%s is %d; the least is 1024, because pods have no root rights" $field $port) -}}
{{- end -}}
{{- end -}}
{{- $upgrade := $values.upgrade -}}
{{- if eq $upgrade.type "NewClusterWithIncrementalUpgrade" -}}
{{- if not $values.autoscaler.enabled -}}
{{- fail (printf "upgrade.type is %s; it needs autoscaler.enabled" $upgrade.type) -}}
{{- end -}}
{{- if not $upgrade.gatewayClassName -}}
{{- fail (printf "upgrade.type is %s; it needs upgrade.gatewayClassName" $upgrade.type) -}}
{{- end -}}
{{- if gt (int $upgrade.stepSizePercent) (int $upgrade.maxSurgePercent) -}}
{{- fail (printf "upgrade.stepSizePercent is %d; it must not exceed maxSurgePercent, %d" (int $upgrade.stepSizePercent) (int $upgrade.maxSurgePercent)) -}}
{{- end -}}
{{- end -}}
{{- if and $upgrade.secondTarget (not (and $values.autoscaler.enabled (gt (int $config.target.max_groups) (int $config.target.groups)))) -}}
{{- fail (printf "upgrade.secondTarget needs autoscaler.enabled, and config.target.max_groups, %d, above groups, %d" (int $config.target.max_groups) (int $config.target.groups)) -}}
{{- end -}}
{{- if and $values.podDisruptionBudgets.enabled (ge (int $values.podDisruptionBudgets.router) (int $values.router.minReplicas)) -}}
{{- fail (printf "podDisruptionBudgets.router is %d; it must be less than router.minReplicas, %d, or no node could be drained" (int $values.podDisruptionBudgets.router) (int $values.router.minReplicas)) -}}
{{- end -}}
{{- if and $values.models.prepare (contains "/" $config.target.model) -}}
{{- fail (printf "config.target.model is %s; with models.prepare it must be a name of `paceline model list`" $config.target.model) -}}
{{- end -}}
{{- if not (or $values.models.prepare (hasPrefix "/" $config.target.model)) -}}
{{- fail (printf "config.target.model is %s; without models.prepare it must be a directory, /models/..." $config.target.model) -}}
{{- end -}}
{{- $head := $config.target.eagle_head -}}
{{- if not (or (has $head (list "none" "mtp")) (hasPrefix "/" $head)) -}}
{{- fail (printf "config.target.eagle_head is %s; it must be none, mtp or a directory, /models/..." $head) -}}
{{- end -}}
{{- range $pool, $draft := default dict $config.more_drafts -}}
{{- if not (hasPrefix "/" (toString $draft.model)) -}}
{{- fail (printf "config.more_drafts.%s.model is %s; it must be a directory, /models/..." $pool (toString $draft.model)) -}}
{{- end -}}
{{- if gt (int $draft.workers) (int $draft.max_workers) -}}
{{- fail (printf "config.more_drafts.%s.workers is %d; it must not exceed max_workers, %d" $pool (int $draft.workers) (int $draft.max_workers)) -}}
{{- end -}}
{{- if and (hasPrefix "cuda" $draft.device) (eq "0" (include "paceline.gpus" $values.draft)) -}}
{{- fail (printf "config.more_drafts.%s.device is %s; draft.resources.limits has no GPU" $pool $draft.device) -}}
{{- end -}}
{{- $drafters := default (list "auto") (dig "speculation" "drafters" list $config) -}}
{{- $name := printf "draft_model.%s" $pool -}}
{{- if not (or (has "none" $drafters) (has "auto" $drafters) (has $name $drafters)) -}}
{{- fail (printf "config.speculation.drafters is %s; it must include %s, or auto, for more_drafts.%s to be used" (join ", " $drafters) $name $pool) -}}
{{- end -}}
{{- end -}}
{{- if and (include "paceline.firstDraft" .) (not (hasPrefix "/" $config.draft.model)) -}}
{{- if ne $config.draft.model "auto" -}}
{{- fail (printf "config.draft.model is %s; it must be none, auto or a directory, /models/..." $config.draft.model) -}}
{{- end -}}
{{- if not (and $values.models.prepare (dig "build" true $config.draft)) -}}
{{- fail "config.draft.model is auto; only with models.prepare, and config.draft.build not false, does a pod build the drafter" -}}
{{- end -}}
{{- end -}}
{{- if and $values.networkPolicy.enabled (not $values.networkPolicy.egress) -}}
{{- if $values.models.prepare -}}
{{- fail "networkPolicy.enabled with models.prepare needs networkPolicy.egress: a rule to where models are fetched from" -}}
{{- end -}}
{{- if and (not $values.cache.enabled) (ne "none" (dig "cache" "url" "none" $config)) -}}
{{- fail (printf "networkPolicy.enabled needs networkPolicy.egress: a rule to the Redis of config.cache.url, %s" $config.cache.url) -}}
{{- end -}}
{{- end -}}
{{- range $group := list "pods" "head" "router" "target" "draft" -}}
{{- range $list := list "initContainers" "sidecars" -}}
{{- range $container := default list (get (get $values $group) $list) -}}
{{- if has $container.name (list "ray-head" "ray-worker" "prepare-model" "build-drafter") -}}
{{- fail (printf "%s.%s has a container %s; the chart has one of that name" $group $list $container.name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and $values.cache.enabled (hasKey (default dict $values.config.cache) "url") -}}
{{- fail "config.cache.url names another Redis; set cache.enabled to false" -}}
{{- end -}}
{{- end }}
