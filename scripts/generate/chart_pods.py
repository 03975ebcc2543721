"""The values of the Helm chart about pods: images, groups, disks and caches; and the types that all
values share."""

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
