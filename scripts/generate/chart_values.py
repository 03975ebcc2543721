"""The values of the Helm chart.

`config` is Headrace's own configuration, whose sections `headrace.config` defines. The others are
about Kubernetes. Every description is printed in the chart's README and as a comment in its
values.yaml, so each gives the unit and what happens at the limit.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Object = dict[str, Any]
Scalar = str | int | float | bool
Texts = dict[str, Scalar]
Quantity = (
    Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?([KMGTPE]i?|m|k)?$")]
    | Annotated[float, Field(gt=0)]
)
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", max_length=253)]
OptionalName = Annotated[str, Field(pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$", max_length=253)]
Count = Annotated[int, Field(ge=0)]


class Group(BaseModel):
    """Fields that may be set; unknown ones are refused."""

    model_config = ConfigDict(extra="forbid")


class EnvSource(Group):
    """The source of an environment variable, as in a pod."""

    valueFrom: Object


CPUS = "CPUs, both requested and the limit. Ray has as many to give to replicas, rounded up."
POD_TEMPLATE: Object = {
    "additionalProperties": False,
    "properties": {"metadata": {"type": "object"}, "spec": {"type": "object"}},
}
"""Schema of a part of a pod template. Kubernetes checks what is in it."""


class Image(Group):
    """The image of all pods. `docs/images.md` says how it is built."""

    repository: str = Field(
        default="headrace-cpu", min_length=1, description="Registry and name of the image."
    )
    tag: str | int | float = Field(
        default="", description="Its tag. Empty: the chart's appVersion."
    )
    digest: str = Field(
        default="",
        pattern=r"^(sha256:[0-9a-f]{64})?$",
        description="Its digest, `sha256:...`; wins over the tag.",
    )
    pullPolicy: Literal["Always", "IfNotPresent", "Never"] = Field(
        default="IfNotPresent", description="When nodes pull it."
    )
    pullSecrets: list[Name] = Field(
        default=[], description="Names of Secrets with which nodes pull it."
    )


class Pods(Group):
    """Settings of the pods of a group."""

    cpu: Quantity = Field(default="1", description=CPUS)
    memory: Quantity = Field(
        default="4Gi",
        description="Memory, both requested and the limit. It includes /dev/shm, so in engine pods "
        "the store's `dram_gb`.",
    )
    nodeSelector: Texts = Field(default={}, description="Labels of the nodes that may run them.")
    tolerations: list[Object] = Field(
        default=[],
        description="Taints that they tolerate, beside that of the nodes with GPUs, which engines "
        "with `gpus` tolerate.",
    )
    env: dict[str, Scalar | EnvSource] = Field(
        default={},
        description="Environment variables of the whole pod, UCX's, NCCL's and the hub's included. "
        "A value is text, a number, or `{valueFrom: {secretKeyRef: {name: ..., key: ...}}}`. They "
        "win over the chart's own.",
    )
    resources: dict[str, str | int] = Field(
        default={},
        description="More resources that each pod asks for, by key: RDMA devices such as "
        "`rdma/ib: 1` or `vpc.amazonaws.com/efa: 1`, hugepages such as `hugepages-2Mi: 2Gi`.",
    )
    podTemplate: Object = Field(
        default={},
        json_schema_extra=POD_TEMPLATE,
        description="Anything else of a pod: `metadata` (labels, annotations) and `spec`, merged "
        "into the pods as Kubernetes would. Containers merge by name, variables, volumes and "
        "mounts are replaced by name, tolerations are appended, `null` removes a field. The main "
        "container is `ray-worker`, in the head `ray-head`.",
    )


class Head(Pods):
    """Ray's head: the cluster's state, the dashboard and Serve's controller. It runs no engine."""

    cpu: Quantity = Field(
        default="2",
        description="CPUs, both requested and the limit. Ray gives them to no replica.",
    )


class Gateway(Pods):
    """Pods of gateways, `config.gateway.replicas` of them, to which the Service sends. If there are
    several, each runs two gateways."""


class Engines(Pods):
    """Pods of engines, one replica each; `config.prefill.replicas` or `config.decode.replicas`, or
    as many as the load takes within the bounds of the role's `autoscaling`."""

    cpu: Quantity = Field(default="4", description=CPUS)
    memory: Quantity = Field(
        default="16Gi",
        description="Memory, both requested and the limit. It includes /dev/shm, so in engine pods "
        "the store's `dram_gb`.",
    )
    gpuKey: str = Field(
        default="nvidia.com/gpu",
        min_length=1,
        description="Resource key of the GPUs; as many are asked for as the role's `gpus`.",
    )
    resourceClaims: list[Object] = Field(
        default=[],
        description="Claims of dynamic resource allocation, as in a pod; they replace `gpuKey`.",
    )
    ipcLock: bool = Field(
        default=False,
        description="Whether the container gets the capability IPC_LOCK, which RDMA needs to "
        "register memory unless the node's memlock limit is unlimited. The namespace must then "
        "allow it: the pod security levels `baseline` and `restricted` do not.",
    )


