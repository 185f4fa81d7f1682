"""Every attention backend against the reference in float64, and whole generations with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from pcp_compiler import kv_formats
from pcp_compiler.errors import UnsupportedGraphError
from pcp_compiler.kv_ops import PAGED_ATTENTION
from pcp_compiler.plan.capabilities import AttentionCapabilities, AttentionNeeds, find_backend, load_records
from pcp_compiler.runtime.decoder import SpeculativeDecoder
from pcp_compiler.runtime.sampling import SamplingParams
from tests.runtime.tiny import make_prompt, make_target

if not torch.cuda.is_available():
    from tests.kernels.interpreter_repairs import repaired_interpreter

    @pytest.fixture(scope="module", autouse=True)
    def interpreter() -> Iterator[None]:
        """Let kernels run on this machine."""
        with repaired_interpreter():
            yield


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RECORDS = [record for record in load_records() if DEVICE in record.priorities and record.missing is None]
BLOCK_SIZE = 4
TABLES = torch.tensor([[7, 2, 9, 4], [3, 8, 5, 6], [1, 10, -1, -1]], dtype=torch.int32, device=DEVICE)
ROWS = {
    "mixed": [[0, 0, 5, 13], [1, 5, 1, 16], [2, 6, 2, 7]],
    "zigzag": [[0, 0, 3, 3], [0, 3, 3, 12], [2, 6, 1, 5]],
    "decode": [[0, 0, 1, 13], [1, 1, 1, 16], [2, 2, 1, 5]],
    "padded": [[1, 0, 4, 9], [0, 4, 0, 0], [0, 4, 0, 0]],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {}, "window": {"window": 3}, "soft_cap": {"soft_cap": 2.0},
    "sinks": {"sinks": torch.tensor([0.3, -0.2, 1.0, 0.0], device=DEVICE)},
}  # fmt: skip


def dtype_of(record: AttentionCapabilities) -> torch.dtype:
    """Return the widest type that a backend takes."""
    name = next(name for name in ("float64", "float32", "bfloat16") if name in record.dtypes)
    return getattr(torch, name)  # type: ignore[no-any-return]


def attend(
    name: str, dtype: torch.dtype, spans: list[list[int]], options: dict[str, Any], *, has_fp8_kv: bool = False
) -> Tensor:
    """Return 8 rows attending to random K/V; slots that no span may read hold NaN."""
    generator = torch.Generator().manual_seed(0)
    caches = [torch.randn(11 * BLOCK_SIZE + 1, 2, 16, generator=generator).to(torch.bfloat16) for _ in range(2)]
    q = torch.randn(1, 8, 4, 16, generator=generator).to(torch.bfloat16).to(DEVICE, dtype)
    caches = [cache.to(DEVICE, dtype) for cache in caches]
    seen = torch.zeros(len(caches[0]), dtype=torch.bool)
    for request, _, num_rows, seq_len in spans:
        for position in range(seq_len if num_rows else 0):
            seen[int(TABLES[request, position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE] = True
    for cache in caches:
        cache[~seen.to(DEVICE)] = float("nan")
    if has_fp8_kv:
        caches = [as_fp8(cache) for cache in caches]
    options = {key: value.to(dtype) if isinstance(value, Tensor) else value for key, value in options.items()}
    return PAGED_ATTENTION(  # type: ignore[no-any-return]
        q, q.new_empty(0), *caches, torch.tensor(spans, device=DEVICE), TABLES, block_size=BLOCK_SIZE, layer=0,
        scale=0.3, backend=name, **options,
    )  # fmt: skip


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_a_backend_gives_what_the_reference_gives_in_float64(
    record: AttentionCapabilities, rows: str, option: str
) -> None:
    needs = AttentionNeeds(
        "full", pcp=rows == "zigzag", device=DEVICE, soft_cap=option == "soft_cap", sinks=option == "sinks"
    )
    if record.find_gaps(needs):
        pytest.skip(f"{record.name} does not claim it")
    dtype = dtype_of(record)
    out = attend(record.name, dtype, ROWS[rows], OPTIONS[option])
    expected = attend("sdpa", torch.float64, ROWS[rows], OPTIONS[option])
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    live = sum(span[2] for span in ROWS[rows])
    assert (out[0, live:] == 0).all()


def as_fp8(cache: Tensor) -> Tensor:
    """Return a cache with the same rows in eight bits."""
    shape, dtype = kv_formats.cache_shape(tuple(cache.shape[1:]), kv_formats.FP8)
    packed = torch.zeros(len(cache), *shape, dtype=dtype, device=cache.device)
    kv_formats.write_rows(packed, torch.arange(len(cache), device=cache.device), cache)
    return packed


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("record", [record for record in RECORDS if record.fp8_kv], ids=lambda record: record.name)
def test_a_backend_that_claims_fp8_reads_rows_with_their_scales(record: AttentionCapabilities, rows: str) -> None:
    if record.find_gaps(AttentionNeeds("full", pcp=rows == "zigzag", device=DEVICE)):
        pytest.skip(f"{record.name} does not claim it")
    dtype = dtype_of(record)
    out = attend(record.name, dtype, ROWS[rows], {}, has_fp8_kv=True)
    expected = attend("sdpa", torch.float64, ROWS[rows], {}, has_fp8_kv=True)
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    exact = attend("sdpa", torch.float64, ROWS[rows], {})
    assert 1e-4 < (out.double() - exact).abs().max() < 0.2, "eight bits were not read, or read wrongly"


@pytest.fixture(scope="module")
def target() -> Any:
    return make_target(hidden_size=64).to(DEVICE, torch.float32)  # type: ignore[arg-type]


@pytest.mark.parametrize("pcp_size", [1, 2])
@pytest.mark.parametrize("name", [record.name for record in RECORDS if "float32" in record.dtypes])
def test_generations_with_a_backend_are_those_of_the_eager_model(target: Any, name: str, pcp_size: int) -> None:
    if not find_backend(name).capabilities.supports_pcp and pcp_size > 1:
        pytest.skip(f"{name} does not claim PCP rows")
    config = {
        "parallel": {"pcp_size": pcp_size, "min_tokens_to_shard": 2}, "attention": {"backend": name},
        "limits": {"kv_blocks": 64, "kv_block_size": 4, "prefill_chunk": 8},
    }  # fmt: skip
    decoder = SpeculativeDecoder(target, config, tie_margin=0)
    used = {node.kwargs["backend"] for node in decoder.target.whole.program.graph_module.graph.nodes
            if node.target is PAGED_ATTENTION}  # fmt: skip
    assert used == {name}
    prompts = [make_prompt(length) for length in (13, 3)]
    made = decoder.generate(prompts, SamplingParams(5), progress=False)
    for prompt, generation in zip(prompts, made, strict=True):
        ids = torch.tensor([[*prompt, *generation.token_ids]], device=DEVICE)
        with torch.no_grad():
            best = target(input_ids=ids, use_cache=False).logits[0].argmax(-1).tolist()
        assert generation.token_ids == best[len(prompt) - 1 : -1]


def test_a_layer_that_its_backend_cannot_run_is_refused_with_what_is_missing(target: Any) -> None:
    record = dataclasses.replace(find_backend("sdpa_prefix").capabilities, dtypes=frozenset(["float16"]))
    assert record.find_gaps(AttentionNeeds("full", dtype="float32")) == ("dtype float32",)
    with pytest.raises(UnsupportedGraphError, match=r"(?s)attention.backend: varlen cannot run .*set attention.back"):
        SpeculativeDecoder(target, {"attention": {"backend": "varlen"}, "limits": {"kv_blocks": 64}})


def test_the_choice_of_each_layer_is_in_the_decisions(target: Any) -> None:
    decoder = SpeculativeDecoder(target, {"limits": {"kv_blocks": 64}})
    notes = decoder.target.whole.decisions.entries["attention backend"]
    best = min(RECORDS, key=lambda record: record.priorities[DEVICE]).name
    assert notes[0].startswith(f"layer 0, kind full: {best} (automatic; ")
    assert "varlen has no" in notes[0]
