"""Which option of holding KV is taken under a budget, and what its bytes are."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.app import build_app
from headrace.cli import client, state
from headrace.cli.console import CliError
from headrace.cli.main import main
from headrace.cli.show import kv_budget
from headrace.config import ConfigError, HeadraceConfig, load_config
from headrace.config.kv_budget import apply_kv_budget, budget_request
from headrace.config.techniques import KvBudgetSection
from headrace.model.facts import facts_from_config
from headrace.model.kv_budget import (
    COMPRESSION_KL,
    GIB,
    KvBudgetOption,
    KvBudgetPlan,
    KvBudgetRequest,
    kl_at,
    plan_kv_budget,
)
from headrace.model.memory_bandwidth import measured_gbps
from headrace.model.registry import ModelError
from headrace_decode.attention.calibration_file import CalibrationResult, ModelShape
from headrace_decode.compression.engine import calibration as gates
from headrace_decode.compression.importance_predictor import ImportancePredictor
from headrace_decode.sparse.basis import Basis
from headrace_decode.sparse.engine.calibration import Calibration, write

SMALL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "dtype": "bfloat16",
}
FACTS = facts_from_config(SMALL)
SPARSE_KL = {0.05: 0.133, 0.1: 0.047, 0.2: 0.010, 0.3: 0.003}
CALIBRATED_KL = {0.12: 0.08, 0.25: 0.025, 0.5: 0.002}
WHOLE = 8192 * FACTS.kv_bytes_per_token
"""Bytes of one context."""


def asked(
    contexts: float, at_once: int, host: int = 0, read: float | None = None
) -> KvBudgetRequest:
    """A budget of so many whole contexts, host memory for as many, and what a step may read."""
    read_bytes = None if read is None else int(read * WHOLE)
    return KvBudgetRequest(int(contexts * WHOLE), at_once, 8192, 512, host * WHOLE, read_bytes)


def option(found: KvBudgetPlan, name: str) -> KvBudgetOption:
    return next(each for each in found.options if each.name == name)


# ---- the choice -----------------------------------------------------------------------------


def test_where_all_fits_nothing_is_lost() -> None:
    found = plan_kv_budget(FACTS, asked(4.1, 4, 4), SPARSE_KL)
    assert (found.chosen.name, found.chosen.keep_ratio, found.chosen.kl) == ("full", 1.0, 0.0)


@pytest.mark.parametrize(
    ("contexts", "at_once", "host", "name"),
    [
        (2, 4, 4, "compressed"),  # one whole context and a part of three
        (1, 4, 4, "offloaded"),  # the one is all of it
        (0.5, 1, 1, "offloaded"),
        (8, 16, 16, "compressed"),  # slots of so many are more than a context
    ],
)
def test_the_least_error_that_fits_is_taken(
    contexts: float, at_once: int, host: int, name: str
) -> None:
    found = plan_kv_budget(FACTS, asked(contexts, at_once, host), SPARSE_KL)
    assert found.chosen.name == name
    possible = [each.kl for each in found.options if each.kl is not None and not each.why_not]
    assert found.chosen.kl == min(possible)


@given(
    st.floats(0.05, 9),
    st.integers(1, 8),
    st.integers(0, 8),
    st.sampled_from([None, SPARSE_KL]),
    st.sampled_from([None, CALIBRATED_KL]),
    st.one_of(st.none(), st.floats(0.01, 9)),
)
def test_what_is_chosen_fits_and_no_larger_share_would(
    contexts: float,
    at_once: int,
    host: int,
    curve: dict[float, float] | None,
    calibrated: dict[float, float] | None,
    read: float | None,
) -> None:
    wanted = asked(contexts, at_once, host, read)
    try:
        chosen = plan_kv_budget(FACTS, wanted, curve, compression_kl=calibrated).chosen
    except ModelError as error:
        names = "full", "compressed", "incremental", "offloaded"
        assert all(f"{name}: " in str(error) for name in names)
        return
    assert chosen.sizes.cache + chosen.sizes.beside <= wanted.budget_bytes
    assert chosen.sizes.host <= wanted.host_bytes
    if wanted.read_bytes is not None:
        assert chosen.sizes.read <= wanted.read_bytes
        return
    if chosen.name in ("compressed", "incremental") and chosen.keep_ratio < max(COMPRESSION_KL):
        freed = 60 - math.ceil((chosen.keep_ratio + 0.01) * 60)
        grows = at_once - (chosen.name == "compressed")
        larger = chosen.sizes.cache + chosen.sizes.beside + grows * 128 * FACTS.kv_bytes_per_token
        assert freed == 60 - math.ceil(chosen.keep_ratio * 60) or larger > wanted.budget_bytes


def test_a_way_that_does_not_fit_says_what_it_needs() -> None:
    found = plan_kv_budget(FACTS, asked(0.5, 1), SPARSE_KL)
    assert option(found, "offloaded").why_not.endswith("GiB of host memory")
    assert option(found, "full").why_not == "needs 0.179 GiB"
    with pytest.raises(ModelError, match=r"nothing keeps to 0\.0879 GiB: full: needs 0\.179 GiB; "):
        _ = found.chosen


@pytest.mark.parametrize(
    ("read", "name", "least"),
    [
        (4.0, "full", 1.0),
        (3.9, "compressed", 0.5),
        (1.5, "compressed", 0.3),
        (0.5, "offloaded", 0.05),
    ],
)
def test_a_step_that_may_read_little_keeps_or_attends_to_less_than_memory_allows(
    read: float, name: str, least: float
) -> None:
    found = plan_kv_budget(FACTS, asked(9, 4, 4, read), SPARSE_KL)
    assert found.chosen.name == name and found.chosen.keep_ratio >= least
    assert found.chosen.sizes.read <= read * WHOLE
    if read < 4:
        assert option(found, "full").why_not.startswith("reads 0.703 GiB a step, over ")


def test_what_a_step_reads_is_all_that_its_contexts_attend_to() -> None:
    found, block = plan_kv_budget(FACTS, asked(9, 4, 4), SPARSE_KL), 128 * FACTS.kv_bytes_per_token
    assert option(found, "full").sizes.read == 4 * WHOLE
    assert option(found, "compressed").sizes.read == 4 * (30 + 4) * block
    summaries = 0.0507 + 8 / (32 * 768)  # of keys and values, and of each layer
    keep_ratio = option(found, "offloaded").keep_ratio
    read = option(found, "offloaded").sizes.read / (4 * WHOLE)
    assert read == pytest.approx(keep_ratio + summaries, abs=0.003)


def test_a_models_own_error_of_compression_is_taken_where_it_was_measured() -> None:
    own = {0.5: 0.1, 0.25: 0.5}
    found = plan_kv_budget(FACTS, asked(2, 4), SPARSE_KL, compression_kl=own)
    assert option(found, "compressed").kl == pytest.approx(
        kl_at(own, option(found, "compressed").keep_ratio)
    )


def test_without_a_calibration_nothing_is_offloaded_since_its_error_is_not_known() -> None:
    why = option(plan_kv_budget(FACTS, asked(0.5, 1, 1)), "offloaded").why_not
    assert "headrace lab calibrate sparse" in why


def test_short_contexts_are_neither_dropped_nor_offloaded() -> None:
    found = plan_kv_budget(FACTS, KvBudgetRequest(1 << 20, 4, 1024, 512, GIB), SPARSE_KL)
    assert "too short" in option(found, "compressed").why_not
    assert "only contexts of more" in option(found, "offloaded").why_not


@pytest.mark.parametrize(
    ("field", "sizes"),
    [("contexts", (1, 0, 8, 4)), ("budget_bytes", (0, 1, 8, 4)), ("leave nothing", (1, 1, 8, 8))],
)
def test_what_cannot_be_asked_for_is_named(field: str, sizes: tuple[int, int, int, int]) -> None:
    with pytest.raises(ModelError, match=field):
        KvBudgetRequest(*sizes)


# ---- errors and bytes -----------------------------------------------------------------------


@given(st.floats(0.05, 1.0))
def test_the_error_runs_through_what_was_measured_and_falls_between(keep_ratio: float) -> None:
    assert all(kl_at(SPARSE_KL, each) == pytest.approx(kl) for each, kl in SPARSE_KL.items())
    found = kl_at(SPARSE_KL, keep_ratio)
    assert min(SPARSE_KL.values()) <= found <= max(SPARSE_KL.values())
    assert kl_at(SPARSE_KL, min(1.0, keep_ratio + 0.01)) <= found


def test_no_error_is_promised_below_the_smallest_ratio() -> None:
    with pytest.raises(ValueError, match="the smallest measured ratio"):
        kl_at(SPARSE_KL, 0.04)


def test_a_compressed_cache_holds_one_whole_context_what_reads_it_and_a_share_of_the_others() -> (
    None
):
    found = option(plan_kv_budget(FACTS, asked(2, 4)), "compressed")
    kept = math.ceil(found.keep_ratio * 60) + 4  # of 7,680 tokens, and 512 of the answer
    blocks = 1 + 64 + 5 + 3 * kept
    assert found.sizes.cache == blocks * 128 * FACTS.kv_bytes_per_token


@pytest.mark.parametrize(("contexts", "at_once", "host"), [(1.5, 4, 0), (0.8, 2, 1)])
def test_a_streamed_cache_holds_what_is_kept_and_a_segment_of_one_context(
    contexts: float, at_once: int, host: int
) -> None:
    found = option(
        plan_kv_budget(FACTS, asked(contexts, at_once, host), compression_kl=CALIBRATED_KL),
        "incremental",
    )
    kept = math.ceil(found.keep_ratio * 60)
    blocks = 1 + at_once + kept + 8 + 4 + (at_once - 1) * (kept + 4)  # one describes each
    assert found.sizes.cache == blocks * 128 * FACTS.kv_bytes_per_token and not found.why_not
    # Requests that refuse fit in the cache, or leave for host memory.
    assert (found.sizes.host, bool(found.sizes.beside)) == (host * WHOLE, bool(host))


def test_nothing_is_streamed_without_a_gate() -> None:
    found = plan_kv_budget(FACTS, asked(1.5, 4), SPARSE_KL)
    assert "headrace lab calibrate compression" in option(found, "incremental").why_not


def test_offloaded_bytes_beside_the_cache_are_summaries_and_one_layer() -> None:
    found = option(plan_kv_budget(FACTS, asked(0.5, 1, 1), SPARSE_KL), "offloaded")
    block = 128 * FACTS.kv_bytes_per_token
    units = 4 * (found.sizes.cache + found.sizes.host) // block
    one_layer = WHOLE // 30
    # Of a unit of 32 tokens with a basis: 10.1 % of its keys, and 8 bytes for each layer.
    summary = found.sizes.beside - one_layer - units * 30 * 8
    assert summary / (units * 32 * FACTS.kv_bytes_per_token / 2) == pytest.approx(0.101, abs=0.001)


# ---- in an app ------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    shape = ModelShape.of(SMALL)
    rank = 20
    bases = [
        Basis(*(np.zeros(s, np.float32) for s in ((3, 64), (3, 64, rank), (3, rank, 64))))
        for _ in range(30)
    ]
    write(tmp_path / "sparse", Calibration("s", shape, 32, SPARSE_KL, 0.02, 0.2), bases)
    draw = np.random.default_rng(0)
    sizes = (30, 3, 128, 4), (30, 3, 4), (30, 3, 4), (30, 3, 128), (30, 3)
    gate = ImportancePredictor(*(torch.from_numpy(draw.random(s, np.float32)) for s in sizes))
    gates.write(tmp_path / "compressed", CalibrationResult("s", shape, 32, CALIBRATED_KL), gate)
    return tmp_path


def config(model: Path, *more: str) -> HeadraceConfig:
    fixed = f"model.source={model}", "techniques.kv_budget.contexts=4", "decode.engine.dtype=half"
    return load_config(overrides=[*fixed, "prefill.engine.dtype=half", *more])


def test_a_plan_becomes_the_techniques_of_an_app(model: Path) -> None:
    bounded, found = apply_kv_budget(config(model, "techniques.kv_budget.gib=0.4"))
    assert found is not None and found.chosen.name == "compressed"
    assert bounded.techniques.kv_budget is None
    assert bounded.techniques.compression.mode == "auto"
    assert bounded.techniques.compression.keep_ratio == found.chosen.keep_ratio
    assert bounded.decode.kv_cache_gb == 0.4

    calibration = f"techniques.sparse.calibration={model / 'sparse'}"
    tight = "techniques.kv_budget.gib=0.2", "techniques.kv_budget.host_gib=1", calibration
    offloaded, found = apply_kv_budget(config(model, *tight))
    assert found is not None and found.chosen.name == "offloaded"
    sparse, decode = offloaded.techniques.sparse, offloaded.decode
    assert (sparse.mode, sparse.keep_ratio) == ("auto", found.chosen.keep_ratio)
    assert int(sparse.offload_gib * GIB) >= found.chosen.sizes.host
    assert decode.kv_cache_bytes is not None and decode.kv_cache_bytes >= found.chosen.sizes.cache
    assert decode.engine["long_prefill_token_threshold"] == 128

    gate = f"techniques.compression.calibration={model / 'compressed'}"
    streamed, found = apply_kv_budget(config(model, *tight, gate))
    assert found is not None and found.chosen.name == "incremental"
    bounded_, decode = streamed.techniques.compression, streamed.decode
    assert (bounded_.mode, bounded_.keep_ratio, bounded_.incremental) == (
        "auto",
        found.chosen.keep_ratio,
        True,
    )
    assert decode.engine["long_prefill_token_threshold"] == 512
    assert streamed.techniques.sparse.mode == "off"

    whole, _ = apply_kv_budget(config(model, "techniques.kv_budget.gib=1"))
    assert whole.techniques.compression.mode == whole.techniques.sparse.mode == "off"
    assert apply_kv_budget(whole) == (whole, None)


def test_a_target_for_latency_is_what_a_step_may_read_beside_the_weights(model: Path) -> None:
    facts = replace(FACTS, params=100_000_000)
    section = KvBudgetSection(gib=1, itl_ms=50, memory_gbps=10)
    assert budget_request(section, 8192, facts).read_bytes == 500_000_000 - 200_000_000
    assert budget_request(KvBudgetSection(gib=1), 8192, facts).read_bytes is None
    with pytest.raises(ModelError, match="reading the weights alone takes 20 ms at 10 GB/s"):
        budget_request(section.model_copy(update={"itl_ms": 20}), 8192, facts)
    slow = "techniques.kv_budget.itl_ms=40", "techniques.kv_budget.memory_gbps=10"
    _, found = apply_kv_budget(config(model, "techniques.kv_budget.gib=1", *slow))
    assert found is not None and found.chosen.name == "compressed"
    assert found.chosen.sizes.read <= 400_000_000


def test_memory_is_measured_where_nobody_says_how_fast_it_is() -> None:
    assert all(0.1 < measured_gbps(1, 4, size) < 1000 for size in (2, 4))
    section = KvBudgetSection(gib=1, itl_ms=1e6)
    assert (budget_request(section, 8192, FACTS).read_bytes or 0) > 1e11


def test_engines_keep_all_of_what_they_cannot_drop(model: Path) -> None:
    gpu = "decode.gpus=1", "prefill.gpus=1", "techniques.kv_budget.gib=0.4"
    with pytest.raises(ConfigError, match="compressed: engines on CPUs only"):
        apply_kv_budget(config(model, *gpu))
    codec = "store.engine.codec=int4", "techniques.kv_budget.gib=0.4"
    with pytest.raises(ConfigError, match='the codec "int4"'):
        apply_kv_budget(config(model, *codec))


def test_what_contradicts_a_budget_is_refused(model: Path) -> None:
    on = "techniques.kv_budget.gib=0.4", "techniques.compression.mode=request"
    with pytest.raises(ConfigError, match=r"techniques\.compression\.mode: techniques\.kv_budget"):
        config(model, *on)
    with pytest.raises(ConfigError, match=r"^techniques\.kv_budget: nothing keeps to 0\.1 GiB"):
        apply_kv_budget(config(model, "techniques.kv_budget.gib=0.1"))
    with pytest.raises(ValueError, match="planned for a configuration file"):
        build_app({"headrace": {"techniques": {"kv_budget": {"gib": 1}}}})


# ---- what is told ---------------------------------------------------------------------------


def test_check_kv_foresees_the_plan(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = "--kv-budget", "0.2", "--contexts", "4", "--host-memory", "1"
    command = [
        "model",
        "check-kv",
        str(model),
        *asked,
        "--sparse-calibration",
        str(model / "sparse"),
    ]
    with pytest.raises(SystemExit) as ended:
        main([*command, "--json"])
    assert not ended.value.code
    found = json.loads(capsys.readouterr().out)["kv_budget"]
    assert found["chosen"] == "offloaded" and found["options"][0]["name"] == "full"
    with pytest.raises(SystemExit):
        main([*command, "--json", "--compression-calibration", str(model / "compressed")])
    assert json.loads(capsys.readouterr().out)["kv_budget"]["chosen"] == "incremental"
    with pytest.raises(SystemExit):
        main([*command, "--compression-calibration", str(model / "sparse")])
    assert f"{model / 'sparse'} cannot be used" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(command)
    assert "chosen" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["model", "check-kv", str(model), "--kv-budget", "0.01"])
    assert ended.value.code and "nothing keeps to 0.01 GiB" in capsys.readouterr().err


def test_the_command_kv_budget_shows_the_running_apps_plan(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    instance = state.Instance("app", "token")
    monkeypatch.setattr(client, "running_instance", lambda name: instance)
    with pytest.raises(CliError, match="no budget for KV"):
        kv_budget.kv_budget(None, as_json=False)
    instance.kv_plan = kv_budget.to_plain_data(plan_kv_budget(FACTS, asked(2, 4)))
    kv_budget.kv_budget(None, as_json=False)
    assert "compressed" in capsys.readouterr().out
    assert kv_budget.summary(instance.kv_plan).startswith("compressed: 25% is kept of long prompts")
