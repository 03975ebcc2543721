"""The values of the Helm chart.

`config` is Headrace's own configuration, whose sections `headrace.config` defines. The others are
about Kubernetes. Every description is printed in the chart's README and as a comment in its
values.yaml, so each gives the unit and what happens at the limit.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Object = dict[str, Any]
Texts = dict[str, str]
Quantity = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?([KMGTPE]i?|m|k)?$")]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", max_length=253)]
OptionalName = Annotated[str, Field(pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$", max_length=253)]
Count = Annotated[int, Field(ge=0)]


class Group(BaseModel):
    """Fields that may be set; unknown ones are refused."""

    model_config = ConfigDict(extra="forbid")


class Image(Group):
    """The image of all pods. `docs/images.md` says how it is built."""

    repository: str = Field(
        default="headrace-cpu", min_length=1, description="Registry and name of the image."
    )
    tag: str = Field(default="", description="Its tag. Empty: the chart's appVersion.")
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

    cpu: Quantity = Field(default="1", description="CPUs, both requested and the limit.")
    memory: Quantity = Field(
        default="4Gi",
        description="Memory, both requested and the limit. It includes /dev/shm, so in engine pods "
        "the store's `dram_gb`.",
    )
    nodeSelector: Texts = Field(default={}, description="Labels of the nodes that may run them.")
    tolerations: list[Object] = Field(default=[], description="Taints that they tolerate.")
    affinity: Object = Field(default={}, description="Affinity, as in a pod.")
    topologySpreadConstraints: list[Object] = Field(
        default=[], description="How they are spread, as in a pod."
    )
    priorityClassName: OptionalName = Field(default="", description="Their priority class.")
    annotations: Texts = Field(default={}, description="Annotations of the pods.")
    labels: Texts = Field(default={}, description="More labels of the pods.")
    env: Texts = Field(default={}, description="Environment variables, UCX's and NIXL's included.")
    resources: dict[str, str | int] = Field(
        default={},
        description="More resources that each pod asks for, by key: RDMA devices such as "
        "`rdma/ib: 1` or `vpc.amazonaws.com/efa: 1`, hugepages such as `hugepages-2Mi: 2Gi`.",
    )
    volumes: list[Object] = Field(default=[], description="More volumes, as in a pod.")
    volumeMounts: list[Object] = Field(default=[], description="Where they are mounted.")


class Head(Pods):
    """Ray's head: the cluster's state, the dashboard and Serve's controller. It runs no engine."""

    cpu: Quantity = Field(default="2", description="CPUs, both requested and the limit.")


class Gateway(Pods):
    """Pods of gateways, `config.gateway.replicas` of them, to which the Service sends. If there are
    several, each runs two gateways."""


class Engines(Pods):
    """Pods of engines, one replica each; `config.prefill.replicas` or `config.decode.replicas`, or
    as many as the load takes within the bounds of the role's `autoscaling`."""

    cpu: Quantity = Field(default="4", description="CPUs, both requested and the limit.")
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
    size: Quantity = Field(default="100Gi", description="Of a new claim, or of empty volumes.")
    warmUp: bool = Field(
        default=False,
        description="Run a Job that downloads the model into the claim at install and upgrade, so "
        "that pods do not. For `claim` and `new`.",
    )
    tokenSecret: OptionalName = Field(
        default="",
        description="Name of a Secret whose key `token` is a Hugging Face token, for gated models.",
    )


class ApiKeys(Group):
    """API keys of the endpoint: a file that `headrace keys add` writes, in a Secret."""

    existingSecret: OptionalName = Field(
        default="",
        description="Name of a Secret with the file under the key `keys.yaml`. Changes take effect "
        "without a restart.",
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


class Service(Group):
    """The Service in front of the gateways. Its name is the release's and stays the same when the
    Ray cluster changes."""

    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = Field(
        default="ClusterIP", description="Its type."
    )
    port: int = Field(default=8000, ge=1, le=65535, description="Its port.")
    annotations: Texts = Field(default={}, description="Its annotations.")


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
        description="More rules of egress. DNS, pods of the release and port 443 are allowed, "
        "which reaches model hubs and object stores; with `autoscaling` also port 6443, which "
        "reaches Kubernetes' API.",
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

    userId: int = Field(default=1000, ge=1, description="User and group.")
    serviceAccount: OptionalName = Field(
        default="", description="Name of an existing ServiceAccount. Empty: the chart makes one."
    )


class RayToken(Group):
    """Ray's own authentication."""

    enabled: bool = Field(default=True, description="Whether Ray's ports ask for a token.")
    existingSecret: OptionalName = Field(
        default="",
        description="Name of a Secret with the key `auth_token`. Empty: KubeRay makes one for each "
        "Ray cluster.",
    )


class GcsFaultTolerance(Group):
    """Where Ray's head keeps its state, so that the cluster survives the head."""

    redisAddress: str = Field(
        default="", description="`host:port` of a Redis. Empty: the state is lost with the head."
    )
    passwordSecret: OptionalName = Field(
        default="", description="Name of a Secret with the key `password`."
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
    """How long a start may take before KubeRay gives it up."""

    modelGB: float = Field(default=16, gt=0, description="Size of the model's weights, in GB.")
    gbPerSecond: float = Field(
        default=0.05,
        gt=0,
        description="Slowest rate at which they come, in GB a second; 0.05 is a 400 Mbit/s line.",
    )
    extraSeconds: int = Field(
        default=900, ge=0, description="For images, nodes that are started, and compilation."
    )


class Preflight(Group):
    """`headrace doctor --cluster` in an init container of each pod: a start that cannot work ends
    there, with the remedy in the pod's log and termination message."""

    enabled: bool = Field(default=True, description="Whether it runs.")


class Values(Group):
    """All values of the chart."""

    nameOverride: OptionalName = Field(default="", description="In place of the release's name.")
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
    head: Head = Head()
    gateway: Gateway = Gateway()
    prefill: Engines = Engines()
    decode: Engines = Engines()
    disk: Disk = Disk()
    modelCache: ModelCache = ModelCache()
    apiKeys: ApiKeys = ApiKeys()
    tls: Tls = Tls()
    service: Service = Service()
    ingress: Ingress = Ingress()
    httpRoute: HttpRoute = HttpRoute()
    networkPolicy: NetworkPolicy = NetworkPolicy()
    monitoring: Monitoring = Monitoring()
    podSecurity: PodSecurity = PodSecurity()
    rayToken: RayToken = RayToken()
    gcsFaultTolerance: GcsFaultTolerance = GcsFaultTolerance()
    upgrade: Upgrade = Upgrade()
    startup: Startup = Startup()
    preflight: Preflight = Preflight()
