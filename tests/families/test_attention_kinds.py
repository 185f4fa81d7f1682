"""Windows, soft caps, sinks, head sizes: each kind of attention equals its formula, and masks are proven or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.masking_utils import create_chunked_causal_mask

import pcp_compiler
from pcp_compiler import ops
from pcp_compiler.errors import CallError, UnsupportedGraphError
from pcp_compiler.integrations.transformers import attention_forward
from pcp_compiler.pass_api import calls
from pcp_compiler.passes import canonicalize_attention
from tests.families.support import HEADS, Tokens, band, compile_for, heads, make_ids, plain_attention

SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {"kind": "sliding_window", "window": 3},
    "window_of_one": {"kind": "sliding_window", "window": 1},
    "window_past_the_prompt": {"kind": "sliding_window", "window": 1000},
    "soft_cap": {"soft_cap": 0.7},
    "sinks": {"sinks": SINKS},
    "all": {"kind": "sliding_window", "window": 4, "soft_cap": 1.5, "sinks": SINKS},
}


class OurAttention(Tokens):
    """One call of `pcp_compiler.attention`."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.options = options

    def mix(self, x: Tensor) -> Tensor:
        """Attend with the options."""
        return pcp_compiler.attention(*heads(x), layer=0, **self.options)


class WrittenOut(OurAttention):
    """The same by the formula."""

    def mix(self, x: Tensor) -> Tensor:
        """Attend without our op."""
        options = {name: value for name, value in self.options.items() if name not in ("kind", "window")}
        return plain_attention(x, band(x.shape[1], self.options.get("window")), **options)


class Masked(Tokens):
    """SDPA with a mask that `make_mask` makes from the number of tokens."""

    def __init__(self, make_mask: Callable[[int], Tensor]) -> None:
        super().__init__()
        self.make_mask = make_mask

    def mix(self, x: Tensor) -> Tensor:
        """Attend under the mask."""
        q, k, v = (part.transpose(1, 2) for part in heads(x))
        mask = self.make_mask(x.shape[1])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_equals_the_formula_on_one_and_on_three_ranks(kind: str) -> None:
    model, written_out = OurAttention(KINDS[kind]), WrittenOut(KINDS[kind])
    one, three = compile_for(model, 1, batch=2), compile_for(model, 3, batch=2)
    for num_tokens in (2, 5, 7, 64):
        ids = make_ids(num_tokens, batch=2)
        three.check(ids, written_out)
        torch.testing.assert_close(one.run(ids)[0], written_out(ids), rtol=0, atol=1e-12)
        torch.testing.assert_close(model(ids), written_out(ids), rtol=0, atol=1e-12)


def test_values_may_have_another_head_size_than_keys() -> None:
    class Latent(Tokens):
        def mix(self, x: Tensor) -> Tensor:
            q, k, v = heads(x)
            return pcp_compiler.attention(q, k, v[..., :5], layer=0)

    compiled = compile_for(Latent(), 3)
    compiled.check(make_ids(17))
    assert compiled.run(make_ids(4))[0].shape == (1, 4, HEADS, 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "chunked"}, "kind is 'chunked'; allowed: full, sliding_window"),
        ({"window": 4}, "window is 4 and kind is 'full'; pass kind='sliding_window'"),
        ({"kind": "sliding_window"}, "window is None; allowed .* an integer >= 1"),
        ({"kind": "sliding_window", "window": True}, "window is True"),
        ({"kind": "sliding_window", "window": 0}, "window is 0"),
        ({"soft_cap": 0.0}, "soft_cap is 0.0; allowed: a number > 0"),
        ({"sinks": torch.zeros(3)}, r"sinks has shape \(3,\); allowed: one score a head, \(4,\)"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedGraphError, match=f"attention of layer 0: {message}"):
        OurAttention(options)(make_ids(4))


def test_heads_that_do_not_divide_are_refused() -> None:
    q, k, _ = heads(torch.zeros(1, 4, 32))
    with pytest.raises(UnsupportedGraphError, match="q has 3 heads and k 2; allowed: a multiple"):
        pcp_compiler.attention(q[:, :, :3], k, k, layer=0)


# -- masks that are proven, or not -------------------------------------------------------------------------------------


def rows_behind(num_tokens: int) -> Tensor:
    return torch.arange(num_tokens)[:, None] - torch.arange(num_tokens)


def additive(seen: Tensor) -> Tensor:
    return torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float64).min)


PROVEN: dict[str, tuple[Callable[[int], Tensor], int | None]] = {
    "causal": (lambda t: rows_behind(t) >= 0, None),
    "less_than": (lambda t: (rows_behind(t) >= 0) & (rows_behind(t) < 7), 7),
    "at_most": (lambda t: (rows_behind(t) >= 0) & (rows_behind(t) <= 7), 8),
    "window_of_100": (lambda t: (rows_behind(t) >= 0) & (rows_behind(t) < 100), 100),
    "additive": (lambda t: additive((rows_behind(t) >= 0) & (rows_behind(t) < 70)), 70),
    "window_in_a_tensor": (lambda t: (rows_behind(t) >= 0) & (rows_behind(t) < torch.tensor(90)), 90),
    "longest_that_is_proven": (lambda t: (rows_behind(t) >= 0) & (rows_behind(t) < 4096), 4096),
}


