"""Measure our attention kernel beside torch's: prefill, each rank's share of a prefill, verify and decode.

Ours reads prefills from keys and values in order (`attention_rows`; "paged": from the cache), verify and decode from a
paged cache with shuffled blocks of 16. The others get dense keys and values, for which they need not look anything up:
SDPA by FlashAttention, SDPA by cuDNN, and flex attention, compiled. All of a row is measured in one run, by CUDA events
around replays of a captured graph, median. Each case of ours is first compared with float64 on some of its rows.

    python benchmarks/attention.py [--quick] [--kinds prefill ranks verify decode] [--flex] [--json out.json]

"Of the ceiling" is the fraction of the bf16 matrix rate (prefill, ranks) or of the copy bandwidth, read plus written
(verify, decode: bytes of keys and values), both measured in the same run. The exit code is 1 when a `must` of `TARGETS`
does not hold. The table is printed last, as markdown.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalBias, causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from pcp_compiler.kernels.paged_attention import attention_rows, paged_attention
from pcp_compiler.plan.partition import partition_batch

SHAPES = {"8B": (32, 8, 128), "SmolLM2": (9, 3, 64)}
"""Query heads, key heads, head dim; Llama-3-8B's and SmolLM2-135M's."""
PREFILL_LENS = (1024, 4096, 16384, 65536, 131072)
CONTEXT_LENS = (256, 4096, 32768, 131072)
NUM_REQUESTS = (1, 8, 32)
VERIFY_ROWS = (4, 6)
KINDS = ("prefill", "paged", "ranks", "verify", "decode")
BLOCK_SIZE = 16
GRAPH_MS = 2.0
"""Calls shorter than this are captured, several in a graph: their launches would cost as much as they do."""
MAX_ERROR = 1e-2
"""Relative, of bf16 against float64."""
TARGETS = {"prefill": (1.4, 1.25), "decode": (0.65, 0.80), "ranks": (1.02, 1.01)}
"""Must and aim: time against the fastest of the others; fraction of copy bandwidth from 32k on; slowest / mean rank."""
LONG_CONTEXT = 32768


@dataclass(slots=True)
class Row:
    """What one case took."""

    kind: str
    shape: str
    case: str
    ours_ms: float
    """Of the slowest rank for kind "ranks"."""
    others_ms: dict[str, float] = field(default_factory=dict)
    ceiling: float = 0.0
    """Fraction of the matrix rate or of the copy bandwidth."""
    balance: float | None = None
    """Slowest rank's time over the mean."""
    error: float = 0.0
    """Relative, against float64."""

    @property
    def ratio(self) -> float | None:
        """Our time over the fastest of the others."""
        return self.ours_ms / min(self.others_ms.values()) if self.others_ms else None


