"""Makes the files of the chart that follow from `chart_values`: values.yaml, its schema and the
README."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from pydantic import BaseModel

from headrace.config.schema import HeadraceConfig
from scripts.generate.chart_values import Values
from scripts.generate.configuration_page import section_of, table

SET_BY_THE_CHART = {
    "gateway": (
        *("host", "port", "api_keys_file", "resources"),
        *("tls_cert_file", "tls_key_file"),
    ),
    "prefill": ("resources",),
    "decode": ("resources",),
}
"""Fields of the configuration that users of the chart do not set."""
CONFIG = {
    "model": {
        "id": "smollm2-135m-instruct",
        "source": "HuggingFaceTB/SmolLM2-135M-Instruct",
    }
}
"""Default of the chart's `config`: a small model that needs no GPU."""
_ABOUT = """\
<!-- Written by `python -m scripts.generate`; change scripts/generate/chart_values.py. -->
# headrace

Serves an LLM with separate prefill and decode engines on a Ray cluster that KubeRay (1.7 or newer)
runs, behind one OpenAI-compatible endpoint. docs/install.md is the guide; docs/upgrades.md says
what a change of a value does.

```sh
helm install headrace helm/headrace -f helm/headrace/values-laptop.yaml
```
"""


def files() -> dict[str, str]:
    """Return the contents of the files by name."""
    return {"values.yaml": values(), "values.schema.json": schema(), "README.md": readme()}


def schema() -> str:
    """Return the JSON Schema of the values, the configuration's own included."""
    made, config = Values.model_json_schema(), HeadraceConfig.model_json_schema()
    definitions = {**made.pop("$defs"), **config.pop("$defs")}
    for name, fields in SET_BY_THE_CHART.items():
        title = str(config["properties"][name]["$ref"]).rpartition("/")[2]
        for field in fields:
            definitions[title]["properties"].pop(field, None)
    del config["properties"]["ray"]
    definitions["HeadraceConfig"] = config
    made["properties"]["config"] = {"$ref": "#/$defs/HeadraceConfig"}
    made["properties"]["global"] = {"type": "object"}  # Helm's own
    made["$defs"] = definitions
    made["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    return json.dumps(_plain(made), indent=1) + "\n"


def _plain(node: Any) -> Any:
    """Drop titles, descriptions and defaults. Errors do not show them, and they are most of the
    size."""
    if isinstance(node, dict):
        inner = {
            key: _plain(value)
            for key, value in node.items()
            if not (key in ("title", "description", "default") and not isinstance(value, dict))
        }
        inner.pop("default", None)
        return inner
    return [_plain(each) for each in node] if isinstance(node, list) else node


def values() -> str:
    """Return the defaults as YAML, each after its description."""
    lines = ["# Written by `python -m scripts.generate`; change scripts/generate/chart_values.py."]
    lines += _lines(Values, "")
    return "\n".join(lines) + "\n"


def _lines(model: type[BaseModel], indent: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        inner = section_of(field)
        about = (inner.__doc__ if inner else field.description) or ""
        if not indent:
            yield ""
        width = 98 - len(indent)
        yield from (f"{indent}# {line}" for line in textwrap.wrap(" ".join(about.split()), width))
        if inner is not None:
            yield f"{indent}{name}:"
            yield from _lines(inner, f"{indent}  ")
            continue
        value = CONFIG if name == "config" and not indent else field.get_default()
        if isinstance(value, Mapping) and value:
            yield f"{indent}{name}:"
            text = yaml.safe_dump(value, sort_keys=False)
            yield from (f"{indent}  {line}" for line in text.splitlines())
        else:
            yield f"{indent}{name}: {json.dumps(value)}"


def readme() -> str:
    """Return the chart's README: a table for each section."""
    plain = {n: f for n, f in Values.model_fields.items() if section_of(f) is None}
    parts = [_ABOUT, table("Top level", "", plain)]
    for name, field in Values.model_fields.items():
        section = section_of(field)
        if section is not None:
            parts.append(table(f"`{name}`", section.__doc__ or "", section.model_fields))
    return "\n".join(parts)
