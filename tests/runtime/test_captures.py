"""Captured programs: the same tokens as without, really replayed, whatever lies in the padding."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pcp_compiler.backends.executors.cuda_graph import GraphExecutor
from pcp_compiler.backends.executors.replay import ReplayExecutor
from pcp_compiler.errors import CaptureError, ConfigError, InvariantError
from pcp_compiler.plan.dispatch import LiveBatch
from pcp_compiler.runtime.decoder import SpeculativeDecoder
from pcp_compiler.runtime.sampling import SamplingParams
from tests.runtime.tiny import VOCAB_SIZE, Tiny, make_prompt

PROMPTS = [make_prompt(length) for length in (9, 21, 5, 13, 2)]
LIMITS = {"kv_blocks": 160, "kv_block_size": 4, "max_num_requests": 4, "prefill_chunk": 8}


def make_decoder(tiny: Tiny, draft: str, pcp_size: int, draft_mode: str = "auto", **capture: Any) -> SpeculativeDecoder:
    config: dict[str, Any] = {
        "parallel": {"pcp_size": pcp_size, "min_tokens_to_shard": 2}, "limits": LIMITS,
        "capture": {"mode": "full_decode", "executor": "replay", **capture},
    }  # fmt: skip
    drafter = tiny.drafters.get(draft)
    if drafter is not None:
        method = drafter.capabilities.method
        config["draft"] = {"method": method, "num_speculative_tokens": 3, "mode": draft_mode}
    return SpeculativeDecoder(tiny.target, config, drafter, compile_cache=tiny.compile_cache)


@pytest.mark.parametrize(
    ("draft", "mode"),
    [("none", "auto"), ("mtp", "sharded"), ("mtp", "replicated"), ("mtp3", "auto"), ("model", "auto")],
)
@pytest.mark.parametrize("pcp_size", [1, 2, 4])
def test_captured_steps_give_the_tokens_of_the_eager_model_and_were_replayed(
    tiny: Tiny, draft: str, mode: str, pcp_size: int
) -> None:
    if mode == "sharded" and pcp_size == 1:
        pytest.skip("there is nothing to shard")
    decoder = make_decoder(tiny, draft, pcp_size, mode)
    stats = decoder.capture_stats()
    num_made = stats.num_captures
    tiny.check_greedy(decoder, PROMPTS, 12)
    assert stats.num_captures == num_made > 0, "a capture was made while requests ran"
    names = {name.split(":")[0] for name in stats.hits}
    assert names & {"target", "round, K = 3"}
    assert draft == "none" or any(name.startswith("draft") for name in names)
    assert any("chain" in name for name in names) == (draft in ("mtp", "model"))
    assert any("round" in name for name in names) == (draft == "mtp")
    assert not {miss for miss in stats.misses if "no prefill capture" not in miss}
    assert stats.num_replays == sum(stats.hits.values()) > 10
    assert 0 <= stats.pad_waste < 0.6 and stats.num_bytes > 0


@pytest.mark.parametrize("kv", ["shared", "per_rank"])
@pytest.mark.parametrize("mode", ["piecewise", "full_and_piecewise"])
@pytest.mark.parametrize(
    ("draft", "draft_mode", "pcp_size", "shard_decode"),
    [
        ("none", "auto", 1, False), ("none", "auto", 4, False), ("mtp", "sharded", 2, False),
        ("mtp", "sharded", 4, False), ("mtp", "replicated", 2, False), ("mtp", "replicated", 4, True),
        ("mtp3", "auto", 2, True), ("model", "auto", 2, False),
    ],
)  # fmt: skip
def test_pieces_of_prompts_and_decodes_are_replayed_on_every_rank(
    tiny: Tiny, draft: str, draft_mode: str, pcp_size: int, shard_decode: bool, mode: str, kv: Any
) -> None:
    config: dict[str, Any] = {
        "parallel": {"pcp_size": pcp_size, "min_tokens_to_shard": 2, "shard_decode": shard_decode},
        "limits": {**LIMITS, "max_num_tokens": 24}, "capture": {"mode": mode, "executor": "replay"},
    }  # fmt: skip
    drafter = tiny.drafters.get(draft)
    if drafter is not None:
        config["draft"] = {"method": drafter.capabilities.method, "num_speculative_tokens": 3, "mode": draft_mode}
    decoder = SpeculativeDecoder(tiny.target, config, drafter, compile_cache=tiny.compile_cache, kv=kv)
    tiny.check_greedy(decoder, PROMPTS, 12)
    stats = decoder.capture_stats()
    by_rank = [pieces for pieces in stats.pieces if pieces.num_replays]
    assert len(by_rank) >= pcp_size
    assert stats.num_piece_replays > stats.num_piece_captures > 0
    assert (stats.num_captures > 0) == (mode == "full_and_piecewise" and not (draft == "mtp3" and shard_decode))
    if pcp_size > 1:
        counts = decoder.target.counts
        assert counts.num_sharded > 0 and counts.num_rows < counts.num_global_rows * (1 + 4 / pcp_size)


def test_named_ops_stay_out_of_the_pieces_of_target_and_drafter(tiny: Tiny) -> None:
    decoder = make_decoder(tiny, "mtp", 1, mode="piecewise", splitting_ops=["aten.mm"])
    plain = make_decoder(tiny, "mtp", 1, mode="piecewise")
    tiny.check_greedy(decoder, PROMPTS[:2], 6)
    assert decoder.proposer is not None and plain.proposer is not None
    for model, other in ((decoder.target, plain.target), (decoder.proposer.models[0], plain.proposer.models[0])):
        cut, whole = (len(m._split["whole"].program.segments) for m in (model, other))
        assert cut > whole
    with pytest.raises(ConfigError, match=r"capture\.splitting_ops: got 'mine\.op', which is no op"):
        make_decoder(tiny, "none", 1, mode="piecewise", splitting_ops=["mine.op"])


def test_a_piece_that_gets_another_size_is_a_fault_of_ours(tiny: Tiny) -> None:
    decoder = make_decoder(tiny, "none", 1, mode="piecewise")
    tiny.check_greedy(decoder, PROMPTS[:1], 3)
    (pieces,) = decoder.capture_stats().pieces
    (size, number), piece = next((key, piece) for key, piece in pieces._held.items())
    wrong = [value[:0] if isinstance(value, Tensor) else value for value in piece.arguments]
    with pytest.raises(InvariantError, match="a piece for"):
        pieces.runner(size)(number, lambda *_: [], tuple(wrong))


@pytest.mark.parametrize("schedule", [[[1, 4, 0]], [[1, 1, 0], [2, 3, 2], [4, 4, 0]], [[1, 1, 3], [2, 4, 1]]])
@pytest.mark.parametrize("draft", ["mtp", "model"])
def test_every_k_of_a_schedule_is_captured_and_0_is_one(tiny: Tiny, draft: str, schedule: list[list[int]]) -> None:
    drafter = tiny.drafters[draft]
    config: dict[str, Any] = {
        "limits": LIMITS, "capture": {"mode": "full_decode", "executor": "replay"},
        "draft": {"method": drafter.capabilities.method, "k_schedule": schedule},
    }  # fmt: skip
    decoder = SpeculativeDecoder(tiny.target, config, drafter, compile_cache=tiny.compile_cache)
    params = [SamplingParams(count) for count in (20, 9, 5, 14, 11)]
    for prompt, option, made in zip(PROMPTS, params, decoder.generate(PROMPTS, params, progress=False), strict=True):
        assert made.token_ids == tiny.greedy(prompt, option.max_new_tokens)
    assert set(decoder.num_proposals) == {k for _, _, k in schedule}
    stats = decoder.capture_stats()
    assert stats.num_replays > 10
    assert not {miss for miss in stats.misses if not miss.startswith("round") and "no prefill capture" not in miss}
    if draft == "mtp":
        rounds = {name.split(":")[0] for name in stats.hits if name.startswith("round")}
        assert rounds == {f"round, K = {k}" for _, _, k in schedule}


@pytest.mark.parametrize("draft", ["mtp", "self"])
def test_stops_ties_counts_and_ends_of_the_context_are_those_of_eager_rounds(tiny: Tiny, draft: str) -> None:
    drafter = tiny.drafters[draft]
    lengths = (31, 30, 28, 9, 13, 1)
    stops = [(tiny.greedy(make_prompt(length), 12)[7],) if length < 20 else () for length in lengths]
    params = [SamplingParams(12, stop_token_ids=stop) for stop in stops]
    made = []
    for mode in ("none", "full_decode"):
        config = {
            "limits": {**LIMITS, "max_model_len": 32}, "capture": {"mode": mode, "executor": "replay"},
            "draft": {"method": drafter.capabilities.method},
        }  # fmt: skip
        decoder = SpeculativeDecoder(
            tiny.target, config, drafter, compile_cache=tiny.compile_cache, tie_margin=0.5
        )  # fmt: skip
        made.append(decoder.generate([make_prompt(length) for length in lengths], params, progress=False))
        assert decoder.pool.num_free == decoder.pool.num_usable
    rounds = {name for name in decoder.capture_stats().hits if name.startswith("round")}
    assert bool(rounds) == (draft == "mtp")
    for length, eager, captured in zip(lengths, *made, strict=True):
        answer = tiny.greedy(make_prompt(length), min(12, 32 - length))
        assert captured.token_ids == answer[: len(captured.token_ids)]
        assert (captured.finish_reason == "stop") == (length < 20)
        assert (eager.token_ids, eager.finish_reason, eager.stats) == (
            captured.token_ids, captured.finish_reason, captured.stats,
        )  # fmt: skip
        assert [(tie.position, tie.token_ids) for tie in eager.ties] == [
            (tie.position, tie.token_ids) for tie in captured.ties
        ]
    assert sum(len(generation.ties) for generation in made[0]) > 3


@pytest.mark.parametrize("numerics", ["exact", "fast"])
@pytest.mark.parametrize("draft", ["mtp", "model"])
def test_nan_in_a_captured_decode_ends_one_request_and_leaves_the_others_alone(
    tmp_path: Path, draft: str, numerics: str
) -> None:
    tiny = Tiny(tmp_path)
    prompts = [make_prompt(length, vocab_size=VOCAB_SIZE - 1) for length in (9, 20)]
    answers = [tiny.greedy(prompt, 10) for prompt in prompts]
    known = {*prompts[0], *prompts[1], *answers[0], *answers[1]}
    bad_id = next(token_id for token_id in range(VOCAB_SIZE) if token_id not in known)
    tiny.target.model.embed_tokens.weight[bad_id] = float("nan")
    drafter = tiny.drafters[draft]
    config = {
        "limits": LIMITS, "capture": {"mode": "full_decode", "executor": "replay"}, "numerics": numerics,
        "draft": {"method": drafter.capabilities.method},
    }  # fmt: skip
    decoder = SpeculativeDecoder(tiny.target, config, drafter, compile_cache=tiny.compile_cache)
    broken, *others = [decoder.submit(prompt, SamplingParams(10)) for prompt in ([(bad_id + 1) % VOCAB_SIZE], *prompts)]
    while broken.is_prefilling:
        decoder.step()
    broken.token_ids[-1], broken.draft_ids = bad_id, ()  # as if it had been sampled
    while decoder.scheduler.has_work:
        decoder.step()
    assert broken.finish_reason == "error" and decoder.capture_stats().num_replays > 0
    assert [request.output_ids for request in others] == answers
    assert [made.token_ids for made in decoder.generate(prompts, SamplingParams(10), progress=False)] == answers
    assert decoder.pool.num_free == decoder.pool.num_usable


@pytest.mark.parametrize("seed", range(3))
def test_sampled_tokens_are_the_same_with_and_without_captures(tiny: Tiny, seed: int) -> None:
    params = [SamplingParams(10, temperature=1.0, seed=seed + number) for number in range(len(PROMPTS))]
    outputs = []
    for mode in ("none", "full_decode"):
        config = {
            "limits": LIMITS, "capture": {"mode": mode, "executor": "replay"},
            "draft": {"method": "mtp", "sampling": "probabilistic"},
        }  # fmt: skip
        decoder = SpeculativeDecoder(tiny.target, config, tiny.drafters["mtp"], compile_cache=tiny.compile_cache)
        outputs.append([made.token_ids for made in decoder.generate(PROMPTS, params, progress=False)])
        assert (decoder.capture_stats().num_replays > 0) == (mode == "full_decode")
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("mode", ["none", "full_decode"])
def test_fused_decode_rows_give_the_same_tokens_and_prompts_are_not_fused(tiny: Tiny, mode: str) -> None:
    config = {
        "limits": LIMITS, "capture": {"mode": mode, "executor": "replay"}, "numerics": "fast",
        "draft": {"method": "mtp"},
    }  # fmt: skip
    decoder = SpeculativeDecoder(tiny.target, config, tiny.drafters["mtp"], compile_cache=tiny.compile_cache)
    tiny.check_greedy(decoder, PROMPTS, 12)
    assert decoder.proposer is not None
    for model in (decoder.target, *decoder.proposer.models):
        assert "pcp.rms_norm_linear" in model.few_rows.program.source
        assert "pcp.rms_norm_linear" not in model.whole.program.source
    assert (decoder.capture_stats().num_replays > 0) == (mode == "full_decode")


def test_a_batch_that_no_capture_covers_runs_eagerly_and_is_counted_with_the_reason(tiny: Tiny) -> None:
    decoder = make_decoder(tiny, "none", 1)
    assert decoder.captures is not None
    assert decoder.captures.find("target", LiveBatch("decode", 9, 9, 1, 10)) is None
    assert decoder.capture_stats().misses == {"target: more than any decode capture has: requests, rows": 1}


def test_sizes_of_the_user_are_captured_with_the_largest_step(tiny: Tiny) -> None:
    decoder = make_decoder(tiny, "none", 1, sizes=[2], context_buckets=[16])
    assert decoder.captures is not None
    made = {(key.capture_size, key.context_bucket) for key in decoder.captures.keys}
    assert made == {(2, 16), (2, 96), (4, 16), (4, 96)}
    tiny.check_greedy(decoder, PROMPTS, 12)
    hits = decoder.capture_stats().hits
    assert any("context 16" in name for name in hits) and any("context 96" in name for name in hits)


@pytest.mark.parametrize("mode", ["full_decode", "full_and_piecewise"])
def test_captures_have_room_for_rows_that_several_modules_run_again(tiny: Tiny, mode: str) -> None:
    decoder = make_decoder(tiny, "mtp3", 1, mode=mode, sizes=[2, 8])
    tiny.check_greedy(decoder, [*PROMPTS, *PROMPTS[::-1]], 12)
    stats = decoder.capture_stats()
    assert any(name.startswith("draft module 2: window") and "of 6" in name for name in stats.hits)
    assert not {miss for miss in stats.misses if "no prefill capture" not in miss}


def test_rounds_that_no_batch_can_have_are_not_captured(tiny: Tiny) -> None:
    config = {
        "parallel": {"pcp_size": 2, "min_tokens_to_shard": 2, "shard_decode": True}, "limits": LIMITS,
        "draft": {"method": "mtp"}, "capture": {"mode": "full_decode", "executor": "replay"},
    }  # fmt: skip
    decoder = SpeculativeDecoder(tiny.target, config, tiny.drafters["mtp"], compile_cache=tiny.compile_cache)
    assert decoder.captures is not None
    assert {key.phase for key in decoder.captures.keys} == {"draft"}


def test_nothing_is_captured_with_sizes_off_or_an_eager_executor(tiny: Tiny) -> None:
    cases: list[dict[str, Any]] = [{"sizes": []}, {"executor": "eager"}, {"executor": "auto"}, {"mode": "none"}]
    for options in cases:
        decoder = make_decoder(tiny, "none", 1, **options)
        tiny.check_greedy(decoder, PROMPTS[:1], 3)
        assert decoder.capture_stats().num_captures == decoder.capture_stats().num_replays == 0


def test_new_weights_are_captured_again(tiny: Tiny) -> None:
    decoder = make_decoder(tiny, "mtp", 1)
    tiny.check_greedy(decoder, PROMPTS[:2], 6)
    weight = tiny.target.model.layers[0].mlp.down_proj.weight
    before, num_made = weight.detach().clone(), decoder.capture_stats().num_captures
    try:
        tiny.target.model.layers[0].mlp.down_proj.weight = torch.nn.Parameter(before * -1.5, requires_grad=False)
        tiny.forget_answers()
        tiny.check_greedy(decoder, PROMPTS[:2], 6)
        assert decoder.capture_stats().num_captures > num_made
    finally:
        tiny.target.model.layers[0].mlp.down_proj.weight = weight
        tiny.forget_answers()


def test_pieces_of_old_weights_are_given_up(tiny: Tiny) -> None:
    decoder = make_decoder(tiny, "mtp", 2, mode="piecewise")
    tiny.check_greedy(decoder, PROMPTS[:2], 6)
    stats = decoder.capture_stats()
    old, num_made = list(stats.pieces), stats.num_piece_captures
    captures = [weakref.ref(piece.capture) for pieces in old for piece in pieces._held.values()]
    assert captures and len(captures) == num_made
    weight = tiny.target.model.layers[0].mlp.down_proj.weight
    before = weight.detach().clone()
    try:
        with torch.no_grad():
            weight.mul_(-1.5)
        tiny.forget_answers()
        tiny.check_greedy(decoder, PROMPTS[:2], 6)
    finally:
        with torch.no_grad():
            weight.copy_(before)
        tiny.forget_answers()
    assert stats.num_piece_captures > num_made
    gc.collect()
    assert not any(capture() for capture in captures), "memory of captures that no step can replay"


def test_cuda_graphs_without_cuda_are_refused_with_what_is_allowed(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match=r"capture\.executor: got cuda_graph, .* cpu; allowed here: auto, eager, re"):
        make_decoder(tiny, "none", 1, executor="cuda_graph")


def test_a_memory_budget_below_the_largest_capture_is_refused(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SpeculativeDecoder, "_estimate_bytes", lambda _self, key: key.capture_size << 20)
    with pytest.raises(ConfigError, match=r"capture\.memory_mb: got 3, and the largest capture .*>= 4"):
        make_decoder(tiny, "none", 1, memory_mb=3)


# --- the emulator ----------------------------------------------------------------------------------------------------


def capture(function: Any) -> Any:
    return ReplayExecutor().capture(function, "test")


def test_a_replay_reads_its_inputs_anew_and_starts_from_poison() -> None:
    x = torch.ones(3)
    made = capture(lambda: [(x + 1) * 2, x.view(3, 1).expand(3, 2).sum(1)])
    x.fill_(4)
    made.replay()
    assert made.outputs[0].tolist() == [10] * 3 and made.outputs[1].tolist() == [8] * 3


def test_what_a_capture_leaves_unwritten_is_poison_after_a_replay() -> None:
    x = torch.ones(4)
    made = capture(lambda: [torch.ops.aten.empty.memory_format([4]), x + 0])
    made.outputs[0].fill_(1)
    made.replay()
    assert made.outputs[1].tolist() == [1] * 4


def test_host_values_are_those_of_the_capture() -> None:
    x, factor = torch.ones(2), [3]
    made = capture(lambda: [x * factor[0]])
    factor[0] = 5
    made.replay()
    assert made.outputs[0].tolist() == [3, 3]


@pytest.mark.parametrize(
    "function", [lambda x: [x * float(x.sum())], lambda x: [x.nonzero()], lambda x: [x * x.sum().item()]]
)
def test_a_value_read_on_the_host_cannot_be_captured(function: Any) -> None:
    x: Tensor = torch.ones(2)
    with pytest.raises(CaptureError, match=r"test: aten.* on the host"):
        capture(lambda: function(x))


def test_writes_in_place_happen_in_each_replay() -> None:
    x, total = torch.ones(2), torch.zeros(2)
    made = capture(lambda: [total.add_(x)])
    made.replay()
    made.replay()
    assert total.tolist() == [3, 3]


def test_sizes_that_disagree_are_a_fault_of_ours(tiny: Tiny) -> None:
    decoder = make_decoder(tiny, "none", 1)
    form = decoder.target._captured[id(decoder.target.whole.program)].form
    values = {entry.name: entry.allocate(dict.fromkeys(("rows", "requests", "spans", "kv_blocks", "logit_rows"), 2))
              for entry in form.inputs}  # fmt: skip
    values["slots"] = values["slots"][:1]
    with pytest.raises(InvariantError, match="slots has 1 rows, another input 2"):
        form.live_sizes(values)


@pytest.mark.gpu
def test_a_cuda_graph_runs_again_over_new_inputs_and_refuses_reads_on_the_host() -> None:
    x = torch.ones(3, device="cuda")
    executor = GraphExecutor(x.device)
    made = executor.capture(lambda: [(x + 1) * 2], "test")
    x.fill_(4)
    made.replay()
    assert made.outputs[0].tolist() == [10] * 3
    with pytest.raises(CaptureError, match="test: cannot be captured"):
        executor.capture(lambda: [x * float(x.sum())], "test")
