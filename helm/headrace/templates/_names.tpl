{{/* The release's name, at most 40 characters, as KubeRay adds some of its own. A longer one ends in
a hash, so that two releases never share a name. */}}
{{- define "headrace.name" -}}
{{- $name := .Values.nameOverride | default .Release.Name -}}
{{- if gt (len $name) 40 -}}
{{ $name | trunc 31 | trimSuffix "-" }}-{{ $name | sha256sum | trunc 8 }}
{{- else -}}
{{ $name }}
{{- end -}}
{{- end -}}

{{/* Labels that select the release's pods. */}}
{{- define "headrace.selector" -}}
app.kubernetes.io/name: headrace
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* Labels of all objects. */}}
{{- define "headrace.labels" -}}
{{ include "headrace.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ include "headrace.texts" . }}
{{- end }}
{{- end -}}

{{- define "headrace.image" -}}
{{- $image := .Values.image -}}
{{- if $image.digest -}}
{{ printf "%s@%s" $image.repository $image.digest }}
{{- else -}}
{{ printf "%s:%s" $image.repository (include "headrace.text" $image.tag | default .Chart.AppVersion) }}
{{- end -}}
{{- end -}}

{{- define "headrace.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (include "headrace.name" .) }}
{{- end -}}

{{/* Where gateways listen in their pods. Ray's own ports are 6379, 8000, 8080, 8265 and 10001. */}}
{{- define "headrace.port" -}}8088{{- end -}}

{{/* Name of the Secret with the file of API keys; empty without keys. */}}
{{- define "headrace.keys" -}}
{{- if .Values.apiKeys.existingSecret -}}
{{ .Values.apiKeys.existingSecret }}
{{- else if .Values.apiKeys.file -}}
{{ include "headrace.name" . }}-keys
{{- end -}}
{{- end -}}

{{/* Address of the web console, to which dashboards link. */}}
{{- define "headrace.consoleUrl" -}}
{{- if .Values.monitoring.consoleUrl -}}
{{ .Values.monitoring.consoleUrl }}
{{- else if and .Values.ingress.enabled .Values.ingress.host -}}
{{ ternary "https" "http" (ne .Values.ingress.tlsSecret "") }}://{{ .Values.ingress.host }}/console
{{- else -}}
http://127.0.0.1:8000/console
{{- end -}}
{{- end -}}

{{/* Name of the claim with the model; empty without one. */}}
{{- define "headrace.modelClaim" -}}
{{- if eq .Values.modelCache.type "claim" -}}
{{ required "modelCache.claimName: name the claim, as modelCache.type is claim" .Values.modelCache.claimName }}
{{- else if eq .Values.modelCache.type "new" -}}
{{ include "headrace.name" . }}-models
{{- end -}}
{{- end -}}
