{{/* Values that each are valid, but cannot work together in this chart. */}}
{{- define "headrace.checks" -}}
{{- $values := .Values -}}
{{- $config := include "headrace.config" . | fromYaml -}}
{{- $models := dict -}}
{{- range $name, $each := $config.models -}}
{{- $_ := set $models (printf "config.models.%s" $name) ($each.model | default dict) -}}
{{- end -}}
{{- if not $models -}}
{{- $model := $config.model | default dict -}}
{{- if and (eq ($model.source | default "") "HuggingFaceTB/SmolLM2-135M-Instruct") (not (contains "smollm2" ($model.id | default "" | lower))) -}}
{{- fail (printf "config.model.source: is still the chart's own model, SmolLM2, but config.model.id is %s; set both" $model.id) -}}
{{- end -}}
{{- $_ := set $models "config" $model -}}
{{- end -}}
{{- range $path, $model := $models -}}
{{- $source := $model.source | default $model.id | default "" -}}
{{- if regexMatch "^[a-zA-Z0-9]+://" $source -}}
{{- fail (printf "%s.model.source: must be a name on the hub, a folder, or an address that begins with s3://, gs://, az:// or oci://, got %s" $path $source) -}}
{{- end -}}
{{- end -}}
{{- $managed := dict "RAY_REDIS_ADDRESS" "gcsFaultTolerance.redisAddress" "REDIS_USERNAME" "gcsFaultTolerance.username" "REDIS_PASSWORD" "gcsFaultTolerance.passwordSecret" "RAY_enable_autoscaler_v2" "autoscalerOptions.version" -}}
{{- range $name, $path := $managed -}}
{{- if hasKey $values.head.env $name -}}
{{- fail (printf "head.env.%s: KubeRay sets it, and refuses yours; set %s" $name $path) -}}
{{- end -}}
{{- end -}}
{{- include "headrace.checkSecrets" . -}}
{{- range (include "headrace.engineGroups" . | fromYaml).groups -}}
{{- $role := .role -}}
{{- include "headrace.checkEngine" (dict "values" $values "role" $role "path" .path "config" .own) -}}
{{- $shm := include "headrace.shmMi" (dict "config" $config "engine" true "gpus" (.own.gpus | default 0 | int)) | int -}}
{{- $memory := get $values $role | dig "memory" "" -}}
{{- if gt (mulf $shm 1048576) (include "headrace.number" $memory | float64) -}}
{{- fail (printf "%s.memory: is %v, but /dev/shm takes %d MiB of it; lower config.store.dram_gb, or raise the memory" $role $memory $shm) -}}
{{- end -}}
{{- end -}}
{{- if eq $values.disk.type "ephemeral" -}}
{{- $gb := dig "store" "nvme_gb" 0 $config | float64 -}}
{{- if lt (include "headrace.number" $values.disk.size | float64) (mulf $gb 1073741824) -}}
{{- fail (printf "disk.size: must be at least config.store.nvme_gb, %vGi, got %v" $gb $values.disk.size) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* An engine must fit into one pod, and its pod must have what it asks Ray for. */}}
{{- define "headrace.checkEngine" -}}
{{- $role := .role -}}
{{- $path := .path -}}
{{- $engine := .config.engine | default dict -}}
{{- $gpus := .config.gpus | default 0 | int -}}
{{- range $field := list "pipeline_parallel_size" "nnodes" -}}
{{- if gt (get $engine $field | default 1 | int) 1 -}}
{{- fail (printf "%s.engine.%s: must be 1: an engine of this chart is in one pod, and NIXL pulls from one pipeline stage; raise tensor_parallel_size and gpus, up to a node's GPUs" $path $field) -}}
{{- end -}}
{{- end -}}
{{- $tensor := $engine.tensor_parallel_size | default 1 | int -}}
{{- if ne $tensor (max 1 $gpus) -}}
{{- fail (printf "%s.gpus: is %d, but %s.engine.tensor_parallel_size is %d; set both to the GPUs of one pod" $path $gpus $path $tensor) -}}
{{- end -}}
{{- if and (not $gpus) (gt ($engine.data_parallel_size | default 1 | int) 1) -}}
{{- fail (printf "%s.engine.data_parallel_size: needs %s.gpus" $path $path) -}}
{{- end -}}
{{- range $field := list "data_parallel_size_local" "data_parallel_backend" "data_parallel_address" "data_parallel_rank" -}}
{{- if hasKey $engine $field -}}
{{- fail (printf "%s.engine.%s: Ray Serve sets it; set data_parallel_size alone" $path $field) -}}
{{- end -}}
{{- end -}}
{{- $asked := mulf (hasKey .config "cpus" | ternary .config.cpus 0.5 | float64) (max 1 $gpus) -}}
{{- $cpu := get .values $role | dig "cpu" "" -}}
{{- if gt $asked (include "headrace.number" $cpu | float64 | ceil) -}}
{{- fail (printf "%s.cpu: must be at least %v, which %s.cpus asks Ray for, for each GPU of the engine; got %v" $role $asked $path $cpu) -}}
{{- end -}}
{{- end -}}

