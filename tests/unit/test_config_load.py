"""The configuration file: every mistake is one line, the field's path and what would be right."""

import json
from pathlib import Path

import pytest

from headrace.config import (
    ConfigError,
    HeadraceConfig,
    load_config,
    preset_names,
    warnings,
)
from headrace.config.checks.engine_args import vllm_engine_args
from headrace.config.key_file import KeyEntry, KeyFile, hash_of, write_keys
from headrace.config.load import validate
from headrace.config.renamed import RENAMED
from scripts.generate.configuration_page import render

ROOT = Path(__file__).parents[2]


KEYS = ["gateway.api_keys=[sk-12345678]"]
OPEN = "gateway.insecure=true"


def problems(*overrides: str, path: Path | None = None, preset: str | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, preset, overrides)
    return list(caught.value.problems)


def only_problem(*overrides: str) -> str:
    (line,) = problems(*overrides)
    return line


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("gatewya.port=1", 'gatewya: unknown field; did you mean "gateway"?'),
        ("gateway.prot=1", 'gateway.prot: unknown field; did you mean "port"?'),
        ("zzz=1", "zzz: unknown field"),
        ("decode.kv_cache_gb=-1", "decode.kv_cache_gb: must be > 0, got -1"),
        ("decode.replicas=0", "decode.replicas: must be >= 1, got 0"),
        ("gateway.port=70000", "gateway.port: must be <= 65535, got 70000"),
        ("gateway.port=high", 'gateway.port: must be a whole number, got "high"'),
        ("prefill.cpus=many", 'prefill.cpus: must be a number, got "many"'),
        ("ray.dashboard=perhaps", 'ray.dashboard: must be true or false, got "perhaps"'),
        ("model=smollm2", 'model: must be a section with fields, got "smollm2"'),
        ("decode.engine=[1]", "decode.engine: must be a mapping, got a list"),
        ("model.id=", "model.id: must not be empty"),
        ("model.id=null", "model.id: must be text, got null"),
        (
            "router.policy=locl",
            'router.policy: must be one of cost, local, remote; got "locl"; did you mean "local"?',
        ),
        (
            "router.policy=cheapest",
            'router.policy: must be one of cost, local, remote; got "cheapest"',
        ),
        (
            "gateway.host=http://x:1",
            "gateway.host: must be an IP address or a host name without scheme or port, got "
            '"http://x:1"',
        ),
        (
            "gateway.host=1.2.3",
            "gateway.host: must be an IP address or a host name without scheme or port, "
            'got "1.2.3"',
        ),
        (
            "gateway.allowed_origins=[chat.example/x]",
            'gateway.allowed_origins: must be "*" or like https://host:port without a path: '
            '"chat.example/x"',
        ),
        (
            "ray.address=head",
            'ray.address: must be "auto" or like "10.0.0.1:6379", got "head"',
        ),
        ("ray.temp_dir=here", 'ray.temp_dir: must be an absolute path, got "here"'),
        (
            "observability.otlp_endpoint=collector",
            'observability.otlp_endpoint: must be like "http://host:4317", got "collector"',
        ),
        ("gateway.port", '--set gateway.port: must be like "gateway.port=8001"'),
        ("=3", '--set =3: must be like "gateway.port=8001"'),
        (
            "gateway.port=null",
            "gateway.port: is null, but this endpoint needs one; set 0 for any free port",
        ),
    ],
)
def test_a_wrong_value_is_one_line_with_path_and_remedy(override: str, line: str) -> None:
    assert only_problem(override) == line


def test_a_temp_dir_too_long_for_sockets_is_refused() -> None:
    assert "at most 17 characters, got 41" in only_problem("ray.temp_dir=/" + "x" * 40)


def test_all_problems_are_named_at_once() -> None:
    found = problems(
        "gateway.port=x",
        "decode.threads=0",
        "decode.engine.tensor_parallel_sise=2",
        "prefill.engine.max_num_seqs=many",
        "prefill.env.OMP_NUM_THREADS=4",
        "router.retry_s=never",
        "router.placement=round-robbin",
        "model.id=llama",
        "techniques.blending.mode=auto",
        "store.enabled=false",
        "zzz=1",
    )
    assert {line.partition(":")[0] for line in found} == {
        "gateway.port",
        "decode.threads",
        "decode.engine.tensor_parallel_sise",
        "prefill.engine.max_num_seqs",
        "prefill.env.OMP_NUM_THREADS",
        "router.retry_s",
        "router.placement",
        "model.id",
        "techniques.blending.mode",
        "zzz",
    }


