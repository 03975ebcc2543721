"""The messages between the connector's two sides: hand-outs and pulls with their identities."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import zmq
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import GET_META_MSG
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping import ReadSpec
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.utils import zmq_ctx
from vllm.utils.network_utils import make_zmq_path
from vllm.v1.request import RequestStatus

from headrace_engine.connector.identity.weights import Unidentified
from headrace_engine.kv_transfer.handoff import PARAMS_KEY as TRANSFER
from headrace_engine.kv_transfer.handoff import produce_params
from headrace_engine.kv_transfer.ports import reserve_ports
from headrace_engine.pull_events import UNPROVED
from headrace_engine.pull_proof import prompt_digests
from headrace_engine.pull_proof.block_ids import without_unneeded
from headrace_engine.pull_proof.identity import PARAMS_KEY, Claim, Unproved, believe
from headrace_engine.pull_proof.records import Geometry
from headrace_engine.pull_proof.scheduler_connector import ProvenScheduler
from headrace_engine.pull_proof.step_work import ProvenPayload
from headrace_engine.pull_proof.worker_connector import ProvenWorker

PROMPT = list(range(200))
BLOCK = 128


@pytest.fixture(autouse=True)
def _model(monkeypatch: pytest.MonkeyPatch) -> None:
    known = SimpleNamespace(encoding=b"model")
    monkeypatch.setattr(prompt_digests, "kv_identity", lambda config: known)


def scheduler(check: str = "off", groups: int = 1) -> ProvenScheduler:
    extra = {"headrace_integrity": {"check": check}}
    config: Any = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=BLOCK, mamba_cache_mode="none"),
        model_config=SimpleNamespace(max_model_len=1024, multimodal_config=None),
        parallel_config=SimpleNamespace(
            data_parallel_index=0,
            tensor_parallel_size=1,
            decode_context_parallel_size=1,
            pipeline_parallel_size=1,
        ),
        num_prefill_lookahead_tokens=0,
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=True),
        lora_config=None,
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config=extra,
            kv_buffer_device="cpu",
            get_from_extra_config=lambda name, default: extra.get(name, default),
        ),
    )
    spec = SimpleNamespace(kv_cache_spec=SimpleNamespace(prefix_replay_tokens=0))
    cache: Any = SimpleNamespace(
        kv_cache_groups=[spec] * groups,
        transfer_groups=[spec] * groups,
        has_mamba_layers=False,
        select_transfer_block_ids=lambda ids: ids,
    )
    made = ProvenScheduler(config, "engine", cache)
    made.places = {(0, 0): 4096}
    return made


def request(name: str, params: dict[str, Any], tokens: list[int], salt: str = "t") -> Any:
    return SimpleNamespace(
        request_id=name,
        kv_transfer_params=params,
        prompt_token_ids=tokens,
        num_prompt_tokens=len(tokens),
        num_computed_tokens=0,
        cache_salt=salt,
        lora_request=None,
        mm_features=None,
        status=RequestStatus.FINISHED_LENGTH_CAPPED,
    )


def blocks(ids: list[int]) -> Any:
    return SimpleNamespace(
        blocks=([SimpleNamespace(block_hash=None, is_null=False) for _ in ids],),
        get_unhashed_block_ids_all_groups=lambda: (ids,),
    )


def step(new: dict[str, list[int]], tokens: dict[str, int]) -> Any:
    """A scheduler's output: requests that are new in it, and tokens of each."""
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, block_ids=(ids,)) for name, ids in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[n for n in tokens if n not in new],
            new_block_ids=[([99],) for n in tokens if n not in new],
            resumed_req_ids=set(),
        ),
        num_scheduled_tokens=tokens,
    )


def hand_out(
    producer: ProvenScheduler, *, check: bool = False, adapter: Any = None
) -> tuple[dict[str, Any], Any]:
    """The reference to a prompt that was computed in blocks 5 and 6, and the step's work."""
    asked = request("p", produce_params(check), PROMPT)
    asked.lora_request = adapter
    producer.update_state_after_alloc(asked, blocks([5, 6]), 0)
    work = producer.build_connector_meta(step({"p": [5, 6]}, {"p": len(PROMPT)})).integrity
    held, params = producer.request_finished(asked, ([5, 6],))
    assert held and params is not None
    return params, work


