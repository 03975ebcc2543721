{{/*
The pod of a group. Takes a dict: root, role (head, gateway, prefill or decode), container (KubeRay
expects its name).

The root file system is read-only. What is written goes to empty volumes: /tmp (Ray's logs and
sockets), the user's home, /cache (compiled code), /dev/shm (the store's arena, Ray's objects, the
engines' queues), /models.
*/}}
{{- define "headrace.pod" -}}
{{- $root := .root -}}
{{- $role := .role -}}
{{- $group := get $root.Values $role -}}
{{- $engine := or (eq $role "prefill") (eq $role "decode") -}}
{{- $config := include "headrace.config" $root | fromYaml -}}
{{- $own := get $config $role | default dict -}}
{{- $gpus := ternary ($own.gpus | default 0) 0 $engine | int -}}
{{- $keys := include "headrace.keys" $root -}}
{{- $tls := $root.Values.tls.existingSecret -}}
{{- $user := $root.Values.podSecurity.userId -}}
{{- $disk := and $engine (ne $root.Values.disk.type "none") -}}
metadata:
  labels:
    {{- include "headrace.selector" $root | nindent 4 }}
    headrace/role: {{ $role }}
    {{- with $group.labels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $group.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "headrace.serviceAccount" $root }}
  automountServiceAccountToken: {{ and (eq $role "head") (eq (include "headrace.rayAutoscales" $root) "true") }}
  terminationGracePeriodSeconds: {{ add ($config.drain_s | default 120) 30 }}
  securityContext:
    runAsNonRoot: true
    runAsUser: {{ $user }}
    runAsGroup: {{ $user }}
    fsGroup: {{ $user }}
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile:
      type: RuntimeDefault
  {{- with $root.Values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  {{- with $group.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $group.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $group.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $group.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- $tolerations := $group.tolerations }}
  {{- if and $gpus (not $tolerations) }}
  {{- $tolerations = list (dict "key" $group.gpuKey "operator" "Exists" "effect" "NoSchedule") }}
  {{- end }}
  {{- with $tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if and $engine $group.resourceClaims }}
  resourceClaims:
    {{- toYaml $group.resourceClaims | nindent 4 }}
  {{- end }}
  {{- if $root.Values.preflight.enabled }}
  initContainers:
    - name: preflight
      image: {{ include "headrace.image" $root }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      command: [headrace, doctor, --cluster, --role, {{ $role }}, -f, /etc/headrace/config/headrace.yaml]
      {{- include "headrace.containerBody" (dict "root" $root "role" $role "gpus" $gpus "disk" $disk "preflight" true) | nindent 6 }}
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
      {{- end }}
      {{- include "headrace.containerBody" (dict "root" $root "role" $role "gpus" $gpus "disk" $disk) | nindent 6 }}
  volumes:
    - name: tmp
      emptyDir: {}
    - name: home
      emptyDir: {}
    - name: cache
      emptyDir: {}
    - name: shm
      emptyDir:
        medium: Memory
        sizeLimit: {{ include "headrace.shmMi" (dict "config" $config "engine" $engine) }}Mi
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
    {{- with $group.volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* What the container and its preflight share: rights, resources, environment, mounts. */}}
{{- define "headrace.containerBody" -}}
{{- $root := .root -}}
{{- $group := get $root.Values .role -}}
{{- $engine := or (eq .role "prefill") (eq .role "decode") -}}
{{- $resources := dict "cpu" $group.cpu "memory" $group.memory -}}
{{- range $key, $count := $group.resources -}}
{{- $_ := set $resources $key ($count | toString) -}}
{{- end -}}
{{- if and .gpus (not $group.resourceClaims) -}}
{{- $_ := set $resources $group.gpuKey (.gpus | toString) -}}
{{- end -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
    {{- if and $engine $group.ipcLock }}
    add: [IPC_LOCK]
    {{- end }}
resources:
  requests:
    {{- toYaml $resources | nindent 4 }}
  limits:
    {{- toYaml $resources | nindent 4 }}
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
  - {name: RAY_worker_niceness, value: "0"}
  {{- if $engine }}
  - {name: HF_HOME, value: /models}
  {{- with $root.Values.modelCache.tokenSecret }}
  - name: HF_TOKEN
    valueFrom: {secretKeyRef: {name: {{ . }}, key: token}}
  {{- end }}
  {{- end }}
  {{- if .preflight }}
  {{- range $key, $count := $group.resources }}
  {{- if or (hasPrefix "rdma/" $key) (hasSuffix "/efa" $key) }}
  - {name: HEADRACE_EXPECT_RDMA, value: "1"}
  {{- break }}
  {{- end }}
  {{- end }}
  {{- if $root.Values.rayToken.existingSecret }}
  - {name: RAY_AUTH_MODE, value: token}
  - name: RAY_AUTH_TOKEN
    valueFrom: {secretKeyRef: {name: {{ $root.Values.rayToken.existingSecret }}, key: auth_token}}
  {{- else if $root.Values.rayToken.enabled }}
  # KubeRay makes the token and hands it to Ray's containers only.
  - {name: HEADRACE_DOCTOR_TOLERATE, value: ray-token}
  {{- end }}
  {{- end }}
  {{- range $name, $value := $group.env }}
  - {name: {{ $name }}, value: {{ $value | quote }}}
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
  {{- if .disk }}
  - name: kv
    mountPath: {{ (include "headrace.config" $root | fromYaml).store.nvme_folder }}
  {{- end }}
  {{- if and (eq .role "gateway") (include "headrace.keys" $root) }}
  - {name: keys, mountPath: /etc/headrace/keys, readOnly: true}
  {{- end }}
  {{- if and (eq .role "gateway") $root.Values.tls.existingSecret }}
  - {name: tls, mountPath: /etc/headrace/tls, readOnly: true}
  {{- end }}
  {{- with $group.volumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* MiB of /dev/shm: Ray's objects, the engines' queues, and on engine nodes the store's arena. */}}
{{- define "headrace.shmMi" -}}
{{- $store := .config.store | default dict -}}
{{- $arena := 0.0 -}}
{{- if and .engine (ne (toString $store.enabled) "false") -}}
{{- $arena = mulf 1024 ($store.dram_gb | default 1.0 | float64) -}}
{{- end -}}
{{- addf 1024 $arena | ceil | int -}}
{{- end -}}
