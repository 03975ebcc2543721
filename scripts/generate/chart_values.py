"""The values of the Helm chart.

`config` is Headrace's own configuration, whose sections `headrace.config` defines. The others are
about Kubernetes. Every description is printed in the chart's README and as a comment in its
values.yaml, so each gives the unit and what happens at the limit.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from scripts.generate.chart_pods import (
    CompileCache,
    Disk,
    Engines,
    Gateway,
    Group,
    Head,
    Image,
    ModelCache,
    Name,
    Object,
    OptionalName,
    Texts,
)


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
