"""What target and drafter may know of each other: the contracts of the two draft modes, configs, caches of ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from pcp_compiler.config import load_config
from pcp_compiler.drafters import load
from pcp_compiler.drafters.base import Drafter
from pcp_compiler.runtime.decoder import SpeculativeDecoder
from pcp_compiler.runtime.layout import StepIndex
from pcp_compiler.runtime.sampling import SamplingParams
from tests.runtime.tiny import LENGTHS, Tiny, make_prompt, record_steps

PROMPTS = [make_prompt(length) for length in LENGTHS]
NUM_NEW = 8


def spy_on_runs(decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Tensor]]:
    """Return a list that grows by everything that a run of the drafter over all rows is given."""
    seen: list[dict[str, Tensor]] = []
    model = decoder.proposer.models[0]  # type: ignore[union-attr]
    run = model.run_whole

    def record(inputs: Mapping[str, Tensor], index: Mapping[str, Tensor], *args: Any, **options: Any) -> Any:
        seen.append({name: value.clone() for name, value in {**inputs, **index}.items()})
        return run(inputs, index, *args, **options)

    monkeypatch.setattr(model, "run_whole", record)
    return seen


def test_a_replicated_drafter_is_given_what_it_is_given_on_one_rank(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []
    for pcp_size in (1, 4):
        decoder = tiny.decoder("mtp", pcp_size, mode="replicated", limits={"prefill_chunk": 9})
        runs.append(spy_on_runs(decoder, monkeypatch))
        tiny.check_greedy(decoder, PROMPTS, NUM_NEW)
    assert decoder.target.counts.num_sharded > 0
    assert len(runs[0]) == len(runs[1]) > 20
    for alone, restored in zip(*runs, strict=True):
        assert alone.keys() == restored.keys()
        for name, value in alone.items():
            tolerance = 1e-9 if value.is_floating_point() else 0
            torch.testing.assert_close(restored[name], value, rtol=0, atol=tolerance, msg=name)


def poison_index(decoder: SpeculativeDecoder, index: Any) -> None:
    """Overwrite every index tensor of the target's step."""
    for tensors in (index.whole, *index.ranks):
        for value in tensors.values():
            value.fill_(-7)


def poison_caches(decoder: SpeculativeDecoder, index: Any) -> None:
    """Overwrite the K/V of all layers of the target."""
    for caches in decoder.target.caches:
        for cache in caches.values():
            cache.fill_(float("nan"))


@pytest.mark.parametrize(
    ("mode", "poison"),
    [("replicated", poison_index), ("replicated", poison_caches), ("sharded", poison_caches)],
)
def test_poisoning_the_targets_buffers_before_the_drafter_runs_changes_no_draft(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, mode: str, poison: Callable[..., None]
) -> None:
    decoder = tiny.decoder("mtp", 4, mode=mode, limits={"prefill_chunk": None, "max_num_tokens": 200})
    run = decoder._run_target

    def run_and_poison(batch: Any, index: Any) -> Any:
        results = run(batch, index)
        poison(decoder, index)
        return results

    monkeypatch.setattr(decoder, "_run_target", run_and_poison)
    requests = [decoder.submit(prompt, SamplingParams(NUM_NEW)) for prompt in PROMPTS]
    decoder.step()
    assert tiny.check_drafts("mtp", requests) == 3 * len(PROMPTS)