def test_a_wrong_value_causes_no_second_problem() -> None:
    """A default in its place might not fit the values that are right."""
    assert len(problems("gateway.host=0.0.0.0", "gateway.api_keys=5")) == 1
    assert len(problems("model.source=5", "model.id=llama")) == 1
    assert len(problems("store.enabled=perhaps", "techniques.blending.mode=auto")) == 1
    assert len(problems("decode.gpus=one", "prefill.gpus=1")) == 1


def test_data_that_are_no_section_are_refused() -> None:
    with pytest.raises(ConfigError, match="must be a section"):
        validate([1])  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        validate({1: 2, "gateway": {3: 4}})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("max_num_seqs=many", 'max_num_seqs: must be a whole number, got "many"'),
        ("max_num_seqs=true", "max_num_seqs: must be a whole number, got true"),
        ("max_model_len=1.5", "max_model_len: must be a whole number, got 1.5"),
        ("gpu_memory_utilization=[1]", "gpu_memory_utilization: must be a number, got a list"),
        ("enable_prefix_caching=yep", 'enable_prefix_caching: must be true or false, got "yep"'),
        ("revision=5", "revision: must be text, got 5"),
        ("max_modle_len=1", 'max_modle_len: vLLM has no such engine argument; did you mean "max_'),
    ],
)
def test_an_engine_argument_of_another_name_or_type_is_refused(override: str, line: str) -> None:
    if not vllm_engine_args():
        pytest.skip("vLLM is not installed here")
    (found, *_) = problems(f"prefill.engine.{override}")
    assert found.startswith(f"prefill.engine.{line}")


@pytest.mark.parametrize("value", ["max_num_seqs=null", "gpu_memory_utilization=1", "dtype=half"])
def test_vllm_judges_other_values_of_engine_arguments(value: str) -> None:
    load_config(overrides=[f"{role}.engine.{value}" for role in ("prefill", "decode")])


def test_an_unknown_placement_policy_is_refused_by_name() -> None:
    assert only_problem("router.placement=leastloaded") == (
        "router.placement: must be one of cost, round-robin, least-loaded, prefix-affinity; got "
        '"leastloaded"; did you mean "least-loaded"?'
    )
    load_config(overrides=["router.placement=least-loaded"])


def test_a_model_that_up_would_not_find_is_refused_by_its_id_and_doubted_by_its_folder(
    tmp_path: Path,
) -> None:
    assert only_problem("model.id=llama").startswith("model.id: 'llama' is no model: it must be")
    load_config(overrides=["model.id=meta-llama/Llama-3.1-8B-Instruct"])
    [line] = warnings(load_config(overrides=["model.source=/on-the-nodes"]))
    assert line.startswith("model.source: '/on-the-nodes' is no model: it must be")
    [line] = warnings(load_config(overrides=[f"model.source={tmp_path}"]))
    assert "has no config.json" in line
    assert warnings(load_config()) == []


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (
            ["decode.gpus=2", "prefill.gpus=1"],
            "decode.gpus: is 2, but engine.tensor_parallel_size is 1; set gpus: 1, or "
            "engine.tensor_parallel_size: 2",
        ),
        (
            ["decode.engine.tensor_parallel_size=2"],
            "decode.gpus: is 0, but engine.tensor_parallel_size is 2; set gpus: 2, or remove both "
            "to run on the CPU",
        ),
        (
            ["decode.engine.pipeline_parallel_size=2"],
            "decode.engine.pipeline_parallel_size: must be 1, got 2: KV is pulled from one",
        ),
        (["prefill.engine.nnodes=2"], "prefill.engine.nnodes: must be 1, got 2: KV is pulled"),
        (["decode.gpus=1"], "decode.gpus: is 1, but prefill.gpus is 0: KV made on a CPU"),
        (["decode.accelerator_type=H100"], 'decode.accelerator_type: is "H100", but decode.gpus'),
        (["decode.engine.tensor_parallel_size=two"], 'must be a whole number >= 1, got "two"'),
        (["decode.engine.model=x"], "decode.engine.model: set model.source instead"),
        (
            ["prefill.engine.kv_cache_memory_bytes=5"],
            "prefill.engine.kv_cache_memory_bytes: set prefill.kv_cache_gb instead",
        ),
        (
            ["prefill.env.OMP_NUM_THREADS=4"],
            "prefill.env.OMP_NUM_THREADS: set prefill.threads instead",
        ),
        (
            ["decode.engine.dtype=float32"],
            "decode.engine.dtype: is 'float32', but prefill.engine.dtype is not set; both roles",
        ),
        (
            ["model.max_model_len=4096", "decode.engine.max_model_len=2048"],
            "decode.engine.max_model_len: is 2048, but model.max_model_len is 4096",
        ),
        (
            ["ray.num_cpus=1", "decode.replicas=4"],
            "ray.num_cpus: is 1, but the replicas reserve 2.5 CPUs",
        ),
        (["gateway.api_keys_file=/nowhere"], "cannot read /nowhere: "),
    ],
)
def test_impossible_combinations_are_refused(overrides: list[str], part: str) -> None:
    assert any(part in line for line in problems(*overrides)), problems(*overrides)


