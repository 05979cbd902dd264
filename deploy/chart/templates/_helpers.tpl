{{/* Name of all objects: the release's, with the chart's unless it has it. */}}
{{- define "seqserve.fullname" -}}
{{- if contains "seqserve" .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else }}{{ printf "%s-seqserve" (.Release.Name | trunc 41 | trimSuffix "-") }}
{{- end }}
{{- end }}

{{- define "seqserve.selectorLabels" -}}
app.kubernetes.io/name: seqserve
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "seqserve.labels" -}}
{{ include "seqserve.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "seqserve.image" -}}
{{- $tag := .Values.image.tag | default (ternary "gpu" "cpu" .Values.gpu.enabled) -}}
{{- if .Values.image.digest }}{{ .Values.image.repository }}@{{ .Values.image.digest }}{{ else }}{{ .Values.image.repository }}:{{ $tag }}{{ end }}
{{- end }}

{{/* A value as text. Helm reads numbers as floats, which would be written as 1.6777216e+07. */}}
{{- define "seqserve.text" -}}
{{- if and (kindIs "float64" .) (eq . (floor .)) }}{{ printf "%.0f" . }}{{ else }}{{ printf "%v" . }}{{ end }}
{{- end }}

{{/* Seconds in which a pod that has started must be ready. */}}
{{- define "seqserve.startupSeconds" -}}
{{ add .Values.timing.start 30 }}
{{- end }}

{{- define "seqserve.graceSeconds" -}}
{{ add .Values.timing.preStop .Values.timing.lameDuck .Values.timing.drain .Values.timing.margin }}
{{- end }}

{{- define "seqserve.engines" -}}
{{ ternary (int .Values.gpu.count) 1 .Values.gpu.enabled }}
{{- end }}

{{/* Open sessions of a pod above which pods are added. */}}
{{- define "seqserve.sessionTarget" -}}
{{- $places := mul (get .Values.settings "max_sessions" | default 4096) (include "seqserve.engines" . | int) -}}
{{ max 1 (div (mul $places .Values.autoscaling.sessionPercent) 100) }}
{{- end }}

{{- define "seqserve.autoscaled" -}}
{{ if ne .Values.autoscaling.by "none" }}true{{ end }}
{{- end }}

{{/* Behaviour of the autoscaler, of HPA and KEDA alike. */}}
{{- define "seqserve.scaling" -}}
scaleUp:
  stabilizationWindowSeconds: {{ .Values.autoscaling.scaleUp.stabilizationSeconds }}
  policies:
    - type: Pods
      value: {{ .Values.autoscaling.scaleUp.pods }}
      periodSeconds: {{ .Values.autoscaling.scaleUp.periodSeconds }}
scaleDown:
  stabilizationWindowSeconds: {{ .Values.autoscaling.scaleDown.stabilizationSeconds }}
  policies:
    - type: Pods
      value: {{ .Values.autoscaling.scaleDown.pods }}
      periodSeconds: {{ .Values.autoscaling.scaleDown.periodSeconds }}
{{- end }}

{{/* Refuse values that render but cannot work. */}}
{{- define "seqserve.check" -}}
{{- if not (or .Values.access.insecure .Values.access.keys.secret) }}
{{- fail "the service needs keys, or consent to serve everybody: set access.keys.secret to a Secret with a file of keys, or access.insecure=true" }}
{{- end }}
{{- if and (eq .Values.models.from "claim") (not .Values.models.claim.name) }}{{ fail "models.from is claim: set models.claim.name" }}{{ end }}
{{- if and (eq .Values.models.from "imageVolume") (not .Values.models.imageVolume.reference) }}{{ fail "models.from is imageVolume: set models.imageVolume.reference" }}{{ end }}
{{- if and (eq .Values.models.from "init") (not (and .Values.models.init.image .Values.models.init.command)) }}{{ fail "models.from is init: set models.init.image and models.init.command" }}{{ end }}
{{- if and .Values.sessionStore.claim.name .Values.sessionStore.redis.secret }}{{ fail "sessionStore.claim.name and sessionStore.redis.secret are both set: sessions are saved in one of both" }}{{ end }}
{{- if and (eq (int .Values.rollout.maxSurge) 0) (eq (int .Values.rollout.maxUnavailable) 0) }}{{ fail "rollout.maxSurge and rollout.maxUnavailable are both 0: no rollout could replace a pod" }}{{ end }}
{{- if gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas) }}{{ fail "autoscaling.minReplicas is larger than autoscaling.maxReplicas" }}{{ end }}
{{- if and .Values.monitor.enabled .Values.access.keys.secret (not .Values.monitor.key.secret) }}{{ fail "the service has keys, and so Prometheus needs one: set monitor.key.secret" }}{{ end }}
{{- if and .Values.access.allowedHosts (not (has "*" .Values.access.allowedHosts)) .Values.monitor.enabled }}{{ fail "access.allowedHosts leaves out the IP addresses of pods, by which Prometheus addresses them: leave it empty, with keys" }}{{ end }}
{{- if and .Values.gpu.enabled (contains "/mig-" .Values.gpu.resource) (gt (int .Values.gpu.count) 1) }}{{ fail "gpu.resource is a part of a GPU, of which CUDA uses one: set gpu.count=1 and raise replicas" }}{{ end }}
{{- range .Values.extraEnv }}
{{- if hasPrefix "SEQSERVE_" .name }}{{ fail (printf "extraEnv has %s: set it in settings" .name) }}{{ end }}
{{- end }}
{{- end }}