def test_poisoned_index_tensors_do_reach_a_sharded_drafter_which_shares_them(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = tiny.decoder("mtp", 4, mode="sharded")
    steps = record_steps(decoder, monkeypatch)
    given = []
    model = decoder.proposer.models[0]  # type: ignore[union-attr]
    run = model.run_sharded

    def record(inputs: Any, index: StepIndex) -> Any:
        given.append(index)
        return run(inputs, index)

    monkeypatch.setattr(model, "run_sharded", record)
    decoder.submit(PROMPTS[1], SamplingParams(NUM_NEW))
    decoder.step()
    assert len(given) == 1 and given[0] is steps[0][1], "the target's metadata is reused, not built again"


def test_only_restored_hidden_states_cross_to_a_replicated_drafter(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut to the real rows, in global order, for prompts, decodes and both at once."""
    decoder = tiny.decoder("mtp", 4, mode="replicated", limits={"prefill_chunk": 9})
    proposer = decoder.proposer
    assert proposer is not None
    propose = proposer.propose
    checked = []

    def check(step: Any, sampled: Any, *args: Any) -> Any:
        hidden = sampled.hidden[0]
        assert all(torch.equal(other, hidden) for other in sampled.hidden)
        assert hidden.shape[1] == step.batch.num_tokens
        for i, rows in enumerate(step.rows):
            request, start = rows.request, int(step.batch.computed[i])
            tokens = [*request.token_ids, *request.draft_ids][: start + rows.query_len]
            wanted = tiny.target.model(input_ids=torch.tensor([tokens]), use_cache=False).last_hidden_state
            row = int(step.batch.query_start[i])
            torch.testing.assert_close(hidden[0, row : row + rows.query_len], wanted[0, start:], rtol=0, atol=1e-9)
            checked.append(rows.query_len)
        return propose(step, sampled, *args)

    monkeypatch.setattr(proposer, "propose", check)
    tiny.check_greedy(decoder, PROMPTS[:4], 4)
    assert {1, 9} <= set(checked)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize(("mode", "shard_decode"), [("sharded", False), ("replicated", False), ("sharded", True)])
def test_every_rank_has_the_whole_cache_slot_by_slot(
    tiny: Tiny, mode: str, shard_decode: bool, kv_cache_dtype: str
) -> None:
    limits = {"prefill_chunk": 9, "kv_cache_dtype": kv_cache_dtype}
    decoder = tiny.decoder("mtp", 4, mode=mode, parallel={"shard_decode": shard_decode}, limits=limits, kv="per_rank")
    for prompt in PROMPTS:
        decoder.submit(prompt, SamplingParams(NUM_NEW))
    while decoder.scheduler.has_work:
        decoder.step()
    models = [decoder.target, *decoder.proposer.models]  # type: ignore[union-attr]
    for model in models:
        assert len(model.caches) == 4
        for role, cache in model.caches[0].items():
            assert cache[:-1].any(), f"{role} was never written"
            assert not cache[: decoder.pool.block_size].any(), "block 0 was written"
            for other in model.caches[1:]:
                assert torch.equal(other[role][:-1], cache[:-1]), f"{model.name}: {role} differs between ranks"


def test_a_drafter_sees_its_own_config_and_the_targets_stays_as_it_was(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Mapping[str, Any]] = []

    def spy(parts: Any, draft: Mapping[str, Any]) -> Drafter:
        seen.append(copy.deepcopy(dict(draft)))
        return tiny.drafters["mtp"]

    monkeypatch.setitem(load.LOADERS, "mtp", spy)
    options = {
        "parallel": {"pcp_size": 4}, "limits": {"kv_blocks": 64, "kv_block_size": 4},
        "attention": {"backend_per_kind": {"full": "sdpa"}},
        "draft": {"method": "mtp", "model": "some/folder", "attention_backend": "sdpa_prefix",
                  "backend_per_kind": {"full": "sdpa_prefix"}},
    }  # fmt: skip
    before, model_before = load_config(options), tiny.target.config.to_dict()
    decoder = SpeculativeDecoder(tiny.target, options, compile_cache=tiny.compile_cache)
    (drafted,) = seen
    assert drafted["mode"] == "replicated" and drafted["attention_backend"] == "sdpa_prefix"
    assert drafted["model"] == "some/folder"
    assert decoder.plan is not None
    assert decoder.plan.draft_config.parallel.pcp_size == 1
    assert decoder.config == before and decoder.config.parallel.pcp_size == 4
    assert decoder.config.attention.backend_per_kind.full == "sdpa"
    assert tiny.target.config.to_dict() == model_before
    assert tiny.target.config._attn_implementation == "sdpa"
