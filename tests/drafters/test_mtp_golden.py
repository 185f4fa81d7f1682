"""The MTP drafter of SmolLM2 against its golden file, and from the real target on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pcp_compiler import ops
from pcp_compiler.drafters.load import load_drafter
from pcp_compiler.drafters.mtp import MTPDrafter, MTPModule
from pcp_compiler.trace import trace_module


@pytest.fixture(scope="module", autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


@pytest.fixture
def module(smollm2_target: Any, smollm2_mtp: Path) -> MTPModule:
    drafter = load_drafter(smollm2_target, {"method": "mtp", "model": str(smollm2_mtp), "num_speculative_tokens": 5})
    assert isinstance(drafter, MTPDrafter)
    return drafter.module_of_step(0)


def assert_near(found: Tensor, wanted: Tensor, of_max: float) -> None:
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() <= of_max * wanted.abs().max()


def run_rows(module: MTPModule, golden: dict[str, Tensor], cache: AbstractContextManager[Any]) -> Tensor:
    """Return u of rows 0 to 64, fed with the golden hidden states."""
    with cache:
        rows: Tensor = module(golden["tokens"][None, 1:], golden["target_hidden"][None], golden["positions"][None])
    return rows


def draft_chain(module: MTPModule, first: Tensor, position: int, cache: Any) -> tuple[list[int], list[Tensor]]:
    """Return five greedy drafts and their hidden states, one row a step, from the last row of the first pass."""
    tokens, states = [], [first]
    for step in range(5):
        tokens.append(int(module.compute_logits(states[-1]).argmax()))
        if step < 4:
            with cache:
                states.append(
                    module(torch.tensor([[tokens[-1]]]), states[-1], torch.tensor([[position + 1 + step]]))
                )  # fmt: skip
    return tokens, states


def test_every_golden_row_is_met_from_golden_inputs(module: MTPModule, golden: dict[str, Tensor]) -> None:
    rows = run_rows(module, golden, nullcontext())[0]
    top = module.compute_logits(rows).topk(5)
    assert_near(module.embed_tokens(golden["tokens"][1:]), golden["token_embeddings"], 1e-4)
    assert_near(rows, golden["row_hidden"], 1e-4)
    assert_near(top.values, golden["row_top5_logits"], 1e-4)
    assert torch.equal(top.indices, golden["row_top5_ids"])


def test_a_chain_with_growing_key_and_value_rows_is_the_golden_chain(
    module: MTPModule, golden: dict[str, Tensor], growing_kv: Any
) -> None:
    first = run_rows(module, golden, growing_kv)[:, -1:]
    tokens, states = draft_chain(module, first, int(golden["positions"][-1]), growing_kv)
    hidden = torch.cat(states, dim=1)[0]
    top = module.compute_logits(hidden).topk(5)
    assert growing_kv.num_calls == 5
    assert growing_kv.rows[30][0].shape[1] == 65 + 4
    assert tokens == golden["chain_tokens"].tolist()
    assert golden["chain_positions"].tolist() == list(range(64, 69))
    assert_near(module.embed_tokens(torch.tensor(tokens[:4])), golden["chain_embeddings"], 1e-4)
    assert_near(hidden, golden["chain_hidden"], 1e-4)
    assert_near(top.values, golden["chain_top5_logits"], 1e-4)
    assert torch.equal(top.indices, golden["chain_top5_ids"])


def test_rows_in_two_chunks_are_the_rows_of_one_pass(
    module: MTPModule, golden: dict[str, Tensor], growing_kv: Any
) -> None:
    ids, hidden, positions = golden["tokens"][None, 1:], golden["target_hidden"][None], golden["positions"][None]
    with growing_kv:
        chunks = [module(ids[:, s], hidden[:, s], positions[:, s]) for s in (slice(0, 23), slice(23, 65))]
    assert_near(torch.cat(chunks, dim=1)[0], golden["row_hidden"], 1e-4)


def test_the_golden_chain_follows_from_the_real_target(
    module: MTPModule, smollm2_target: Any, golden: dict[str, Tensor], growing_kv: Any
) -> None:
    hidden = smollm2_target.model(input_ids=golden["tokens"][None, :-1], use_cache=False).last_hidden_state
    assert_near(hidden[0], golden["target_hidden"], 1e-3)
    with growing_kv:
        rows = module(golden["tokens"][None, 1:], hidden, golden["positions"][None])
    tokens, states = draft_chain(module, rows[:, -1:], 64, growing_kv)
    assert_near(rows[0], golden["row_hidden"], 1e-3)
    assert tokens == golden["chain_tokens"].tolist()
    assert_near(torch.cat(states, dim=1)[0], golden["chain_hidden"], 1e-3)


def test_the_token_at_position_zero_is_not_seen_wherever_its_row_lies(
    module: MTPModule, golden: dict[str, Tensor]
) -> None:
    ids, hidden = golden["tokens"][None, 1:5], golden["target_hidden"][None, :4]
    other_ids = ids.clone()
    other_ids[0, 2] += 1
    for positions, is_seen in (([5, 6, 0, 1], False), ([0, 1, 2, 3], True)):
        rows = [module(x, hidden, torch.tensor([positions]))[0, 2] for x in (ids, other_ids)]
        assert torch.equal(*rows) is not is_seen


def test_a_first_row_that_is_not_position_zero_keeps_its_token(module: MTPModule, golden: dict[str, Tensor]) -> None:
    ids, hidden, positions = torch.tensor([[100], [200]]), golden["target_hidden"][:1, None].repeat(2, 1, 1), 7
    first, second = module(ids, hidden, torch.full((2, 1), positions))
    assert not torch.allclose(first, second)


def test_embedding_and_output_matrix_are_the_targets(module: MTPModule, smollm2_target: Any) -> None:
    assert module.embed_tokens is smollm2_target.get_input_embeddings()
    assert module.shared_head.head is smollm2_target.lm_head
    own = {id(p): p for p in module.parameters()} | {}
    del own[id(smollm2_target.lm_head.weight)]
    assert sum(p.numel() for p in own.values()) == 4_205_376
    assert not any(p.requires_grad for p in own.values())
    assert smollm2_target.lm_head.weight.requires_grad


def test_one_trace_serves_every_length_and_holds_one_attention_call(
    module: MTPModule, golden: dict[str, Tensor]
) -> None:
    full = (golden["tokens"][None, 1:], golden["target_hidden"][None], golden["positions"][None])
    traced = trace_module(module, full, tokens={"next_ids": 1, "hidden": 1, "positions": 1})
    graph_module = traced.trace.graph_module
    assert len(graph_module.graph.find_nodes(op="call_function", target=ops.ATTENTION)) == 1
    for length in (1, 9, 65):
        args = tuple(x[:, :length] for x in full)
        found = traced.rebuild(graph_module(*traced.flat_inputs(args, {})))
        assert_near(found, module(*args), 1e-5)