def time_ms(run: Callable[[], object], repeats: int = 15) -> float:
    """Return the median milliseconds of a call on the device."""
    once = _event_ms(run, warm_up=2)
    if once > GRAPH_MS:
        return statistics.median(_event_ms(run) for _ in range(max(5, min(repeats, int(200 / once)))))
    calls = max(1, min(50, int(GRAPH_MS / once)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    _event_ms(graph.replay, warm_up=2)
    return statistics.median(_event_ms(graph.replay) for _ in range(repeats)) / calls


def _event_ms(run: Callable[[], object], warm_up: int = 0) -> float:
    for _ in range(warm_up):
        run()
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    stop.record()
    torch.cuda.synchronize()
    elapsed: float = start.elapsed_time(stop)
    return elapsed


def measure_ceilings() -> tuple[float, float]:
    """Return the bf16 matrix rate in TFLOP/s and the copy bandwidth in GB/s, read plus written.

    The faster of two copies, since a captured `copy_` may leave the work to the copy engine, which is slower.
    """
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    tflops = 2 * 8192**3 / time_ms(lambda: a @ a) / 1e9
    source = torch.randint(-(2**62), 2**62, (2**29,), device="cuda")
    target = torch.empty_like(source)
    copy_ms = min(time_ms(lambda: target.copy_(source)), time_ms(lambda: torch.neg(source, out=target)))
    return tflops, 2 * source.nbytes / copy_ms / 1e6


def reference(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """Return attention in float64 of rows q [W, Hq, D] over k, v [T, Hkv, D], each up to its position."""
    group = q.shape[1] // k.shape[1]
    outs = []
    for head in range(k.shape[1]):
        scores = q[:, head * group : (head + 1) * group].double() @ k[:, head].double().T * q.shape[2] ** -0.5
        seen = torch.arange(k.shape[0], device=q.device) <= positions[:, None]
        weights = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
        outs.append(weights @ v[:, head].double())
    return torch.cat(outs, dim=1)


def relative_error(out: Tensor, expected: Tensor) -> float:
    """Return |out - expected| / |expected|, and stop the run when it is too large or not a number."""
    error = float((out.double() - expected).norm() / expected.norm())
    assert error < MAX_ERROR, f"relative error {error}"
    return error


def time_others(q: Tensor, k: Tensor, v: Tensor, with_flex: bool) -> dict[str, float]:
    """Return what torch's kernels take for q [R, W, Hq, D] over k, v [R, T, Hkv, D], causal, rows at the end."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    num_rows, context = q.shape[2], k.shape[2]
    is_square = num_rows == context
    is_plain = is_square or num_rows == 1
    columns, rows = (torch.arange(size, device=q.device) for size in (context, num_rows))
    masks = {
        SDPBackend.FLASH_ATTENTION: None if is_plain else causal_lower_right(num_rows, context),
        SDPBackend.CUDNN_ATTENTION: None if is_plain else columns <= rows[:, None] + (context - num_rows),
    }
    names = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
    runs: dict[str, Callable[[], object]] = {
        name: _sdpa(q, k, v, masks[backend], is_square, backend) for name, backend in names.items()
    }
    if with_flex:
        runs["flex"] = _flex(q, k, v)
    times = {}
    for name, run in runs.items():
        try:
            times[name] = time_ms(run)
        except RuntimeError as error:
            print(f"  {name} does not run this case: {str(error).splitlines()[0]}", file=sys.stderr)
    return times


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | CausalBias | None, is_causal: bool, backend: SDPBackend
) -> Callable[[], object]:
    def run() -> object:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=True
            )

    return run


def _flex(q: Tensor, k: Tensor, v: Tensor) -> Callable[[], object]:
    num_rows, context = q.shape[2], k.shape[2]

    def sees(_batch: Tensor, _head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return column <= row + (context - num_rows)

    mask = create_block_mask(sees, None, None, num_rows, context, device="cuda", _compile=True)
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=True)


def make_prompt(shape: str, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return q [T, Hq, D], k and v [T, Hkv, D]."""
    heads, kv_heads, dim = SHAPES[shape]
    q, k, v = (
        torch.randn(num_tokens, num_heads, dim, device="cuda", dtype=torch.bfloat16)
        for num_heads in (heads, kv_heads, kv_heads)
    )
    return q, k, v


def prefill_flops(shape: str, num_tokens: int) -> float:
    """Return the floating-point operations of a causal prefill."""
    heads, _, dim = SHAPES[shape]
    return 2.0 * num_tokens * (num_tokens + 1) * heads * dim


def sample_rows(num_rows: int) -> Tensor:
    """Return some rows to check, the first and the last among them."""
    return torch.cat([torch.tensor([0, num_rows - 1]), torch.randint(0, num_rows, (30,))]).cuda()


def measure_prefill(shape: str, num_tokens: int, tflops: float, with_flex: bool) -> Row:
    """Measure a whole prompt on one rank."""
    q, k, v = make_prompt(shape, num_tokens)
    rows = sample_rows(num_tokens)
    scale = q.shape[2] ** -0.5
    error = relative_error(attention_rows(q, k, v, None, scale=scale)[rows], reference(q[rows], k, v, rows))
    ours_ms = time_ms(lambda: attention_rows(q, k, v, None, scale=scale))
    others_ms = time_others(q[None], k[None], v[None], with_flex)
    ceiling = prefill_flops(shape, num_tokens) / ours_ms / 1e9 / tflops
    return Row("prefill", shape, f"{num_tokens}", ours_ms, others_ms, ceiling, error=error)


def measure_ranks(shape: str, num_tokens: int, pcp_size: int, tflops: float) -> Row:
    """Measure the zigzag rows of each rank, ranks in turn so that a change of clock rates meets all of them."""
    q, k, v = make_prompt(shape, num_tokens)
    partition = partition_batch([num_tokens], [True], pcp_size=pcp_size, shard_decode=False)
    rows = [torch.from_numpy(partition.local_rows(rank).copy()).cuda() for rank in range(pcp_size)]
    queries = [q[picked] for picked in rows]
    scale = q.shape[2] ** -0.5
    errors = []
    for local_q, picked in zip(queries, rows, strict=True):
        sample = sample_rows(len(picked))
        expected = reference(local_q[sample], k, v, picked[sample])
        errors.append(relative_error(attention_rows(local_q, k, v, picked, scale=scale)[sample], expected))
    rounds = [
        [
            time_ms(lambda rank=rank: attention_rows(queries[rank], k, v, rows[rank], scale=scale), repeats=5)  # type: ignore[misc]
            for rank in range(pcp_size)
        ]
        for _ in range(3)
    ]
    times = [statistics.median(times) for times in zip(*rounds, strict=True)]
    slowest, mean = max(times), statistics.mean(times)
    ceiling = prefill_flops(shape, num_tokens) / pcp_size / slowest / 1e9 / tflops
    case = f"{num_tokens}, P = {pcp_size}"
    return Row("ranks", shape, case, slowest, ceiling=ceiling, balance=slowest / mean, error=max(errors))


def measure_paged(
    kind: str, shape: str, num_requests: int, num_rows: int, context: int, ceiling_rate: float, with_flex: bool
) -> Row:
    """Measure the last `num_rows` rows of requests of `context` tokens in a cache with shuffled blocks."""
    heads, kv_heads, dim = SHAPES[shape]
    num_blocks = -(-context // BLOCK_SIZE)
    tables = (torch.randperm(num_requests * num_blocks, device="cuda") + 1).reshape(num_requests, num_blocks).int()
    num_slots = (num_requests * num_blocks + 1) * BLOCK_SIZE
    k_cache, v_cache = torch.randn(2, num_slots + 1, kv_heads, dim, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(num_requests * num_rows, heads, dim, device="cuda", dtype=torch.bfloat16)
    spans = torch.tensor([[r, r * num_rows, num_rows, context] for r in range(num_requests)], device="cuda")
    scale = dim**-0.5

    def ours() -> Tensor:
        return paged_attention(q, k_cache, v_cache, spans, tables, block_size=BLOCK_SIZE, kv_bound=context, scale=scale)

    slots = (tables.long()[:, :, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device="cuda")).flatten(1)[:, :context]
    out = ours().unflatten(0, (num_requests, num_rows))
    queries = q.unflatten(0, (num_requests, num_rows))
    sample = sample_rows(num_rows) if num_rows > 32 else torch.arange(num_rows, device="cuda")
    errors = []
    for request in {0, num_requests - 1}:
        k, v = k_cache[slots[request]], v_cache[slots[request]]
        expected = reference(queries[request, sample], k, v, sample + (context - num_rows))
        errors.append(relative_error(out[request, sample], expected))
    ours_ms = time_ms(ours)
    others_ms = time_others(queries, k_cache[slots], v_cache[slots], with_flex)
    if kind == "paged":
        work = prefill_flops(shape, context) / 1e9
    else:
        work = 2 * num_requests * context * kv_heads * dim * 2 / 1e6
    case = f"{context}" if kind == "paged" else f"{num_requests} x {num_rows} rows, {context}"
    return Row(kind, shape, case, ours_ms, others_ms, work / ours_ms / ceiling_rate, error=max(errors))


def cases(args: argparse.Namespace, tflops: float, gbytes: float) -> Iterator[Callable[[], Row]]:
    """Yield the cases to measure, in the order of the table."""
    lens = (1024, 16384) if args.quick else PREFILL_LENS
    contexts = (4096, 32768) if args.quick else CONTEXT_LENS
    requests = (1, 8) if args.quick else NUM_REQUESTS
    for shape in args.shapes:
        for length in lens:
            if "prefill" in args.kinds:
                yield lambda s=shape, n=length: measure_prefill(s, n, tflops, args.flex)  # type: ignore[misc]
        for length in lens:
            if "paged" in args.kinds:
                yield lambda s=shape, n=length: measure_paged("paged", s, 1, n, n, tflops, False)  # type: ignore[misc]
        for length in lens:
            for pcp_size in (4, 8):
                if "ranks" in args.kinds and length >= 4096:
                    yield lambda s=shape, n=length, p=pcp_size: measure_ranks(s, n, p, tflops)  # type: ignore[misc]
        for kind, all_rows in (("verify", VERIFY_ROWS), ("decode", (1,))):
            for count in requests:
                for rows in all_rows:
                    for context in contexts:
                        if kind in args.kinds:
                            yield lambda k=kind, s=shape, c=count, r=rows, n=context: measure_paged(  # type: ignore[misc]
                                k, s, c, r, n, gbytes, args.flex
                            )


def missed_targets(rows: Sequence[Row]) -> list[str]:
    """Return the musts that do not hold, as messages."""
    missed = []
    for row in rows:
        name = f"{row.kind} {row.shape} {row.case}"
        if row.kind == "prefill" and row.ratio is not None and row.ratio > TARGETS["prefill"][0]:
            missed.append(f"{name}: {row.ratio:.2f} times the fastest, must be {TARGETS['prefill'][0]}")
        is_long = row.kind == "decode" and int(row.case.split(", ")[1]) >= LONG_CONTEXT
        if is_long and row.ceiling < TARGETS["decode"][0]:
            missed.append(f"{name}: {row.ceiling:.2f} of the copy bandwidth, must be {TARGETS['decode'][0]}")
        is_largest = row.kind == "ranks" and row.case == "131072, P = 8"
        if is_largest and row.balance is not None and row.balance > TARGETS["ranks"][0]:
            missed.append(f"{name}: slowest / mean {row.balance:.3f}, must be {TARGETS['ranks'][0]}")
    return missed


def markdown(rows: Sequence[Row]) -> str:
    """Return the table."""
    names = ("flash", "cuDNN", "flex")
    lines = [
        f"| kind | heads | case | ours ms | {' ms | '.join(names)} ms | ours / fastest | of the ceiling"
        " | slowest / mean |",
        "|---" * (7 + len(names)) + "|",
    ]
    for row in rows:
        others = " | ".join(f"{row.others_ms[name]:.4f}" if name in row.others_ms else "-" for name in names)
        ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
        balance = "-" if row.balance is None else f"{row.balance:.3f}"
        lines.append(
            f"| {row.kind} | {row.shape} | {row.case} | {row.ours_ms:.4f} | {others} | {ratio} | {row.ceiling:.2f}"
            f" | {balance} |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two lengths of each kind")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="what to measure")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help="heads to measure")
    parser.add_argument("--flex", action="store_true", help="also flex attention, which compiles for every case")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    torch.manual_seed(0)
    torch._dynamo.config.recompile_limit = 1000  # flex compiles once a case
    tflops, gbytes = measure_ceilings()
    rows = []
    for measure in cases(args, tflops, gbytes):
        rows.append(measure())
        torch.cuda.empty_cache()
        print(rows[-1], file=sys.stderr, flush=True)
    missed = missed_targets(rows)
    machine = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "matrix_tflops": tflops,
        "copy_gbytes": gbytes,
    }  # fmt: skip
    if args.json:
        numbers = [asdict(row) | {"ratio": row.ratio} for row in rows]
        args.json.write_text(json.dumps({"machine": machine, "rows": numbers, "missed": missed}, indent=1))
    print(*missed, sep="\n")
    print(f"{machine['device']}, torch {machine['torch']}: {tflops:.0f} TFLOP/s bf16, copy {gbytes:.0f} GB/s\n")
    print(markdown(rows))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