def pulled(
    params: dict[str, Any],
    tokens: list[int],
    salt: str = "t",
    consumer: ProvenScheduler | None = None,
    adapter: Any = None,
) -> Claim | Unproved:
    """What a decode engine's scheduler makes of a reference."""
    consumer = consumer or scheduler()
    asked = request("d", dict(params), tokens, salt)
    asked.lora_request = adapter
    consumer.on_new_request(asked)
    assert consumer.get_num_new_matched_tokens(asked, 0) == (len(tokens), True)
    consumer.update_state_after_alloc(asked, blocks([1, 2]), len(tokens))
    assert consumer.pulled == {"d": len(tokens)}, "usage counts them"
    claims = consumer.build_connector_meta(step({}, {})).integrity.claims
    assert set(claims) == {"d"}
    found: Claim | Unproved = claims["d"]
    return found


def test_a_record_is_written_before_the_reference_goes_out_and_proves_it() -> None:
    params, work = hand_out(scheduler())
    [(name, row, record)] = work.begun
    assert (name, work.sums) == ("p", [])
    claim = pulled(params, PROMPT)
    assert isinstance(claim, Claim)
    believe(claim.identity, record)
    assert claim.places == {(0, 0): 4096 + row * Geometry.of(1024, BLOCK).row_bytes}


@pytest.mark.parametrize(
    "kind, tokens, salt, differs",
    [
        ("reference", [*PROMPT[:-1], 7], "t", {}),
        ("reference", PROMPT, "another tenant", {}),
        ("reference", PROMPT, "t", {"remote_block_ids": ([5, 7],)}),
        ("reference", PROMPT[:-1], "t", {}),
        ("unknown", PROMPT, "t", {PARAMS_KEY: None}),
        ("unknown", PROMPT, "t", {"remote_block_ids": (["5"],)}),
    ],
)
def test_a_reference_that_is_not_the_prompts_is_not_pulled(
    kind: str, tokens: list[int], salt: str, differs: dict[str, Any]
) -> None:
    params, _ = hand_out(scheduler())
    refused = pulled({**params, **differs}, tokens, salt)
    assert isinstance(refused, Unproved) and refused.kind == kind


@pytest.mark.parametrize("check, demanded", [("all", False), ("off", True)])
def test_a_checked_prompt_is_summed_when_its_last_step_is_done(check: str, demanded: bool) -> None:
    _, work = hand_out(scheduler(check), check=demanded)
    [summed] = work.sums
    assert summed.blocks == [5, 6] and summed.identity.checked


def test_a_prompt_of_several_steps_is_summed_after_the_last_with_all_its_blocks() -> None:
    producer = scheduler("all")
    asked = request("p", produce_params(), PROMPT)
    producer.update_state_after_alloc(asked, blocks([5]), 0)
    assert not producer.build_connector_meta(step({"p": [5]}, {"p": 128})).integrity.sums
    asked.num_computed_tokens = 128
    [summed] = producer.build_connector_meta(step({}, {"p": 72})).integrity.sums
    assert summed.blocks == [5, 99]


def test_a_prompt_that_is_aborted_or_pulled_gives_its_row_back() -> None:
    producer = scheduler("all")
    asked = request("p", produce_params(), PROMPT)
    producer.update_state_after_alloc(asked, blocks([5, 6]), 0)
    asked.status = RequestStatus.FINISHED_ABORTED
    assert producer.request_finished(asked, ([5, 6],)) == (False, None)
    assert producer.build_connector_meta(step({}, {})).integrity.ended == ["p"]
    assert len(producer.grants) == 0
    hand_out(producer)
    assert len(producer.grants) == 1
    done: Any = SimpleNamespace(finished_recving=None, finished_sending={"p", "another"})
    producer.update_connector_output(done)
    assert len(producer.grants) == 0 and not producer.to_sum


def test_the_bytes_of_models_with_several_kinds_of_attention_cannot_be_checked() -> None:
    params, _ = hand_out(scheduler())
    hybrid = scheduler(groups=2)
    assert hybrid.get_num_new_matched_tokens(request("d", params, PROMPT), 0) == (200, True)
    with pytest.raises(ValueError, match="one kind of attention"):
        scheduler("all", groups=2)


