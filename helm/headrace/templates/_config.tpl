{{/*
Headrace's configuration as it is deployed: the values' `config`, with where gateways listen, the
files of keys and TLS, and the Ray resources that put each replica onto its group of pods.
*/}}
{{- define "headrace.config" -}}
{{- $config := deepCopy .Values.config -}}
{{- $gateway := $config.gateway | default dict -}}
{{- $tls := .Values.tls.existingSecret -}}
{{- $keys := include "headrace.keys" . -}}
{{- if $gateway.tls_client_ca_file -}}
{{- fail "config.gateway.tls_client_ca_file: not in this chart, as Kubernetes' readiness probe shows no certificate; let what stands in front of the Service ask clients for theirs" -}}
{{- end -}}
{{- if not (or $keys $gateway.api_keys $gateway.insecure) -}}
{{- fail "apiKeys.existingSecret: name a Secret with a file of API keys, or anyone who reaches the endpoint could use the model. Make one with `headrace keys add me -f keys.yaml` and `kubectl create secret generic headrace-keys --from-file=keys.yaml`. To do without: config.gateway.insecure=true" -}}
{{- end -}}
{{- $_ := set $gateway "host" "::" -}}
{{- $_ := set $gateway "port" (include "headrace.port" . | int) -}}
{{- $_ := set $gateway "resources" (dict "headrace_gateway" 1) -}}
{{- /* A pod has room for two gateways, which share its port. One pod: the second place is for a new
gateway, which listens before the old one stops. Several pods: two gateways each, so that no pod is
left without one, and one listens while the other is replaced. */ -}}
{{- if gt (include "headrace.gatewayPods" . | int) 1 -}}
{{- $_ := set $gateway "replicas" (include "headrace.gatewayPods" . | int | mul 2) -}}
{{- end -}}
{{- if $keys -}}
{{- $_ := set $gateway "api_keys_file" "/etc/headrace/keys/keys.yaml" -}}
{{- end -}}
{{- if $tls -}}
{{- $_ := set $gateway "tls_cert_file" "/etc/headrace/tls/tls.crt" -}}
{{- $_ := set $gateway "tls_key_file" "/etc/headrace/tls/tls.key" -}}
{{- end -}}
{{- $_ := set $config "gateway" $gateway -}}
{{- /* Of several models each has groups of pods of its own. */ -}}
{{- range $model := $config.models | default dict | keys | sortAlpha -}}
{{- $own := get $config.models $model | default dict -}}
{{- range $role := list "prefill" "decode" -}}
{{- $_ := set $own $role (get $own $role | default dict) -}}
{{- $_ := set (get $own $role) "resources" (dict (printf "headrace_%s_%s" $role $model) 1) -}}
{{- end -}}
{{- $_ := set $config.models $model $own -}}
{{- end -}}
{{- range $role := ternary (list) (list "prefill" "decode") (gt (len ($config.models | default dict)) 0) -}}
{{- $own := get $config $role | default dict -}}
{{- $_ := set $own "resources" (dict (printf "headrace_%s" $role) 1) -}}
{{- $_ := set $config $role $own -}}
{{- end -}}
{{- /* A model in an OCI image or a bucket is a folder of a volume: _pod.tpl. */ -}}
{{- $models := list ($config.model | default dict) -}}
{{- range $own := $config.models -}}
{{- $models = append $models ($own.model | default dict) -}}
{{- end -}}
{{- range $model := $models -}}
{{- with include "headrace.modelFolder" ($model.source | default "") -}}
{{- $_ := set $model "source" . -}}
{{- end -}}
{{- end -}}
{{- $store := $config.store | default dict -}}
{{- if eq .Values.disk.type "none" -}}
{{- if $store.nvme_folder -}}
{{- fail "disk.type: is none, but config.store.nvme_folder is set; choose hostPath, ephemeral or claim" -}}
{{- end -}}
{{- else -}}
{{- $_ := set $store "nvme_folder" ($store.nvme_folder | default "/kv") -}}
{{- $_ := set $config "store" $store -}}
{{- end -}}
{{- toYaml $config -}}
{{- end -}}