class Disk(Group):
    """Where the store's NVMe tier lies: `config.store.nvme_folder` is mounted from here."""

    type: Literal["none", "hostPath", "ephemeral", "claim"] = Field(
        default="none",
        description="`hostPath`: a folder of the node, survives pods. `ephemeral`: a volume of a "
        "storage class that lives as long as the pod. `claim`: an existing "
        "PersistentVolumeClaim that every engine pod can mount.",
    )
    hostPath: str = Field(
        default="/var/lib/headrace",
        pattern=r"^/",
        description="Folder on the nodes; it must be writable for `podSecurity.userId`.",
    )
    storageClassName: str = Field(default="", description="Of ephemeral volumes. Empty: default.")
    size: Quantity = Field(
        default="100Gi", description="Of ephemeral volumes; more than `config.store.nvme_gb`."
    )
    claimName: OptionalName = Field(default="", description="Of an existing claim.")


class ModelCache(Group):
    """Where downloaded models are kept, mounted at /models in engine pods."""

    type: Literal["ephemeral", "hostPath", "claim", "new"] = Field(
        default="ephemeral",
        description="`ephemeral`: each pod downloads into an empty volume. `hostPath`: a folder of "
        "the node. `claim`: an existing PersistentVolumeClaim. `new`: the chart makes a claim, "
        "which `helm uninstall` keeps. A claim must be mountable by all engine pods "
        "(ReadWriteMany).",
    )
    hostPath: str = Field(
        default="/var/lib/headrace-models", pattern=r"^/", description="Folder on the nodes."
    )
    claimName: OptionalName = Field(default="", description="Of an existing claim.")
    storageClassName: str = Field(default="", description="Of a new claim. Empty: the default.")
    size: Quantity = Field(
        default="100Gi",
        description="Of a new claim, or of empty volumes. It must hold the model: a pod whose "
        "empty volume grows larger is evicted.",
    )
    warmUp: bool = Field(
        default=False,
        description="Run a Job for each model that downloads it into the claim at install and "
        "upgrade, so that pods do not. For `claim` and `new`. Its pod is scheduled as prefill's, "
        "with the same variables.",
    )
    tokenSecret: OptionalName = Field(
        default="",
        description="Name of a Secret whose key `token` is a Hugging Face token, for gated models.",
    )


class CompileCache(Group):
    """Where engine pods keep compiled code (`torch.compile`, Triton, numba) and measured step
    times, mounted at /cache. A start that finds them there skips minutes of compilation."""

    type: Literal["ephemeral", "hostPath", "claim"] = Field(
        default="ephemeral",
        description="`ephemeral`: an empty volume that ends with the pod. `hostPath`: a folder of "
        "the node, which its pods share. `claim`: an existing PersistentVolumeClaim that every "
        "engine pod can mount.",
    )
    hostPath: str = Field(
        default="/var/lib/headrace-cache",
        pattern=r"^/",
        description="Folder on the nodes; it must be writable for `podSecurity.userId`.",
    )
    claimName: OptionalName = Field(default="", description="Of an existing claim.")


class ApiKeys(Group):
    """API keys of the endpoint: a file that `headrace keys add` writes, in a Secret."""

    existingSecret: OptionalName = Field(
        default="",
        description="Name of a Secret with the file under the key `keys.yaml`. Changes take effect "
        "without a restart.",
    )
    testSecret: Name = Field(
        default="headrace-test",
        description="Name of a Secret whose key `key` is an API key, with which `helm test` asks.",
    )
    file: str = Field(
        default="",
        description="The file's text, from which the chart makes a Secret (`--set-file "
        "apiKeys.file=keys.yaml`). It holds hashes, not keys.",
    )


class Tls(Group):
    """TLS at the gateways."""

    existingSecret: OptionalName = Field(
        default="", description="Name of a Secret of type kubernetes.io/tls. Empty: no TLS."
    )


class RayService(Group):
    """The RayService. KubeRay copies both to the Ray clusters that it makes from then on."""

    labels: Texts = Field(
        default={},
        description="Its labels, with which Kueue (`kueue.x-k8s.io/queue-name`), Volcano or "
        "YuniKorn (`ray.io/scheduler-name`, `ray.io/gang-scheduling-enabled`) know it.",
    )
    annotations: Texts = Field(default={}, description="Its annotations.")


