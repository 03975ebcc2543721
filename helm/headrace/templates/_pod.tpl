{{/*
The pod of a group: the chart's own, with the group's `podTemplate` merged into it, and then the
preflight with the resources, variables and mounts of the main container. Takes a dict: root, role
(head, gateway, prefill or decode), container (its name), and of engines: own (the role's
configuration), model (its name in `config.models`, empty without).
*/}}
{{- define "headrace.pod" -}}
{{- $root := .root -}}
{{- $group := get $root.Values .role -}}
{{- $pod := include "headrace.podOfChart" . | fromYaml -}}
{{- with $pod.Error -}}
{{- fail . -}}
{{- end -}}
{{- $env := list -}}
{{- range $name, $value := $group.env -}}
{{- if kindIs "map" $value -}}
{{- $env = append $env (dict "name" $name "valueFrom" $value.valueFrom) -}}
{{- else -}}
{{- $env = append $env (dict "name" $name "value" $value) -}}
{{- end -}}
{{- end -}}
{{- $own := dict "spec" (dict "tolerations" $group.tolerations "containers" (list (dict "name" .container "env" $env))) -}}
{{- include "headrace.merge" (dict "into" $pod "from" $own) -}}
{{- include "headrace.merge" (dict "into" $pod "from" (deepCopy $group.podTemplate)) -}}
{{- $spec := $pod.spec -}}
{{- if not $spec.tolerations -}}
{{- $_ := unset $spec "tolerations" -}}
{{- end -}}
{{- $main := first $spec.containers -}}
{{- $inMemory := 0.0 -}}
{{- range $spec.volumes -}}
{{- if eq (dig "emptyDir" "medium" "" .) "Memory" -}}
{{- $inMemory = addf $inMemory (include "headrace.number" (dig "emptyDir" "sizeLimit" "0" .) | float64) -}}
{{- end -}}
{{- end -}}
{{- $memory := dig "resources" "limits" "memory" "" $main -}}
{{- if and $memory (gt $inMemory (include "headrace.number" $memory | float64)) -}}
{{- fail (printf "%s.memory: is %s, but the pod's volumes in memory, such as shm of podTemplate, take %.0f MiB of it; raise the memory" .role $memory (divf $inMemory 1048576)) -}}
{{- end -}}
{{- $source := include "headrace.modelSource" (dict "root" $root "model" .model) -}}
{{- if and (has .role (list "prefill" "decode")) (regexMatch "^(s3|gs|az)://" $source) -}}
{{- $copy := include "headrace.modelCopy" (dict "root" $root "main" $main "source" $source) | fromYaml -}}
{{- $_ := set $spec "initContainers" (append ($spec.initContainers | default list) $copy) -}}
{{- end -}}
{{- if $root.Values.preflight.enabled -}}
{{- $check := pick $main "image" "imagePullPolicy" "securityContext" "resources" "envFrom" "volumeMounts" -}}
{{- $_ := set $check "name" "preflight" -}}
{{- $model := ternary (list "--model" .model) list (not (empty .model)) -}}
{{- $_ := set $check "command" (concat (list "headrace" "doctor" "--cluster" "--role" .role) $model (list "-f" "/etc/headrace/config/headrace.yaml")) -}}
{{- $_ := set $check "env" (concat $main.env (include "headrace.preflightEnv" (dict "root" $root "group" $group "role" .role) | fromYamlArray)) -}}
{{- $_ := set $spec "initContainers" (append ($spec.initContainers | default list) $check) -}}
{{- end -}}
{{- include "headrace.asTexts" $pod -}}
{{- toYaml $pod -}}
{{- end -}}

{{/* The limit of an empty volume of models, beyond which a pod is evicted, as a variable in a list. */}}
{{- define "headrace.modelRoom" -}}
{{- if eq .Values.modelCache.type "ephemeral" }}
- {name: HEADRACE_MODEL_ROOM_BYTES, value: {{ include "headrace.number" .Values.modelCache.size | float64 | printf "%.0f" | quote }}}
{{- end }}
{{- end -}}