class TestResets:
    """vLLM resets caches when weights change in a running engine."""

    @pytest.mark.parametrize("who", ["prefill", "decode"])
    def test_other_weights_than_those_that_computed_a_prompt_never_pull_it(self, who: str) -> None:
        producer, consumer = scheduler(), scheduler()
        (producer if who == "prefill" else consumer).reset()
        refused = pulled(hand_out(producer)[0], PROMPT, consumer=consumer)
        assert isinstance(refused, Unproved) and refused.kind == "reference"

    def test_what_was_handed_out_before_is_still_that_of_the_old_weights(self) -> None:
        producer = scheduler()
        params, _ = hand_out(producer)
        producer.reset()
        assert isinstance(pulled(params, PROMPT), Claim)
        assert not producer.build_connector_meta(step({}, {})).integrity.ended

    def test_a_prompt_that_was_being_computed_hands_out_nothing(self) -> None:
        producer = scheduler("all")
        asked = request("p", produce_params(), PROMPT)
        producer.update_state_after_alloc(asked, blocks([5, 6]), 0)
        producer.reset()
        work = producer.build_connector_meta(step({"p": [5, 6]}, {"p": len(PROMPT)})).integrity
        assert work.ended == ["p"] and not work.sums
        _, params = producer.request_finished(asked, ([5, 6],))
        refused = pulled(params, PROMPT)
        assert isinstance(refused, Unproved) and refused.kind == "unknown"

    def test_computed_again_from_its_start_it_is_that_of_the_new_weights(self) -> None:
        producer = scheduler()
        asked = request("p", produce_params(), PROMPT)
        for _ in range(2):
            producer.update_state_after_alloc(asked, blocks([5, 6]), 0)
            last = producer.build_connector_meta(step({"p": [5, 6]}, {"p": 200})).integrity
            producer.reset()
        assert len(last.begun) == 1 and last.ended == ["p"]

    def test_it_is_told_once(self) -> None:
        producer = scheduler()
        digests = producer.digests
        assert digests.take_epochs() == []
        producer.reset()
        [epoch] = digests.take_epochs()
        assert epoch == digests._epoch.hex() and digests.take_epochs() == []


def test_an_engine_without_an_identity_pulls_nothing_and_hands_out_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    good, _ = hand_out(scheduler())

    def unknown(config: Any) -> Any:
        raise Unidentified("load_format: nobody knows")

    monkeypatch.setattr(prompt_digests, "kv_identity", unknown)
    engine = scheduler()
    assert "load_format: nobody knows" in caplog.text
    assert engine.get_num_new_matched_tokens(request("d", good, PROMPT), 0) == (0, False)
    params, work = hand_out(engine)
    assert PARAMS_KEY not in params and not work.begun


class TestAdapters:
    class Known:
        """Digests of adapters."""

        def __init__(self, digest: bytes | None) -> None:
            self.digest = digest

        def of(self, adapter: Any) -> bytes | None:
            return self.digest

        def close(self) -> None:
            pass

    def engine(self, digest: bytes | None) -> ProvenScheduler:
        made = scheduler()
        made.digests._adapters = self.Known(digest)  # type: ignore[assignment]
        return made

    def test_a_prompt_with_an_adapter_is_pulled_with_the_same_content_only(self) -> None:
        params, _ = hand_out(self.engine(b"one"), adapter="sql")
        for digest, expected in ((b"one", Claim), (b"two", Unproved), (None, Unproved)):
            found = pulled(params, PROMPT, consumer=self.engine(digest), adapter="sql")
            assert isinstance(found, expected)

    @pytest.mark.parametrize("known", [False, True], ids=["no adapters", "not this one"])
    def test_of_one_that_is_not_known_nothing_is_handed_out(self, known: bool) -> None:
        producer = self.engine(None) if known else scheduler()
        params, work = hand_out(producer, adapter="sql")
        assert PARAMS_KEY not in params and not work.begun


def worker(claim: Claim | Unproved | None) -> ProvenWorker:
    """A worker's half that has met an engine of ten blocks."""
    made = object.__new__(ProvenWorker)
    made.shutdown = lambda: None  # type: ignore[method-assign]
    made.claims = {} if claim is None else {"d": claim}
    engine = SimpleNamespace(remote_physical_blocks_per_logical=1, remote_block_size=BLOCK)
    made.transfer_topo = SimpleNamespace(  # type: ignore[assignment]
        get_engine_info=lambda name: engine, block_size_ratio=lambda size: 1
    )
    made.dst_num_blocks = {"engine": 10}
    made.tp_mappings = {"engine": SimpleNamespace(all_source_ranks=[0])}  # type: ignore[dict-item]
    return made


