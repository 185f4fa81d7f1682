"""A part of the support matrix, small enough for every run: all families, few ranks and lengths."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.matrix import families
from tests.matrix.cells import check_torch_compile, distance, make_ids, run_variant
from tests.matrix.families import FLOAT32, VARIANTS, Variant

MUST_BE_EQUAL = {
    "pcp_spec": {"Llama", "Qwen3", "Gemma3", "GPT-OSS", "Mixtral", "Qwen3-MoE", "GLM-4-MoE-Lite", "DeepSeek-V3"},
    "sdpa": {"Llama", "Qwen3", "Gemma3", "DeepSeek-V3"},
}


REDUCED = [
    variant for variant in VARIANTS
    if variant.refusal is not None
    or (variant.attention == "pcp_spec" and variant.experts != "batched_mm" and variant.dtype != torch.float16)
    or variant.name in ("Gemma3 sdpa float64", "DeepSeek-V3 sdpa grouped_mm float32")
]  # fmt: skip
"""Left to `make matrix`: what differs from one of these in the attention or the experts alone."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Run on one thread, which is faster for models of this size."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("variant", REDUCED, ids=lambda variant: variant.name.replace(" ", "-"))
def test_a_family_is_equal_to_eager_on_three_ranks_or_refused(variant: Variant) -> None:
    result = run_variant(variant, (3,), lambda pcp_size: (0, 1, 2, 5, 19))
    assert result.fault is None
    assert len(result.cells) == 5


@pytest.mark.parametrize("name", ["Gemma3 pcp_spec float64", "Mixtral pcp_spec grouped_mm float32"])
def test_a_family_is_equal_to_eager_through_torch_compile(name: str) -> None:
    variant = next(variant for variant in VARIANTS if variant.name == name)
    cells = list(check_torch_compile(variant, 2, (19, 5)))
    assert [cell.outcome for cell in cells] == ["equal"] * 2, cells


@pytest.mark.parametrize("attention", MUST_BE_EQUAL)
def test_the_matrix_holds_every_family_that_must_be_equal(attention: str) -> None:
    held = {variant.family for variant in VARIANTS if variant.attention == attention and variant.refusal is None}
    assert held >= MUST_BE_EQUAL[attention]


@pytest.mark.parametrize("family", families.MOE)
def test_the_matrix_holds_every_way_to_run_experts(family: str) -> None:
    held = {(v.experts, v.dtype, v.tolerance) for v in VARIANTS if v.family == family and v.attention == "pcp_spec"}
    assert held >= {
        ("batched_mm", torch.float64, 1e-6),
        ("grouped_mm", FLOAT32, 1e-5),
        ("pcp_spec", torch.float64, 1e-6),
    }


@pytest.mark.parametrize(
    ("family", "change"),
    [("Gemma3", {"sliding_window": families.WINDOW + 1}), ("GPT-OSS", {"swiglu_limit": 0.5}),
     ("Gemma2", {"attn_logit_softcapping": 3.0}), ("DeepSeek-V3", {"routed_scaling_factor": 1.5})],
)  # fmt: skip
def test_the_matrix_would_notice_a_model_that_is_a_little_different(
    family: str, change: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    variant = next(variant for variant in VARIANTS if variant.family == family)
    logits = variant.reference()(make_ids(64), use_cache=False).logits
    config = families.CONFIGS[family]()
    for name, value in change.items():
        assert getattr(config, name) != value
        setattr(config, name, value)
    monkeypatch.setattr(families, "CONFIGS", {family: lambda: config})
    changed = variant.reference()(make_ids(64), use_cache=False).logits
    assert distance(changed, logits) > 1e2 * variant.tolerance