{{/* The container that copies a model out of a bucket, with the variables and volumes of an engine's.
Takes a dict: root, main (the engine's container), source. */}}
{{- define "headrace.modelCopy" -}}
{{- $copy := pick .main "image" "imagePullPolicy" "env" "envFrom" -}}
{{- $mounts := list -}}
{{- range .main.volumeMounts -}}
{{- if not (has .name (list "kv" "shm" "config")) -}}
{{- $mounts = append $mounts . -}}
{{- end -}}
{{- end -}}
{{- $_ := set $copy "env" (concat .main.env (include "headrace.modelRoom" .root | fromYamlArray)) -}}
{{- $_ := set $copy "name" "model" -}}
{{- $_ := set $copy "command" (list "headrace" "model" "copy" .source (include "headrace.modelFolder" .source)) -}}
{{- $_ := set $copy "securityContext" (include "headrace.rights" .root | fromYaml) -}}
{{- $_ := set $copy "resources" (dict "requests" (dict "cpu" "500m" "memory" "1Gi") "limits" (dict "cpu" "2" "memory" "4Gi")) -}}
{{- $_ := set $copy "volumeMounts" $mounts -}}
{{- toYaml $copy -}}
{{- end -}}

{{/* Makes texts of numbers and booleans where Kubernetes takes texts only: labels, annotations, node
selectors, variables. */}}
{{- define "headrace.asTexts" -}}
{{- range $key := list "labels" "annotations" -}}
{{- with get $.metadata $key -}}
{{- $_ := set $.metadata $key (include "headrace.texts" . | fromYaml) -}}
{{- end -}}
{{- end -}}
{{- with .spec.nodeSelector -}}
{{- $_ := set $.spec "nodeSelector" (include "headrace.texts" . | fromYaml) -}}
{{- end -}}
{{- range concat .spec.containers (.spec.initContainers | default list) -}}
{{- range .env -}}
{{- if hasKey . "value" -}}
{{- $_ := set . "value" (include "headrace.text" .value) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Variables of the preflight alone. */}}
{{- define "headrace.preflightEnv" -}}
{{- range $key, $count := .group.resources }}
{{- if regexMatch "rdma|/efa$" $key }}
- {name: HEADRACE_EXPECT_RDMA, value: "1"}
{{- break }}
{{- end }}
{{- end }}
{{- if has .role (list "prefill" "decode") }}
{{- include "headrace.modelRoom" .root }}
{{- end }}
{{- with .root.Values.rayToken }}
{{- if .existingSecret }}
- {name: RAY_AUTH_MODE, value: token}
- name: RAY_AUTH_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .existingSecret }}, key: auth_token}}
{{- else if .enabled }}
# KubeRay makes the token and hands it to Ray's containers only.
- {name: HEADRACE_DOCTOR_TOLERATE, value: ray-token}
{{- end }}
{{- end }}
{{- end -}}

