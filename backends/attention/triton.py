"""`triton`: our kernel. All spans in one launch, lengths read on the device, KV splits fixed by the context bucket."""

from __future__ import annotations

from importlib.util import find_spec

from torch import Tensor

from pcp_compiler.plan.capabilities import AttentionBackend, AttentionCapabilities


def attend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, spans: Tensor, block_tables: Tensor, *, block_size: int, layer: int,
    scale: float, window: int | None = None, soft_cap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See `kv_ops.paged_attention`."""
    from pcp_compiler.kernels.paged_attention import paged_attention

    return paged_attention(
        q[0], k_cache, v_cache, spans, block_tables, block_size=block_size,
        kv_bound=block_tables.shape[1] * block_size, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks,
    )[None]  # fmt: skip


def _priorities() -> dict[str, int]:
    """Return where it runs: on a CPU only in Triton's interpreter, which is for tests."""
    if find_spec("triton") is None:
        return {"cuda": 0}
    import triton

    return {"cuda": 0, "cpu": 9} if triton.knobs.runtime.interpret else {"cuda": 0}


BACKEND = AttentionBackend(
    AttentionCapabilities(
        name="triton",
        kinds=frozenset(["full", "sliding_window", "mla"]),
        supports_pcp=True,
        ragged_queries=True,
        paged=True,
        non_causal=True,
        priorities=_priorities(),
        dtypes=frozenset(["float32", "bfloat16", "float16"]),
        min_head_dim=16,
        max_head_dim=576,
        is_capture_safe=True,
        context_buckets=True,
        missing=None if find_spec("triton") else "triton is not installed",
    ),
    attend,
)
