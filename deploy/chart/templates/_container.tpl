{{/* Variables of the container: those that the chart sets itself, then .settings, then extraEnv. */}}
{{- define "seqserve.env" -}}
- {name: SEQSERVE_HOST, value: "0.0.0.0"}
- {name: SEQSERVE_PORT, value: "8000"}
- {name: SEQSERVE_GRPC_PORT, value: "8001"}
- {name: SEQSERVE_MODELS, value: /models}
- {name: SEQSERVE_CACHE, value: /var/cache/seqserve}
- {name: SEQSERVE_START_SECONDS, value: {{ .Values.timing.start | quote }}}
- {name: SEQSERVE_LAME_DUCK_SECONDS, value: {{ .Values.timing.lameDuck | quote }}}
- {name: SEQSERVE_DRAIN_SECONDS, value: {{ .Values.timing.drain | quote }}}
# Connections end after a while, so that a new pod gets its share, and nobody loads a model on one pod alone.
- {name: SEQSERVE_REPLICATED, value: "true"}
{{- if .Values.sessionStore.claim.name }}
- {name: SEQSERVE_SESSION_STORE, value: /var/lib/seqserve/sessions}
{{- else if .Values.sessionStore.redis.secret }}
- name: SEQSERVE_SESSION_STORE
  valueFrom: {secretKeyRef: {name: {{ .Values.sessionStore.redis.secret }}, key: {{ .Values.sessionStore.redis.entry }}}}
{{- end }}
{{- if .Values.gpu.enabled }}
{{- $devices := list }}
{{- range until (int .Values.gpu.count) }}{{ $devices = append $devices (printf "cuda:%d" .) }}{{ end }}
- {name: SEQSERVE_DEVICE, value: {{ join "," $devices | quote }}}
{{- end }}
{{- if .Values.access.keys.secret }}
- {name: SEQSERVE_KEYS, value: /etc/seqserve/keys/{{ .Values.access.keys.file }}}
{{- else }}
- {name: SEQSERVE_INSECURE, value: "true"}
{{- end }}
{{- if .Values.access.stateKeys.secret }}
- {name: SEQSERVE_STATE_KEYS, value: /etc/seqserve/state-keys/{{ .Values.access.stateKeys.file }}}
{{- end }}
{{- if or .Values.access.allowedHosts (not .Values.access.keys.secret) }}
- {name: SEQSERVE_ALLOWED_HOSTS, value: {{ join "," (.Values.access.allowedHosts | default (list "*")) | quote }}}
{{- end }}
{{- if .Values.tls.secret }}
- {name: SEQSERVE_TLS_CERT, value: /etc/seqserve/tls/tls.crt}
- {name: SEQSERVE_TLS_KEY, value: /etc/seqserve/tls/tls.key}
{{- end }}
{{- if .Values.adminPort }}
- {name: SEQSERVE_ADMIN_PORT, value: {{ .Values.adminPort | quote }}}
{{- end }}
{{- if .Values.healthPort }}
- {name: SEQSERVE_HEALTH_PORT, value: {{ .Values.healthPort | quote }}}
{{- end }}
{{- range $name, $value := .Values.settings }}
- {name: SEQSERVE_{{ upper $name }}, value: {{ include "seqserve.text" $value | quote }}}
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* The limits and requests of the values, and the GPUs. */}}
{{- define "seqserve.resources" -}}
{{- $resources := deepCopy .Values.resources }}
{{- if .Values.gpu.enabled }}
{{- $gpus := dict "limits" (dict .Values.gpu.resource (int .Values.gpu.count)) }}
{{- $resources = merge $resources $gpus }}
{{- end }}
{{- toYaml $resources }}
{{- end }}

{{/* The name of the port that has the metrics. The health port has none where the others have TLS. */}}
{{- define "seqserve.metricsPort" -}}
{{- if and .Values.healthPort (not .Values.tls.secret) }}health{{ else }}{{ ternary "admin" "http" (ne (int .Values.adminPort) 0) }}{{ end }}
{{- end }}

{{/* The port and the scheme of the probes. */}}
{{- define "seqserve.probed" -}}
{{- if .Values.healthPort }}port: health{{ else }}port: http, scheme: {{ ternary "HTTPS" "HTTP" (ne .Values.tls.secret "") }}{{ end }}
{{- end }}