{{/* The folder in pods of a model in an OCI image (`oci://IMAGE` or `oci://IMAGE#FOLDER`) or in a
bucket (`s3://BUCKET/PREFIX`); empty for other sources. */}}
{{- define "headrace.modelFolder" -}}
{{- if hasPrefix "oci://" . -}}
{{- $parts := splitn "#" 2 . -}}
/weights{{ with $parts._1 }}/{{ trimAll "/" . }}{{ end }}
{{- else if regexMatch "^(s3|gs|az)://" . -}}
/models/{{ trimSuffix "/" . | base }}-{{ sha256sum . | trunc 8 }}
{{- end -}}
{{- end -}}

{{/* A model's source as the values give it; empty if they do not. Takes a dict: root, model (its
name in `config.models`, empty without). */}}
{{- define "headrace.modelSource" -}}
{{- $config := .root.Values.config -}}
{{- $own := get ($config.models | default dict) (.model | default "") | default dict -}}
{{- dig "source" "" (ternary $config.model $own.model (empty .model) | default dict) -}}
{{- end -}}

{{- define "headrace.gatewayPods" -}}
{{- (.Values.config.gateway | default dict).replicas | default 1 | int -}}
{{- end -}}

{{/*
The groups of engine pods, as YAML with the list `groups`. Each has its name, its role, its model's
name in `config.models` (empty without), and the role's configuration with its path in the values.
*/}}
{{- define "headrace.engineGroups" -}}
{{- $config := include "headrace.config" . | fromYaml -}}
{{- $groups := list -}}
{{- range $model := $config.models | default (dict "" dict) | keys | sortAlpha -}}
{{- $own := get ($config.models | default dict) $model | default dict -}}
{{- range $role := list "prefill" "decode" -}}
{{- $shared := deepCopy (get $config $role | default dict) -}}
{{- $settings := mergeOverwrite $shared (deepCopy (get $own $role | default dict)) -}}
{{- $name := ternary (printf "%s-%s" $role $model) $role (ne $model "") -}}
{{- $path := ternary (printf "config.models.%s.%s" $model $role) (printf "config.%s" $role) (ne $model "") -}}
{{- $groups = append $groups (dict "name" $name "role" $role "model" $model "own" $settings "path" $path) -}}
{{- end -}}
{{- end -}}
{{- toYaml (dict "groups" $groups) -}}
{{- end -}}

{{/* Whether Ray's autoscaler runs: for upgrades in steps, and where a role's replicas follow the load. */}}
{{- define "headrace.rayAutoscales" -}}
{{- $scales := eq .Values.upgrade.type "NewClusterWithIncrementalUpgrade" -}}
{{- range (include "headrace.engineGroups" . | fromYaml).groups -}}
{{- $scales = or $scales (gt (len (.own.autoscaling | default dict)) 0) -}}
{{- end -}}
{{- $scales -}}
{{- end -}}

{{/*
The numbers of pods of a worker group, as YAML: replicas, min, max. An engine group has a pod for
each of Serve's replicas, of which a data-parallel group has one for each rank. Takes a dict: root,
role, own (the role's configuration).
*/}}
{{- define "headrace.pods" -}}
{{- $own := .own -}}
{{- $ranks := 1 -}}
{{- $replicas := include "headrace.gatewayPods" .root | int -}}
{{- if ne .role "gateway" -}}
{{- $ranks = dig "engine" "data_parallel_size" 1 $own | int | max 1 -}}
{{- $replicas = $own.replicas | default 1 | int -}}
{{- end -}}
{{- $min := $replicas -}}
{{- $max := $replicas -}}
{{- with $own.autoscaling -}}
{{- $min = hasKey . "min_replicas" | ternary .min_replicas 1 | int -}}
{{- $max = .max_replicas | int -}}
{{- $replicas = max $min (min $replicas $max) -}}
{{- end -}}
{replicas: {{ mul $replicas $ranks }}, min: {{ mul $min $ranks }}, max: {{ mul $max $ranks }}}
{{- end -}}

{{/* What Serve deploys (`serveConfigV2`). Every pod has Serve's proxy, by which KubeRay knows that the app answers. */}}
{{- define "headrace.serveConfig" -}}
proxy_location: EveryNode
http_options:
  host: {{ ternary "\"::\"" "0.0.0.0" .Values.ipv6Only }}
  port: 8000
applications:
  - name: headrace
    route_prefix: /
    import_path: headrace.app:build_configured
    args:
      {{- include "headrace.config" . | nindent 6 }}
{{- end -}}