def meta(theirs: Any, ours: list[int]) -> Any:
    remote = SimpleNamespace(engine_id="engine", block_ids=theirs)
    return SimpleNamespace(remote=remote, local_block_ids=(ours,))


@pytest.mark.parametrize(
    "theirs, ours",
    [(([5, 10],), [1, 2]), (([5, -1],), [1, 2]), (([5],), [1, 2]), (([5], [6]), [1])],
    ids=["beyond the end", "before the start", "too few", "other groups"],
)
def test_blocks_that_the_producer_cannot_have_are_not_read(theirs: Any, ours: list[int]) -> None:
    claim = pulled(hand_out(scheduler())[0], PROMPT)
    with pytest.raises(Unproved) as wrong:
        worker(claim).check_pull("d", meta(theirs, ours))
    assert wrong.value.kind == "range"


def test_a_worker_pulls_only_with_a_claim() -> None:
    claim = pulled(hand_out(scheduler())[0], PROMPT)
    worker(claim).check_pull("d", meta(([5, 6],), [1, 2]))
    for missing in (None, Unproved("reference", "no")):
        with pytest.raises(Unproved):
            worker(missing).check_pull("d", meta(([5, 6],), [1, 2]))


@pytest.mark.parametrize(
    ("theirs", "ours", "positions"),
    [
        ([5, 6], [1, 2], [0, 1]),
        ([5, 6], [2], [1]),
        ([6], [2], [1]),
        ([5, 6, 7], [2, 3], [1, 2]),
    ],
    ids=["all", "the first is cached", "only the window's", "one that the prompt does not fill"],
)
def test_fingerprints_are_compared_by_position_in_the_prompt(
    theirs: list[int], ours: list[int], positions: list[int]
) -> None:
    """vLLM pairs the last blocks of both. With sliding windows a reference names only these."""
    claim = pulled(hand_out(scheduler())[0], PROMPT)
    assert isinstance(claim, Claim)
    one = worker(claim)
    one._sums, one.world_size, one.dcp_size = cast(Any, object()), 1, 1
    one._physical_blocks_per_logical_kv_block = 1
    one.vllm_config = scheduler().vllm_config
    engine = one.transfer_topo.get_engine_info("engine")
    engine.remote_tp_size = engine.remote_dcp_size = 1
    assert one._comparable(meta((theirs,), ours), claim) == (
        ours,
        range(positions[0], positions[-1] + 1),
    )


def test_of_a_group_of_which_no_block_is_read_none_is_named() -> None:
    """As for attention in chunks, if the next token begins one."""
    spec = ReadSpec(0, local_block_ids=[[], [3, 4]], remote_block_ids=[[0, 0, 0], [5, 6, 7]])
    assert without_unneeded(spec).remote_block_ids == [[], [5, 6, 7]]
    assert without_unneeded(spec).local_block_ids == spec.local_block_ids
    vllms = cast(Any, object.__new__(ProvenWorker))
    vllms.shutdown, vllms._has_mamba = (lambda: None), False
    for each, is_paired in ((spec, False), (without_unneeded(spec), True)):
        ours, theirs = vllms._apply_prefix_caching(
            each.local_block_ids, each.remote_block_ids, 1, 1
        )
        assert (list(map(len, ours)) == list(map(len, theirs))) == is_paired


@pytest.mark.parametrize("waits", [False, True])
def test_a_refused_pull_is_told_once_if_anybody_waits_for_it(waits: bool) -> None:
    """vLLM keeps no metadata of a request whose prompt is all cached: it runs already."""
    one, told = worker(None), []
    one._recving_metadata = {"d": meta(([5, 6],), [1, 2])} if waits else {}
    one._agent = SimpleNamespace(outcomes=SimpleNamespace(failed={}))  # type: ignore[assignment]
    one._recv_failures, one._failed_remote_engines = set(), set()
    one.xfer_stats = SimpleNamespace(data={UNPROVED: told}, record_failed_transfer=lambda: None)  # type: ignore[assignment]
    for _ in range(2):
        one._refuse("d", Unproved("unreachable", "the producer is gone"))
    assert one._recv_failures == {"d"} and not one._agent.outcomes.failed
    assert told == [["d", "engine", "unreachable", "the producer is gone"]] * waits