{{/* Secrets may not be where everyone who may read ConfigMaps and RayServices sees them. */}}
{{- define "headrace.checkSecrets" -}}
{{- $config := .Values.config -}}
{{- if dig "gateway" "api_keys" "" $config -}}
{{- fail "config.gateway.api_keys: would stand in a ConfigMap in plain text; put hashes of the keys into a file with `headrace keys add`, and name its Secret in apiKeys.existingSecret" -}}
{{- end -}}
{{- if regexMatch "://[^/@]*:[^/@]+@" .Values.gcsFaultTolerance.redisAddress -}}
{{- fail "gcsFaultTolerance.redisAddress: has a password, which would stand in the RayService in plain text; use gcsFaultTolerance.username and passwordSecret" -}}
{{- end -}}
{{- range $name, $value := dig "store" "object_options" dict $config -}}
{{- if and $value (regexMatch "(?i)secret|password|token|account_key|credential" $name) -}}
{{- fail (printf "config.store.object_options.%s: would stand in a ConfigMap in plain text; set the client's own variable, such as AWS_SECRET_ACCESS_KEY, in prefill.env and decode.env by valueFrom.secretKeyRef, or give the pods an identity in serviceAccount.annotations" $name) -}}
{{- end -}}
{{- end -}}
{{- range $role := list "head" "gateway" "prefill" "decode" -}}
{{- $places := dict $role (get $.Values $role | dig "env" dict) (printf "config.%s" $role) (get $config $role | default dict | dig "env" dict) -}}
{{- range $model, $own := $config.models -}}
{{- $_ := set $places (printf "config.models.%s.%s" $model $role) (get ($own | default dict) $role | default dict | dig "env" dict) -}}
{{- end -}}
{{- $spec := get $.Values $role | dig "podTemplate" "spec" dict -}}
{{- range $container := concat ($spec.containers | default list) ($spec.initContainers | default list) -}}
{{- range $container.env -}}
{{- if and .value (include "headrace.isSecret" (dict "name" .name "value" .value)) -}}
{{- fail (printf "%s.podTemplate: the variable %s of %s would stand in the RayService in plain text; give it by valueFrom.secretKeyRef" $role .name $container.name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $place, $env := $places -}}
{{- range $name, $value := $env -}}
{{- if include "headrace.isSecret" (dict "name" "" "value" $value) -}}
{{- fail (printf "%s.env.%s: has a password, which would stand in the RayService in plain text; set %s.env.%s.valueFrom.secretKeyRef instead, and allow its port in networkPolicy.extraEgress" $place $name $role $name) -}}
{{- end -}}
{{- if and (not (kindIs "map" $value)) (include "headrace.isSecret" (dict "name" $name "value" "")) -}}
{{- fail (printf "%s.env.%s: would stand in the RayService in plain text; set %s.env.%s.valueFrom.secretKeyRef instead" $place $name $role $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Not empty if a variable is secret by its name, or has an address with a password. Takes a dict: name, value. */}}
{{- define "headrace.isSecret" -}}
{{- if or (regexMatch "(^|_)(TOKEN|SECRET|PASSWORD|API_KEY|ACCESS_KEY)$" .name) (regexMatch "://[^/@:]*:[^/@]+@" (toString .value)) -}}
yes
{{- end -}}
{{- end -}}