@pytest.mark.parametrize("key", ["short", "with space", "ümlaut-key", "a-line-end\n"])
def test_a_key_that_cannot_be_one_is_refused_without_being_shown(key: str) -> None:
    line = only_problem(f"gateway.api_keys={json.dumps([key])}")
    assert "key 0 must be 8 or more visible ASCII characters" in line
    assert key not in line


def test_a_key_files_path_counts_from_the_configuration_files_folder(tmp_path: Path) -> None:
    entry = KeyEntry(name="a", hash=hash_of(b"k"), tenant="shop")
    write_keys(tmp_path / "keys", KeyFile(keys=[entry]))
    (tmp_path / "c.yaml").write_text("gateway: {api_keys_file: keys, host: 0.0.0.0}\n")
    assert load_config(tmp_path / "c.yaml").gateway.api_keys_file == str(tmp_path / "keys")


def test_an_empty_key_file_does_not_mean_open_to_all(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("keys: []\n")
    assert "holds no key" in only_problem(f"gateway.api_keys_file={tmp_path / 'keys'}")


def test_keys_as_plain_lines_are_refused_with_what_makes_a_key_file(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("sk-from-file\n")
    assert "headrace keys add" in only_problem(f"gateway.api_keys_file={tmp_path / 'keys'}")


def test_a_kv_cache_that_cannot_hold_one_request_is_refused(tmp_path: Path) -> None:
    # 2 (K and V) x 30 layers x 3 heads x 64 x 2 bytes = 23,040 a token; 8,192 tokens 0.176 GiB.
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "hidden_size": 576,
        "max_position_embeddings": 8192,
        "dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(shape))
    base = [f"model.source={tmp_path}"]
    base += ["decode.engine.dtype=bfloat16", "prefill.engine.dtype=bfloat16"]
    assert only_problem(*base, "decode.kv_cache_gb=0.1") == (
        "decode.kv_cache_gb: 0.1 GiB cannot hold one request of 8192 tokens, which takes "
        "0.176 GiB; set at least 0.18, or model.max_model_len: 4608"
    )
    load_config(overrides=[*base, "decode.kv_cache_gb=0.18"])
    load_config(overrides=[*base, "decode.kv_cache_gb=0.1", "model.max_model_len=4608"])
    wide = [o.replace("bfloat16", "float32") for o in base]
    assert "takes 0.352 GiB" in only_problem(*wide, "decode.kv_cache_gb=0.18")


def test_a_model_whose_shape_cannot_be_read_is_left_to_vllm(tmp_path: Path) -> None:
    load_config(overrides=[f"model.source={tmp_path}"])
    (tmp_path / "config.json").write_text("{}")
    load_config(overrides=[f"model.source={tmp_path}"])


def test_yaml_mistakes_give_line_and_column(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("gateway:\n  port: [8000\ndecode: 1\n")
    (line,) = problems(path=file)
    assert line.startswith(f"{file}:3:")
    assert "not valid YAML" in line
    file.write_text("gateway:\n  port: 1\n  port: 2\n")
    assert problems(path=file) == [f'{file}:3:3: not valid YAML: "port" is given twice']
    file.write_text("- 1\n")
    assert problems(path=file) == [f"{file}: must hold `field: value` lines, got a list"]
    file.write_bytes(b"model: \xff\n")
    assert problems(path=file) == [f"{file}: is not UTF-8 text (byte 7)"]
    assert problems(path=tmp_path / "none.yaml")[0].endswith("No such file or directory")


def test_mistakes_in_a_file_have_its_lines_in_its_order(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "decode:\n  replicas: two\n  engine: {max_num_seqs: 4,\n    max_num_batched_tokens: many}\n"
        "gateway:\n  # a comment\n  prot: 1\nmodels:\n  qwen:\n    prefill: {replicas: -1}\n"
        "store: {dram_gb: -1}\ndrain_s: -1\n"
    )
    overrides = ["store.dram_gb=-2", "router.policy=nope"]
    found = problems(*overrides, path=file)
    assert [each.partition(": ")[0] for each in found[:5]] == [
        f"{file}:{line}" for line in (2, 4, 7, 10, 12)
    ]
    assert found[0] == f'{file}:2: decode.replicas: must be a whole number, got "two"'
    assert "models.qwen.prefill.replicas" in found[3]
    assert [each.partition(":")[0] for each in found[5:]] == ["router.policy", "store.dram_gb"]


def test_a_field_that_a_file_lacks_has_its_sections_line(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("decode: {replicas: 1}\ngateway:\n  host: 0.0.0.0\n  port: 8000\n")
    [line] = problems(path=file)
    assert line.startswith(f"{file}:3: gateway.host: listens on")
    file.write_text("decode: {replicas: 1}\n\ngateway:\n  port: 8000\n")
    [line] = problems(path=file, preset="gpu-cluster")
    assert line.startswith(f"{file}:3: gateway.host: listens on")


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("# nothing\n")
    assert load_config(tmp_path / "c.yaml") == HeadraceConfig()


def test_later_sources_win_field_by_field(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("gateway: {port: 8001}\ndecode: {replicas: 3}\n")
    overrides = ["decode.replicas=5", *KEYS]
    config = load_config(tmp_path / "c.yaml", "gpu-cluster", overrides)
    assert config.gateway.host == "0.0.0.0"  # the preset's
    assert config.gateway.port == 8001  # the file's
    assert config.decode.replicas == 5  # the override's
    assert config.decode.gpus == 1


def test_a_file_names_its_preset_and_wins_over_it(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("preset: gpu-node\ngateway: {port: 8001}\n")
    assert load_config(file) == load_config(preset="gpu-node", overrides=["gateway.port=8001"])
    assert load_config(file).decode.gpus == 1


def test_the_command_lines_preset_wins_over_the_files(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("preset: gpu-node\ndecode: {replicas: 3}\n")
    expected = load_config(preset="gpu-cluster", overrides=["decode.replicas=3", *KEYS])
    assert load_config(file, "gpu-cluster", KEYS) == expected


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ("gpu-nod", 'preset: there is none called "gpu-nod"; did you mean "gpu-node"?'),
        ("[a]", "preset: must be text, got a list"),
        ("1", "preset: must be text, got 1"),
    ],
)
def test_a_wrong_preset_in_a_file_is_one_line(value: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(f"preset: {value}\n")
    assert problems(path=tmp_path / "c.yaml") == [line]


def test_a_preset_is_not_set_field_by_field() -> None:
    assert only_problem("preset=gpu-node") == (
        "preset: choose one with --preset NAME, or with `preset: NAME` in a file"
    )


def test_overrides_are_read_as_yaml_and_reach_into_mappings() -> None:
    config = load_config(
        overrides=[
            "decode.engine.max_num_seqs=16",
            "decode.engine.enable_prefix_caching=false",
            "decode.env.A=1",
            "model.id=a=b",
            "model.source=org/name",
        ]
    )
    assert config.decode.engine == {"max_num_seqs": 16, "enable_prefix_caching": False}
    assert config.decode.env == {"A": "1"}
    assert config.model.id == "a=b"
    line = only_problem("gateway.port=1", "gateway.port.x=2")
    assert line == "gateway.port: holds a value, so gateway.port.x cannot be set"


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_valid_with_keys(name: str) -> None:
    config = load_config(preset=name, overrides=KEYS)
    assert config.model.id
    assert config.prefill.replicas >= 1 and config.decode.replicas >= 1


def test_the_laptop_preset_is_the_defaults() -> None:
    laptop, default = load_config(preset="laptop"), HeadraceConfig()
    same_kv = {"kv_cache_gb": 1.0}  # spelled out in the preset
    for role in ("prefill", "decode"):
        assert getattr(laptop, role) == getattr(default, role).model_copy(update=same_kv)
        assert getattr(laptop, role).kv_cache_bytes == getattr(default, role).kv_cache_bytes
    assert laptop.gateway == default.gateway
    assert laptop.model == default.model


def test_an_unknown_preset_names_the_nearest() -> None:
    assert problems(preset="gpu-nod") == [
        'preset: there is none called "gpu-nod"; did you mean "gpu-node"?'
    ]
    assert problems(preset="moon") == [
        'preset: there is none called "moon"; there are gpu-cluster, gpu-node, laptop'
    ]


def test_an_open_endpoint_without_keys_does_not_start_unless_told() -> None:
    load_config()
    assert "listens on 0.0.0.0 without API keys" in only_problem("gateway.host=0.0.0.0")
    for more in ([*KEYS, "gateway.host=0.0.0.0"], ["gateway.host=0.0.0.0", OPEN]):
        load_config(overrides=more)


def test_the_error_for_a_removed_field_says_what_to_do_without_it() -> None:
    assert only_problem("token_path=direct") == (
        "token_path: it has been removed: requests always pass through the gateway (`relay`); "
        "remove the field"
    )


@pytest.mark.parametrize("proxy", ["host", "10.0.0.0/33", ""])
def test_a_trusted_proxy_is_an_address(proxy: str) -> None:
    assert "must be an IP address or a network" in only_problem(
        f"gateway.trusted_proxies={json.dumps([proxy])}"
    )


def test_the_configuration_page_is_current() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text("utf-8")
    assert page == render(), "run: make docs"


@pytest.mark.parametrize("mode", ["static:0", "static:99999", "static:", "auto\n", "on"])
def test_drafting_modes_that_the_api_refuses_are_refused_here_too(mode: str) -> None:
    assert only_problem(f"speculation.mode={json.dumps(mode)}").startswith("speculation.mode")


@pytest.mark.parametrize("old", RENAMED)
def test_the_error_for_a_renamed_field_names_the_new_one(old: str) -> None:
    with pytest.raises(ConfigError) as found:
        load_config(overrides=[f"{old}=0.5"])
    section = ".".join(old.split(".")[:-1])
    if section in RENAMED:
        field = RENAMED[old].rpartition(".")[2]
        wanted = (
            f"{section}: it is called {RENAMED[section]} now; {old.rpartition('.')[2]} in it is"
        )
        assert str(found.value) == f"{wanted} {field}"
    else:
        assert str(found.value) == f"{old}: it is called {RENAMED[old]} now"


@pytest.mark.parametrize("new", sorted(set(RENAMED.values())))
def test_each_renamed_field_exists(new: str) -> None:
    value: object = load_config().model_dump()
    for name in new.split("."):
        assert isinstance(value, dict) and name in value
        value = value[name]


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("model.adapters={a: org/name}", "model.adapters.a: must be an absolute path or a URI"),
        ("model.adapters={smollm2-135m-instruct: /a}", "model.adapters.smollm2-135m-instruct: "),
        ("model.adapters_path=here", "model.adapters_path: must be an absolute path or a URI"),
    ],
)
def test_an_adapter_that_replicas_could_not_find_or_name_is_refused(
    override: str, line: str
) -> None:
    assert only_problem(override).startswith(line)
