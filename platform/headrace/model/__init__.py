"""Finds, fetches, checks and describes the model folder that the engines load.

resolve("smollm2-135m-instruct")  # a folder, fetched at first use
describe(folder).kv_bytes_per_token
"""

from headrace.model.facts import ModelFacts, describe
from headrace.model.progress import Progress, silent, terminal
from headrace.model.registry import REGISTRY, ModelError, RegistryModel
from headrace.model.store import (
    CachedModel,
    fetch,
    list_models,
    resolve,
    verify,
)
from headrace_engine.cache_root import cache_root

__all__ = [
    "REGISTRY",
    "CachedModel",
    "ModelError",
    "ModelFacts",
    "Progress",
    "RegistryModel",
    "cache_root",
    "describe",
    "fetch",
    "list_models",
    "resolve",
    "silent",
    "terminal",
    "verify",
]