class Service(Group):
    """The Service in front of the gateways. Its name is the release's and stays the same when the
    Ray cluster changes."""

    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = Field(
        default="ClusterIP", description="Its type."
    )
    port: int = Field(default=8000, ge=1, le=65535, description="Its port.")
    annotations: Texts = Field(default={}, description="Its annotations.")
    spec: Object = Field(
        default={},
        description="More of its specification, as in Kubernetes: `loadBalancerClass`, "
        "`loadBalancerSourceRanges`, `externalTrafficPolicy`, `ipFamilyPolicy`, `ipFamilies`.",
    )


class Ingress(Group):
    """An Ingress to the Service."""

    enabled: bool = Field(default=False, description="Whether there is one.")
    className: str = Field(default="", description="Its class.")
    host: str = Field(default="", description="Host name.")
    tlsSecret: OptionalName = Field(default="", description="Secret with the host's certificate.")
    annotations: Texts = Field(
        default={},
        description="Its annotations. Answers are streams: switch buffering off and allow long "
        "responses, for nginx `nginx.ingress.kubernetes.io/proxy-buffering: off` and "
        "`.../proxy-read-timeout: 3600`.",
    )


class HttpRoute(Group):
    """A route of the Gateway API to the Service."""

    enabled: bool = Field(default=False, description="Whether there is one.")
    parentRefs: list[Object] = Field(default=[], description="Gateways that it belongs to.")
    hostnames: list[str] = Field(default=[], description="Host names.")


class NetworkPolicy(Group):
    """Network policies: which hosts may reach the pods, and which the pods may reach."""

    enabled: bool = Field(default=True, description="Whether there are policies.")
    clients: list[Object] = Field(
        default=[],
        description="Peers that may reach the gateways, as in `from`. Empty: everybody.",
    )
    operatorNamespace: Name = Field(
        default="kuberay-operator", description="Namespace of KubeRay's operator."
    )
    monitoringNamespace: OptionalName = Field(
        default="monitoring", description="Namespace of Prometheus. Empty: nobody reads metrics."
    )
    extraEgress: list[Object] = Field(
        default=[],
        description="More rules of egress. Allowed are pods of the release, DNS (53, and 5353 of "
        "OpenShift), 443, which reaches hubs and object stores, 6443, which reaches Kubernetes' "
        "API, and the ports that these values name: of Redis, of `otlp_endpoint`, of the object "
        "store's `endpoint`, and of addresses in `env`, such as a proxy's.",
    )


class Monitoring(Group):
    """Objects for Prometheus and Grafana."""

    podMonitor: bool = Field(default=False, description="A PodMonitor for the metrics of all pods.")
    prometheusRule: bool = Field(default=False, description="A PrometheusRule with the alerts.")
    dashboards: bool = Field(
        default=False, description="ConfigMaps with the Grafana dashboards, for its sidecar."
    )
    labels: Texts = Field(
        default={}, description="Labels by which Prometheus selects the first two."
    )
    runbookUrl: str = Field(
        default="",
        pattern=r"""^(https?://[^\s#"'\\]+)?$""",
        description="Address of the runbook's page, to which alerts and dashboards link. "
        "`{version}` becomes the chart's appVersion: "
        "`https://docs.example.com/headrace/{version}/runbook.html`. Empty: `docs/runbook.md`, its "
        "path in the repository.",
    )
    consoleUrl: str = Field(
        default="",
        pattern=r"""^(https?://[^\s#"'\\]+)?$""",
        description="Address of the web console, to which dashboards link: "
        "`https://llm.example.com/console`. Empty: `/console` of the Ingress's host; without an "
        "Ingress `http://127.0.0.1:8000/console`, for `kubectl port-forward`.",
    )
    dashboardLabels: Texts = Field(
        default={"grafana_dashboard": "1"}, description="Labels by which Grafana's sidecar selects."
    )


class PodSecurity(Group):
    """User and group of the containers. Their root file system is read-only."""

    userId: int | None = Field(
        default=1000,
        ge=1,
        description="User and group. null: the cluster chooses them, as OpenShift does.",
    )


class ServiceAccount(Group):
    """The ServiceAccount of all pods. It has no rights of its own."""

    name: OptionalName = Field(
        default="", description="Name of an existing one. Empty: the chart makes one."
    )
    annotations: Texts = Field(
        default={},
        description="Annotations of the chart's own, such as `eks.amazonaws.com/role-arn` or "
        "`iam.gke.io/gcp-service-account`.",
    )


class DisruptionBudgets(Group):
    """PodDisruptionBudgets: a drain of nodes takes one ready pod of a role at a time. A role with
    one pod has none, as its drain would wait for ever."""

    enabled: bool = Field(default=True, description="Whether there are any.")


class RayToken(Group):
    """Ray's own authentication."""

    enabled: bool = Field(default=True, description="Whether Ray's ports ask for a token.")
    existingSecret: OptionalName = Field(
        default="",
        description="Name of a Secret with the key `auth_token`. Empty: KubeRay makes one for each "
        "Ray cluster.",
    )