@pytest.mark.parametrize("name", PROVEN)
def test_a_mask_that_is_a_window_is_proven_and_recorded_to_the_row(name: str) -> None:
    make_mask, window = PROVEN[name]
    compiled = compile_for(Masked(make_mask), 2)
    assert compiled.attentions() == [("full" if window is None else "sliding_window", window)]
    assert not any(node.args[3] for node in calls(compiled.graph_module, ops.ATTENTION))
    compiled.check(make_ids(129))


def chunks(num_tokens: int, size: int) -> Tensor:
    chunk = torch.arange(num_tokens) // size
    return (rows_behind(num_tokens) >= 0) & (chunk[:, None] == chunk)


def window_that_grows(num_tokens: int) -> Tensor:
    behind = rows_behind(num_tokens)
    return (behind >= 0) & torch.where(torch.arange(num_tokens)[:, None] < 90, behind < 9, behind < 20)


NOT_CAUSAL = "its mask is not the causal one"
REFUSED: dict[str, tuple[Callable[[int], Tensor], str]] = {
    "one_row_ahead": (lambda t: rows_behind(t) >= -1, NOT_CAUSAL),
    "without_itself": (lambda t: rows_behind(t) > 0, NOT_CAUSAL),
    "chunks": (lambda t: chunks(t, 8), NOT_CAUSAL),
    "chunks_of_100": (lambda t: chunks(t, 100), NOT_CAUSAL),
    "dilated": (lambda t: (rows_behind(t) >= 0) & (rows_behind(t) % 2 == 0), NOT_CAUSAL),
    "first_tokens_stay": (
        lambda t: (rows_behind(t) >= 0) & ((rows_behind(t) < 50) | (torch.arange(t) < 2)),
        NOT_CAUSAL,
    ),
    "window_that_grows": (window_that_grows, NOT_CAUSAL),
    "scores_are_added": (lambda t: -rows_behind(t).abs().double(), NOT_CAUSAL),
    "too_long_to_prove": (
        lambda t: (rows_behind(t) >= 0) & (rows_behind(t) < 5000),
        "(?s)computed with 5000.*attn_implementation='pcp_spec'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_mask_that_is_neither_causal_nor_a_window_is_refused(name: str) -> None:
    make_mask, message = REFUSED[name]
    with pytest.raises(UnsupportedGraphError, match=message):
        compile_for(Masked(make_mask), 2)


def test_a_mask_that_layers_share_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[str] = []
    evaluate = canonicalize_attention._evaluate

    def count(needed: Any, mask: Any, *args: Any, **kwargs: Any) -> Tensor:
        computed.append(mask.name)
        return evaluate(needed, mask, *args, **kwargs)

    monkeypatch.setattr(canonicalize_attention, "_evaluate", count)
    compiled = compile_for(gemma(num_layers=4), 2)
    window, full = ("sliding_window", 4), ("full", None)
    assert compiled.attentions() == [window, full, window, full]
    masks = set(computed)
    assert len(masks) == 2
    lengths = len(canonicalize_attention.PROOF_LENGTHS)
    assert all(lengths <= computed.count(mask) <= lengths + 4 for mask in masks)


# -- models of transformers --------------------------------------------------------------------------------------------


def tiny(config_class: Any, attention: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    config = config_class(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        num_hidden_layers=options.pop("num_layers", 2), initializer_range=0.2, **options,
    )  # fmt: skip
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)  # type: ignore[no-untyped-call]
    return model.double().eval().requires_grad_(False)


def gemma(attention: str = "sdpa", *, window: int = 4, num_layers: int = 2) -> nn.Module:
    """Return a Gemma3 whose layers have a window and none in turn."""
    kinds = ["sliding_attention", "full_attention"] * (num_layers // 2)
    return tiny(
        transformers.Gemma3TextConfig, attention, sliding_window=window, num_layers=num_layers, layer_types=kinds
    )


@pytest.mark.parametrize("attention", ["sdpa", "pcp_spec"])
def test_sliding_layers_keep_their_window_next_to_full_ones(attention: str) -> None:
    """A mask that is thrown away makes the sliding layers full, and a window that is one off hides one row too many."""
    compiled = compile_for(gemma(attention), 2)
    assert compiled.attentions() == [("sliding_window", 4), ("full", None)]
    compiled.check(make_ids(16), gemma("eager"), tolerance=1e-5)
    got = compiled.run(make_ids(16))[0]
    for other in (3, 5, 16):
        assert (gemma("eager", window=other)(make_ids(16), use_cache=False).logits - got).abs().max() > 1e-3


def test_a_long_window_is_taken_from_the_layer_when_the_mask_moves_with_it() -> None:
    compiled = compile_for(tiny(transformers.MistralConfig, "pcp_spec", sliding_window=8192), 2)
    assert compiled.attentions() == [("sliding_window", 8192)] * 2
    compiled.check(make_ids(40), tiny(transformers.MistralConfig, "eager", sliding_window=8192), tolerance=1e-5)
    with pytest.raises(UnsupportedGraphError, match=r"computed with 8192.*\n.*\n.*attn_implementation='pcp_spec'"):
        compile_for(tiny(transformers.MistralConfig, "sdpa", sliding_window=8192), 2)


@pytest.mark.parametrize("chunk", [8, 5000])
@pytest.mark.parametrize("claims_window", [True, False])
def test_a_chunked_mask_of_the_interface_does_not_become_causal(chunk: int, claims_window: bool) -> None:
    settings = transformers.Llama4TextConfig(attention_chunk_size=chunk)
    settings._attn_implementation = "pcp_spec"

    class Chunked(Tokens):
        def mix(self, x: Tensor) -> Tensor:
            q, k, v = (part.transpose(1, 2) for part in heads(x))
            mask = create_chunked_causal_mask(settings, x, None, None)
            return attention_forward(self, q, k, v, mask, sliding_window=chunk if claims_window else None)[0]

    with pytest.raises(UnsupportedGraphError, match="not the causal one" if chunk == 8 or claims_window else "5000"):
        compile_for(Chunked(), 2)


def test_a_window_without_a_mask_that_has_it_is_refused() -> None:
    q, k, v = (part.transpose(1, 2) for part in heads(torch.zeros(1, 4, 32)))
    with pytest.raises(UnsupportedGraphError, match="sliding_window is 4, and the model made no mask with that window"):
        attention_forward(nn.Module(), q, k, v, None, sliding_window=4)


@pytest.mark.parametrize("attention", ["sdpa", "pcp_spec"])
def test_rows_of_a_zigzag_rank_are_not_taken_for_packed_documents(attention: str) -> None:
    """Rank 0 of two runs rows 0, 1, 6, 7 of eight; transformers reads a gap in positions as the start of a document."""
    model = tiny(transformers.LlamaConfig, attention)
    ids = make_ids(8)
    rows = torch.tensor([[0, 1, 6, 7]])
    shard = model(ids[:, rows[0]], position_ids=rows, use_cache=False).logits
    alone = model(ids[:, 6:], position_ids=rows[:, 2:], use_cache=False).logits
    torch.testing.assert_close(shard[:, 2:], alone, rtol=0, atol=1e-12)  # eager does read it so
    compiled = compile_for(model, 2)
    record = compiled.check(ids, tiny(transformers.LlamaConfig, "eager"), tolerance=1e-5)
    assert record.rows_per_rank == (4, 4)


def test_causal_rows_are_aligned_by_their_place_in_the_prompt_not_by_a_corner() -> None:
    """Two query rows over five keys: torch's is_causal lets the first row see the first key only."""
    q, k, v = heads(torch.randn(1, 5, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    whole = ops.attention(q, k, v, None, None, layer=0, kind="full", scale=1.0)
    rows = torch.tensor([3, 4])
    part = ops.attention(q[:, rows], k, v, None, rows, layer=0, kind="full", scale=1.0)
    torch.testing.assert_close(part, whole[:, rows], rtol=0, atol=1e-12)
    q, k, v = (x.transpose(1, 2) for x in (q[:, rows], k, v))
    corner = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0, enable_gqa=True)
    assert (corner.transpose(1, 2) - part).abs().max() > 1e-3


@pytest.mark.parametrize("attention", ["sdpa", "pcp_spec"])
def test_every_sharded_attention_gets_the_rows_of_its_queries(attention: str) -> None:
    graph = compile_for(gemma(attention), 3).graph_module
    index = [node.args[4] for node in calls(graph, ops.ATTENTION)]
    assert len(index) == 2
    assert all(getattr(node, "meta", {}).get("index_input") == "local_rows" for node in index)


def test_a_padding_mask_next_to_windows_must_be_all_ones() -> None:
    model, ids = gemma("pcp_spec"), make_ids(16)
    compiled = pcp_compiler.compile(model, {"parallel": {"pcp_size": 2}})
    flags = torch.ones_like(ids)
    got = compiled(ids, attention_mask=flags, use_cache=False).logits
    torch.testing.assert_close(got, gemma("eager")(ids, use_cache=False).logits, rtol=0, atol=1e-5)
    flags[0, 0] = 0
    with pytest.raises(CallError, match="attention_mask: a padding mask that hides tokens is not supported"):
        compiled(ids, attention_mask=flags, use_cache=False)
    pcp_compiler.assert_sharded(compiled, calls=1, pcp_size=2)
