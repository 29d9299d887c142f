{{/* A Redis role: dict root, role (cache, gcs), settings, memory, clients (components that reach it). Both run the server
of Paceline's image. */}}

{{- define "paceline.redis" -}}
{{- $root := .root -}}
{{- $values := get .root.Values .role -}}
{{- $settings := include "paceline.podSettings" (dict "root" $root "group" .role) | fromYaml -}}
{{- $metadata := include "paceline.metadata" (dict "root" .root "component" .role "suffix" (printf "-%s" .role)) -}}
{{- $selector := include "paceline.selector" (dict "root" .root "component" .role) -}}
{{- $name := printf "%s-%s" (include "paceline.fullname" .root) .role -}}
{{- $password := $values.existingSecret -}}
---
apiVersion: v1
kind: ConfigMap
metadata:
  {{- $metadata | nindent 2 }}
data:
  valkey.conf: |
    bind * -::*
    port 6379
    dir /data
    {{- range .settings }}
    {{ . }}
    {{- end }}
    daemonize no
    {{- if not $password }}
    protected-mode no
    {{- end }}
---
apiVersion: v1
kind: Service
metadata:
  {{- $metadata | nindent 2 }}
spec:
  type: ClusterIP
  clusterIP: None
  selector:
    {{- $selector | nindent 4 }}
  ports:
    - {name: redis, port: 6379, targetPort: redis, protocol: TCP}
---
apiVersion: apps/v1
kind: StatefulSet
metadata:
  {{- $metadata | nindent 2 }}
spec:
  serviceName: {{ $name | quote }}
  replicas: 1
  selector:
    matchLabels:
      {{- $selector | nindent 6 }}
  template:
    metadata:
      labels:
        {{- toYaml (mergeOverwrite (deepCopy $settings.labels) (include "paceline.podLabels" (dict "root" .root "component" .role) | fromYaml)) | nindent 8 }}
      {{- with $settings.annotations }}
      annotations:
        {{- toYaml . | nindent 8 }}
      {{- end }}
    spec:
      {{- $class := ternary (include "paceline.priorityClass" (dict "root" $root "name" "serving")) "" $root.Values.priorityClasses.enabled }}
      {{- include "paceline.placement" (dict "root" $root "settings" $settings "priorityClass" $class) | nindent 6 }}
      serviceAccountName: {{ include "paceline.serviceAccount" $root | quote }}
      automountServiceAccountToken: false
      terminationGracePeriodSeconds: 60
      containers:
        - name: valkey
          image: {{ include "paceline.image" $root | quote }}
          imagePullPolicy: {{ $root.Values.image.pullPolicy }}
          # The password is not passed on the command line, but in a copy of the settings that only this user can read.
          command:
            - bash
            - -c
            {{- if $password }}
            - >-
              umask 077 && { cat /etc/valkey/valkey.conf;
              printf 'requirepass "%s"\n' "$(cat /etc/paceline/redis/password)"; } > /tmp/valkey.conf
              && exec valkey-server /tmp/valkey.conf
            {{- else }}
            - exec valkey-server /etc/valkey/valkey.conf
            {{- end }}
          ports:
            - {name: redis, containerPort: 6379, protocol: TCP}
          resources:
            requests: {cpu: {{ $values.cpu | quote }}, memory: {{ .memory }}, ephemeral-storage: 1Gi}
            limits: {cpu: {{ $values.cpu | quote }}, memory: {{ .memory }}, ephemeral-storage: 1Gi}
          securityContext:
            {{- toYaml $settings.containerSecurityContext | nindent 12 }}
          volumeMounts:
            - {name: data, mountPath: /data}
            - {name: scratch, mountPath: /tmp}
            - {name: configuration, mountPath: /etc/valkey, readOnly: true}
            {{- if $password }}
            - {name: password, mountPath: /etc/paceline/redis, readOnly: true}
            {{- end }}
          {{- range $probe, $limits := dict "startupProbe" (list 5 60) "readinessProbe" (list 10 2) "livenessProbe" (list 20 6) }}
          {{ $probe }}:
            exec:
              command:
                - bash
                - -c
                - >-
                  exec 3<>/dev/tcp/127.0.0.1/6379 && printf 'PING\r\n' >&3 && read -t 3 -r line <&3
                  && [[ $line == +PONG* || $line == -NOAUTH* ]]
            timeoutSeconds: 5
            periodSeconds: {{ index $limits 0 }}
            failureThreshold: {{ index $limits 1 }}
          {{- end }}
      volumes:
        - name: scratch
          emptyDir: {sizeLimit: 16Mi}
        - name: configuration
          configMap: {name: {{ $name | quote }}}
        {{- with $password }}
        - name: password
          secret: {secretName: {{ . | quote }}, items: [{key: password, path: password}], defaultMode: 0440}
        {{- end }}
        {{- if not $values.storage }}
        - name: data
          emptyDir: {sizeLimit: 1Gi}
        {{- end }}
  {{- if $values.storage }}
  volumeClaimTemplates:
    - metadata:
        name: data
      spec:
        accessModes: [ReadWriteOnce]
        {{- if not (kindIs "invalid" $values.storageClassName) }}
        storageClassName: {{ $values.storageClassName | quote }}
        {{- end }}
        resources:
          requests:
            storage: {{ $values.storage }}
  {{- end }}
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  {{- $metadata | nindent 2 }}
spec:
  podSelector:
    matchLabels:
      {{- $selector | nindent 6 }}
  policyTypes: [Ingress]
  ingress:
    - from:
        - podSelector:
            {{- include "paceline.selectorOfSeveral" (dict "root" .root "components" .clients) | nindent 12 }}
      ports:
        - {port: 6379, protocol: TCP}
{{- end }}