{{/*
The chart's own part of a pod. The root file system is read-only. What is written goes to empty
volumes: /tmp (Ray's logs and sockets), the user's home, /cache (compiled code), /dev/shm (the
store's arena, Ray's objects, the engines' queues), /models.
*/}}
{{- define "headrace.podOfChart" -}}
{{- $root := .root -}}
{{- $role := .role -}}
{{- $group := get $root.Values $role -}}
{{- $engine := or (eq $role "prefill") (eq $role "decode") -}}
{{- $config := include "headrace.config" $root | fromYaml -}}
{{- $own := .own | default dict -}}
{{- $gpus := ternary ($own.gpus | default 0) 0 $engine | int -}}
{{- $keys := include "headrace.keys" $root -}}
{{- $tls := $root.Values.tls.existingSecret -}}
{{- $disk := and $engine (ne $root.Values.disk.type "none") -}}
{{- $source := ternary (include "headrace.modelSource" (dict "root" $root "model" .model)) "" $engine -}}
{{- $weights := ternary (splitn "#" 2 (trimPrefix "oci://" $source))._0 "" (hasPrefix "oci://" $source) -}}
{{- $drainSeconds := hasKey $config "drain_s" | ternary $config.drain_s 120 | float64 | ceil | int -}}
{{- $resources := dict "cpu" (include "headrace.text" $group.cpu) "memory" (include "headrace.text" $group.memory) -}}
{{- range $key, $count := $group.resources -}}
{{- $_ := set $resources $key (include "headrace.text" $count) -}}
{{- end -}}
{{- if and $gpus (not $group.resourceClaims) -}}
{{- $_ := set $resources $group.gpuKey ($gpus | toString) -}}
{{- end -}}
metadata:
  labels:
    {{- include "headrace.selector" $root | nindent 4 }}
    headrace/role: {{ $role }}
    {{- with .model }}
    headrace/model: {{ . }}
    {{- end }}
    {{- with $root.Values.commonLabels }}
    {{- include "headrace.texts" . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "headrace.serviceAccount" $root }}
  automountServiceAccountToken: {{ and (eq $role "head") (eq (include "headrace.rayAutoscales" $root) "true") }}
  # Ray's drain, and 30 s for the rest.
  terminationGracePeriodSeconds: {{ add $drainSeconds 30 }}
  securityContext:
    {{- include "headrace.podSecurity" $root | nindent 4 }}
    fsGroupChangePolicy: OnRootMismatch
  {{- with $root.Values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  {{- with $group.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  tolerations:
    {{- if $gpus }}
    {{- $keys := list $group.gpuKey }}
    {{- /* Parts of a GPU, and claims of one, are on nodes with the taint of whole ones. */}}
    {{- if or $group.resourceClaims (hasPrefix "nvidia.com/" $group.gpuKey) }}
    {{- $keys = append $keys "nvidia.com/gpu" | uniq }}
    {{- end }}
    {{- range $keys }}
    - {key: {{ . }}, operator: Exists, effect: NoSchedule}
    {{- end }}
    {{- else }}
    []
    {{- end }}
  {{- if and $engine $group.resourceClaims }}
  resourceClaims:
    {{- toYaml $group.resourceClaims | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ .container }}
      image: {{ include "headrace.image" $root }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      ports:
        {{- if eq $role "head" }}
        - {name: gcs-server, containerPort: 6379}
        - {name: dashboard, containerPort: 8265}
        - {name: client, containerPort: 10001}
        {{- end }}
        - {name: serve, containerPort: 8000}
        - {name: metrics, containerPort: 8080}
        {{- if eq $role "gateway" }}
        - {name: http, containerPort: {{ include "headrace.port" $root }}}
        {{- end }}
      {{- if eq $role "gateway" }}
      # A gateway answers 200 as soon as an engine behind it does, so a loading app gets no requests.
      readinessProbe:
        httpGet:
          path: /health
          port: http
          {{- if $tls }}
          scheme: HTTPS
          {{- end }}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 2
      # The gateway takes requests until Services and load balancers have left the pod out.
      lifecycle:
        preStop:
          exec: {command: [sleep, "10"]}
      {{- else if $engine }}
      # The replica touches the file while its engine is well (headrace_engine.serving.ready_file).
      readinessProbe:
        exec:
          command: [sh, -c, test -n "$(find /tmp/headrace-engine-ready -newermt '30 seconds ago')"]
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 2
      {{- end }}
      securityContext:
        {{- include "headrace.rights" $root | nindent 8 }}
        {{- if and $engine $group.ipcLock }}
          add: [IPC_LOCK]
        {{- end }}
      resources:
        requests:
          {{- toYaml $resources | nindent 10 }}
        limits:
          {{- toYaml $resources | nindent 10 }}
        {{- if and $engine $group.resourceClaims }}
        claims:
          {{- range $group.resourceClaims }}
          - name: {{ .name }}
          {{- end }}
        {{- end }}
      env:
        - {name: HOME, value: /home/headrace}
        - {name: PYTHONHASHSEED, value: "0"}
        - {name: RAY_ENABLE_UV_RUN_RUNTIME_ENV, value: "0"}
        # The time that a pod which ends leaves its requests; Ray's own 30 s would cut them.
        - {name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S, value: {{ add $drainSeconds 15 | quote }}}
        - {name: RAY_worker_niceness, value: "0"}
        {{- if eq $role "head" }}
        # Failed starts in a row after which Serve's controller tries a role no more. Its own number
        # is 3 for each replica, which an outage of the model's source outlasts; 20 is its highest.
        - {name: RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT, value: "20"}
        {{- end }}
        {{- if $engine }}
        - {name: HEADRACE_READY_FILE, value: /tmp/headrace-engine-ready}
        - {name: HF_HOME, value: /models}
        {{- with $root.Values.modelCache.tokenSecret }}
        - name: HF_TOKEN
          valueFrom: {secretKeyRef: {name: {{ . }}, key: token}}
        {{- end }}
        {{- end }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: home, mountPath: /home/headrace}
        - {name: cache, mountPath: /cache}
        - {name: shm, mountPath: /dev/shm}
        - {name: config, mountPath: /etc/headrace/config, readOnly: true}
        {{- if $engine }}
        - {name: models, mountPath: /models}
        {{- end }}
        {{- if $weights }}
        - {name: weights, mountPath: /weights, readOnly: true}
        {{- end }}
        {{- if $disk }}
        - {name: kv, mountPath: {{ $config.store.nvme_folder }}}
        {{- end }}
        {{- if and (eq $role "gateway") $keys }}
        - {name: keys, mountPath: /etc/headrace/keys, readOnly: true}
        {{- end }}
        {{- if and (eq $role "gateway") $tls }}
        - {name: tls, mountPath: /etc/headrace/tls, readOnly: true}
        {{- end }}
  volumes:
    - name: tmp
      emptyDir: {}
    - name: home
      emptyDir: {}
    - name: cache
      {{- $kept := $root.Values.compileCache }}
      {{- if and $engine (eq $kept.type "hostPath") }}
      hostPath: {path: {{ $kept.hostPath }}, type: DirectoryOrCreate}
      {{- else if and $engine (eq $kept.type "claim") }}
      persistentVolumeClaim:
        claimName: {{ required "compileCache.claimName: name the claim, as compileCache.type is claim" $kept.claimName }}
      {{- else }}
      emptyDir: {}
      {{- end }}
    - name: shm
      emptyDir:
        medium: Memory
        sizeLimit: {{ include "headrace.shmMi" (dict "config" $config "engine" $engine "gpus" $gpus) }}Mi
    - name: config
      configMap:
        name: {{ include "headrace.name" $root }}
    {{- if $engine }}
    - name: models
      {{- if eq $root.Values.modelCache.type "hostPath" }}
      hostPath: {path: {{ $root.Values.modelCache.hostPath }}, type: DirectoryOrCreate}
      {{- else if eq $root.Values.modelCache.type "ephemeral" }}
      emptyDir: {sizeLimit: {{ $root.Values.modelCache.size }}}
      {{- else }}
      persistentVolumeClaim: {claimName: {{ include "headrace.modelClaim" $root }}}
      {{- end }}
    {{- end }}
    {{- if $weights }}
    - name: weights
      image: {reference: {{ $weights | quote }}, pullPolicy: {{ $root.Values.image.pullPolicy }}}
    {{- end }}
    {{- if $disk }}
    - name: kv
      {{- if eq $root.Values.disk.type "hostPath" }}
      hostPath: {path: {{ $root.Values.disk.hostPath }}, type: DirectoryOrCreate}
      {{- else if eq $root.Values.disk.type "claim" }}
      persistentVolumeClaim:
        claimName: {{ required "disk.claimName: name the claim, as disk.type is claim" $root.Values.disk.claimName }}
      {{- else }}
      ephemeral:
        volumeClaimTemplate:
          spec:
            accessModes: [ReadWriteOnce]
            {{- with $root.Values.disk.storageClassName }}
            storageClassName: {{ . }}
            {{- end }}
            resources: {requests: {storage: {{ $root.Values.disk.size }}}}
      {{- end }}
    {{- end }}
    {{- if and (eq $role "gateway") $keys }}
    - name: keys
      secret: {secretName: {{ $keys }}}
    {{- end }}
    {{- if and (eq $role "gateway") $tls }}
    - name: tls
      secret: {secretName: {{ $tls }}}
    {{- end }}
{{- end -}}

{{/* The user of a pod. Without `podSecurity.userId` the cluster chooses it. */}}
{{- define "headrace.podSecurity" -}}
runAsNonRoot: true
{{- with .Values.podSecurity.userId }}
runAsUser: {{ include "headrace.text" . }}
runAsGroup: {{ include "headrace.text" . }}
fsGroup: {{ include "headrace.text" . }}
{{- end }}
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{/* The rights of a container. */}}
{{- define "headrace.rights" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* MiB of /dev/shm: Ray's objects and the engine's queues, 1 GiB for each of its GPUs, and on engine
nodes the store's arena. */}}
{{- define "headrace.shmMi" -}}
{{- $store := .config.store | default dict -}}
{{- $arena := 0.0 -}}
{{- if and .engine (ne (toString $store.enabled) "false") -}}
{{- $arena = mulf 1024 ($store.dram_gb | default 1.0 | float64) -}}
{{- end -}}
{{- addf (mulf 1024 (max 1 .gpus)) $arena | ceil | int -}}
{{- end -}}