def test_the_demand_for_fingerprints_travels_with_the_prefill() -> None:
    assert produce_params(True).items() - produce_params().items() == {("headrace_check", True)}
    assert TRANSFER == "kv_transfer_params"


def windowed() -> ProvenScheduler:
    """An engine with sliding windows, whose blocks vLLM frees early."""
    made = scheduler()
    made._is_hma_required = True
    return made


def test_with_windows_the_last_token_of_a_prompt_is_left_to_the_puller() -> None:
    """It needs blocks that vLLM frees once a producer has computed it."""
    asked = request("p", produce_params(), list(PROMPT))
    asked._all_token_ids = list(PROMPT)
    asked.get_skip_reading_prefix_cache = lambda: False
    windowed().on_new_request(asked)
    assert asked.num_prompt_tokens == len(asked.prompt_token_ids) == len(PROMPT) - 1
    params, _ = hand_out(scheduler())
    pulls = request("d", params, PROMPT)
    assert windowed().get_num_new_matched_tokens(pulls, 0) == (len(PROMPT) - 1, True)
    assert scheduler().get_num_new_matched_tokens(pulls, 0) == (len(PROMPT), True)


@pytest.mark.parametrize(("tokens", "is_pulled"), [(BLOCK + 1, False), (BLOCK + 2, True)])
def test_a_reference_whose_last_block_is_another_one_is_not_pulled(
    tokens: int, is_pulled: bool
) -> None:
    """A producer that did not stop before the last token may have a block more, and vLLM pairs the
    last blocks."""
    producer, prompt = scheduler(), PROMPT[:tokens]
    made = request("p", produce_params(), prompt)
    producer.update_state_after_alloc(made, blocks([5, 6]), 0)
    _, params = producer.request_finished(made, ([5, 6],))
    assert params is not None
    claim = windowed()._claim(request("d", params, prompt), params)
    assert isinstance(claim, Claim) == is_pulled


# Handshakes


def listening(host: str, port: int) -> ProvenScheduler:
    """A producer that answers handshakes at this address."""
    with pytest.MonkeyPatch.context() as patch:
        known = SimpleNamespace(encoding=b"model")
        patch.setattr(prompt_digests, "kv_identity", lambda config: known)
        patch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", host)
        patch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(port))
        made = scheduler()
        made.set_xfer_handshake_metadata({(0, 0): ProvenPayload("hash", b"agent", 4096)})
    return made


def handshake(host: str, port: int, *before: list[bytes]) -> bytes:
    """The agent that a producer answers with, after these messages."""
    made = listening(host, port)
    path = make_zmq_path("tcp", host, port)
    try:
        for message in before:
            with zmq.Context() as context, context.socket(zmq.DEALER) as sending:
                sending.connect(path)
                sending.send_multipart(message)
        for _ in range(20):
            with zmq_ctx(zmq.REQ, path) as asking:
                asking.send(msgspec.msgpack.encode((GET_META_MSG, 0, 0)))
                if asking.poll(1000):
                    answer, _ = asking.recv_multipart()
                    found = msgspec.msgpack.decode(answer, type=ProvenPayload)
                    return found.agent_metadata_bytes
        raise AssertionError("nobody answers")
    finally:
        made._stop_event.set()


def test_a_handshake_is_answered_at_reserved_ports() -> None:
    with reserve_ports(2, "127.0.0.1") as block:
        assert handshake("127.0.0.1", block.first) == b"agent"


def test_an_engine_whose_port_is_taken_says_so_and_does_not_wait_for_ever() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(RuntimeError, match=rf"127\.0\.0\.1:{port} .*SIDE_CHANNEL_PORT"):
            listening("127.0.0.1", port)


@pytest.mark.parametrize(
    "message",
    [
        [b"too few"],
        [b"", b"not msgpack", b"too many"],
        [b"", b"\xc1"],
        [b"", msgspec.msgpack.encode((GET_META_MSG, 0, 99))],
    ],
)
def test_a_message_that_cannot_be_read_ends_no_handshakes(message: list[bytes]) -> None:
    with reserve_ports(1, "127.0.0.1") as block:
        assert handshake("127.0.0.1", block.first, message) == b"agent"
