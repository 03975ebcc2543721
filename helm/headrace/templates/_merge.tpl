{{/*
Merges a mapping into another one, in place, as Kubernetes' strategic merge does: containers merge by
name, variables, volumes, mounts and ports are replaced by name, tolerations and pull secrets are
appended, other lists are replaced, and null removes a field. Takes a dict: into, from.
*/}}
{{- define "headrace.merge" -}}
{{- $into := .into -}}
{{- range $key, $value := .from -}}
{{- $old := get $into $key -}}
{{- $both := printf "%s %s" (kindOf $old) (kindOf $value) -}}
{{- if kindIs "invalid" $value -}}
{{- $_ := unset $into $key -}}
{{- else if eq $both "map map" -}}
{{- include "headrace.merge" (dict "into" $old "from" $value) -}}
{{- else if and (eq $both "slice slice") (has $key (list "tolerations" "imagePullSecrets")) -}}
{{- $_ := set $into $key (concat $old $value) -}}
{{- else if and (eq $both "slice slice") (include "headrace.listKey" $key) -}}
{{- include "headrace.mergeList" (dict "into" $into "key" $key "from" $value) -}}
{{- else -}}
{{- $_ := set $into $key $value -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The field that names the items of a list; empty if a list is replaced as a whole. */}}
{{- define "headrace.listKey" -}}
{{- get (dict "containers" "name" "initContainers" "name" "env" "name" "volumes" "name" "volumeMounts" "mountPath" "ports" "containerPort") . -}}
{{- end -}}

{{/* Merges the list at `key` of `into` with the list `from`, whose items have names. */}}
{{- define "headrace.mergeList" -}}
{{- $key := .key -}}
{{- $id := include "headrace.listKey" $key -}}
{{- $new := dict -}}
{{- range .from -}}
{{- $_ := set $new (get . $id | toString) . -}}
{{- end -}}
{{- $made := list -}}
{{- $seen := dict -}}
{{- range $item := get .into $key -}}
{{- $name := get $item $id | toString -}}
{{- $_ := set $seen $name true -}}
{{- if not (hasKey $new $name) -}}
{{- $made = append $made $item -}}
{{- else if hasSuffix "ontainers" $key -}}
{{- include "headrace.merge" (dict "into" $item "from" (get $new $name)) -}}
{{- $made = append $made $item -}}
{{- else -}}
{{- $made = append $made (get $new $name) -}}
{{- end -}}
{{- end -}}
{{- range .from -}}
{{- if not (hasKey $seen (get . $id | toString)) -}}
{{- $made = append $made . -}}
{{- end -}}
{{- end -}}
{{- $_ := set .into $key $made -}}
{{- end -}}

{{/* A number, a boolean or a text as the text that Kubernetes wants. */}}
{{- define "headrace.text" -}}
{{- if kindIs "string" . -}}{{ . }}{{- else -}}{{ toJson . }}{{- end -}}
{{- end -}}

{{/* A mapping whose values are texts, as YAML. */}}
{{- define "headrace.texts" -}}
{{- $made := dict -}}
{{- range $key, $value := . -}}
{{- $_ := set $made $key (include "headrace.text" $value) -}}
{{- end -}}
{{- toYaml $made -}}
{{- end -}}

{{/* A quantity of Kubernetes, such as 500m or 16Gi, as a number. */}}
{{- define "headrace.number" -}}
{{- $text := include "headrace.text" . -}}
{{- $unit := regexFind "[A-Za-z]+$" $text -}}
{{- $units := dict "" 1.0 "m" 0.001 "k" 1e3 "K" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "Pi" 1125899906842624.0 "Ei" 1152921504606846976.0 -}}
{{- mulf (trimSuffix $unit $text | float64) (get $units $unit) -}}
{{- end -}}