class GcsFaultTolerance(Group):
    """Where Ray's head keeps its state, so that the cluster survives the head: docs/kubernetes.md
    says what it costs to lose it."""

    redisAddress: str = Field(
        default="",
        description="`host:port` of a Redis, `rediss://host:port` with TLS, several with commas. "
        "Empty: the state is lost with the head.",
    )
    username: str = Field(default="", description="User of Redis. Empty: Redis's default.")
    passwordSecret: OptionalName = Field(
        default="", description="Name of a Secret with the key `password`."
    )
    namespace: str = Field(
        default="",
        description="Prefix of the keys in a Redis that several clusters share. Empty: KubeRay "
        "takes the RayCluster's uid, so that a new cluster starts without the old one's state.",
    )


class Upgrade(Group):
    """How a change that needs a new Ray cluster is made; docs/upgrades.md says which do."""

    type: Literal["NewCluster", "NewClusterWithIncrementalUpgrade", "None"] = Field(
        default="NewCluster",
        description="`NewCluster`: a second cluster is started, and the first is deleted when the "
        "second answers; needs twice the GPUs meanwhile. `NewClusterWithIncrementalUpgrade`: in "
        "steps. `None`: not at all.",
    )
    gatewayClassName: str = Field(default="", description="For steps: class of the Gateway.")
    stepSizePercent: int = Field(
        default=25, ge=1, le=100, description="For steps: the share of requests that each moves."
    )
    intervalSeconds: int = Field(default=60, ge=1, description="For steps: seconds between two.")
    maxSurgePercent: int = Field(
        default=100,
        ge=1,
        le=100,
        description="For steps: the share of its engines that the second cluster gets, and then "
        "the first one gives up, at a time. 100: all at once, so twice the GPUs.",
    )
    deletionDelaySeconds: int = Field(
        default=120, ge=0, description="Seconds that the first cluster has left to finish requests."
    )


class Startup(Group):
    """How long a first start may take."""

    giveUpSeconds: int = Field(
        default=0,
        ge=0,
        description="Seconds after which KubeRay gives up a first start: it deletes the pods, and "
        "starts nothing again until the RayService is deleted and made anew. 0: never, so that a "
        "corrected `helm upgrade` takes effect.",
    )


class Preflight(Group):
    """`headrace doctor --cluster` in an init container of each pod: a start that cannot work ends
    there, with the remedy in the pod's log and termination message."""

    enabled: bool = Field(default=True, description="Whether it runs.")


class Values(Group):
    """All values of the chart."""

    nameOverride: OptionalName = Field(default="", description="In place of the release's name.")
    commonLabels: Texts = Field(
        default={}, description="Labels of all objects and pods, beside the chart's own."
    )
    image: Image = Image()
    rayVersion: str = Field(
        default="2.60.0",
        pattern=r"^[0-9]+\.[0-9]+\.[0-9]+$",
        description="The Ray in the image; KubeRay checks what it supports by it.",
    )
    config: Object = Field(
        default={},
        description="Headrace's configuration: see docs/configuration.md. The chart sets "
        "`gateway.host`, `gateway.port` and the files of keys and TLS; `ray` has no effect.",
    )
    ipv6Only: bool = Field(
        default=False,
        description="Whether the cluster's pods have IPv6 addresses only. Ray then listens at "
        "`::`.",
    )
    autoscalerOptions: Object = Field(
        default={},
        description="Options of the autoscaler in the head pod, as in a RayCluster: `resources` "
        "(default: 500m of a CPU, 512Mi), `idleTimeoutSeconds` (60), `version`. It runs with "
        "`autoscaling`, and for upgrades in steps.",
    )
    extraObjects: list[Object | str] = Field(
        default=[],
        description="More Kubernetes objects of the release. Templates in them are rendered.",
    )
    head: Head = Head()
    gateway: Gateway = Gateway()
    prefill: Engines = Engines()
    decode: Engines = Engines()
    disk: Disk = Disk()
    modelCache: ModelCache = ModelCache()
    compileCache: CompileCache = CompileCache()
    apiKeys: ApiKeys = ApiKeys()
    tls: Tls = Tls()
    rayService: RayService = RayService()
    service: Service = Service()
    ingress: Ingress = Ingress()
    httpRoute: HttpRoute = HttpRoute()
    networkPolicy: NetworkPolicy = NetworkPolicy()
    monitoring: Monitoring = Monitoring()
    podDisruptionBudget: DisruptionBudgets = DisruptionBudgets()
    podSecurity: PodSecurity = PodSecurity()
    serviceAccount: ServiceAccount = ServiceAccount()
    rayToken: RayToken = RayToken()
    gcsFaultTolerance: GcsFaultTolerance = GcsFaultTolerance()
    upgrade: Upgrade = Upgrade()
    startup: Startup = Startup()
    preflight: Preflight = Preflight()
