"""The configuration: the YAML file that describes a Headrace deployment.

`schema`, `store` and `speculation` define the fields. `checks` refuses values that cannot work
together, and engine arguments that vLLM does not have. `load` merges presets, files and `--set`
overrides into a checked `HeadraceConfig`. `app_args` turns it into the arguments of
`headrace.app:build_app`. `docs` writes docs/configuration.md. Nothing here imports Ray or vLLM, so
a mistake is reported in well under a second.
"""

from headrace.config.app_args import to_app_args
from headrace.config.checks.configuration import check, warnings
from headrace.config.load import ConfigError, load_config, preset_names
from headrace.config.schema import (
    AppSection,
    GatewaySettings,
    HeadraceConfig,
    ModelSettings,
    ObservabilitySettings,
    RaySettings,
    RoleSettings,
    RouterSettings,
)

__all__ = [
    "AppSection",
    "ConfigError",
    "GatewaySettings",
    "HeadraceConfig",
    "ModelSettings",
    "ObservabilitySettings",
    "RaySettings",
    "RoleSettings",
    "RouterSettings",
    "check",
    "load_config",
    "preset_names",
    "to_app_args",
    "warnings",
]
