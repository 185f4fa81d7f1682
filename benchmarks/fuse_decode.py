"""What `fuse_decode` saves: launches per layer and time per decode step, before and after, on two models' shapes.

    python benchmarks/fuse_decode.py                     # one markdown table; forms take turns
    python benchmarks/fuse_decode.py --shape smollm2 --rows 1 8 --json
    python benchmarks/fuse_decode.py --tune              # the best tile of each kernel, shape and number of rows

"Before" runs the ATen calls of a lowered graph, "after" the ops that the pass puts in. Attention is in neither, being
the same: its result is taken to be the turned queries. Launches are those of one layer, kernels and copies as the
profiler counts them. A step is all layers, the last norm, and the greedy token of each row; it runs eagerly and as one
replayed CUDA graph. The last column is how much of the measured copy bandwidth it takes to read the weights once in
that time. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from pcp_compiler import decode_ops, kv_ops
from pcp_compiler.kernels import decode_rows
from pcp_compiler.kernels.decode_rows import Tile, pick_tile

EPS, DTYPE, DEVICE, NUM_SLOTS = 1e-5, torch.bfloat16, "cuda", 4096


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Llama."""

    name: str
    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    mlp: int
    vocab: int

    @property
    def head_dim(self) -> int:
        """D."""
        return self.hidden // self.heads


SHAPES = {
    "smollm2": Shape("SmolLM2-135M", 30, 576, 9, 3, 1536, 49152),
    "llama8b": Shape("Llama-3-8B", 32, 4096, 32, 8, 14336, 128256),
}


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights and caches of a layer."""

    norm: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    mlp_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    k_cache: Tensor
    v_cache: Tensor

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """What a step reads."""
        return self.norm, self.q, self.k, self.v, self.o, self.mlp_norm, self.gate, self.up, self.down


@dataclass(frozen=True, slots=True)
class Model:
    """Random weights of a shape."""

    shape: Shape
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights but the embedding, of which a step reads a row or two."""
        tensors = [self.norm, self.head, *(weight for layer in self.layers for weight in layer.weights)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@dataclass(frozen=True, slots=True)
class Rows:
    """One decode step: hidden states [1, N, H], cos and sin [1, N, D], slots [N]."""

    x: Tensor
    cos: Tensor
    sin: Tensor
    slots: Tensor


def make_model(shape: Shape) -> Model:
    """Return random weights, scaled so that hidden states neither vanish nor grow."""

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, device=DEVICE, dtype=DTYPE).mul_(columns**-0.5)

    def gains() -> Tensor:
        return 1 + 0.1 * torch.randn(shape.hidden, device=DEVICE, dtype=DTYPE)

    kv = shape.kv_heads * shape.head_dim
    layers = []
    for _ in range(shape.num_layers):
        caches = [torch.zeros(NUM_SLOTS + 1, shape.kv_heads, shape.head_dim, device=DEVICE, dtype=DTYPE) for _ in "kv"]
        layers.append(
            Layer(
                gains(), matrix(shape.hidden, shape.hidden), matrix(kv, shape.hidden), matrix(kv, shape.hidden),
                matrix(shape.hidden, shape.hidden), gains(), matrix(shape.mlp, shape.hidden),
                matrix(shape.mlp, shape.hidden), matrix(shape.hidden, shape.mlp), *caches,
            )
        )  # fmt: skip
    return Model(shape, tuple(layers), gains(), matrix(shape.vocab, shape.hidden))


def make_rows(shape: Shape, num_rows: int) -> Rows:
    """Return random rows at random positions."""
    positions = torch.randint(0, 2048, (1, num_rows, 1), device=DEVICE)
    turns = positions * 1e4 ** -torch.linspace(0, 1, shape.head_dim // 2, device=DEVICE)
    turns = torch.cat([turns, turns], dim=-1)
    x = torch.randn(1, num_rows, shape.hidden, device=DEVICE, dtype=DTYPE)
    return Rows(x, turns.cos().to(DTYPE), turns.sin().to(DTYPE), torch.randperm(NUM_SLOTS, device=DEVICE)[:num_rows])


# -- the two forms ----------------------------------------------------------------------------------------------------


def norm(x: Tensor, gamma: Tensor) -> Tensor:
    """RMSNorm as the ATen calls of a trace."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return gamma * wide.to(x.dtype)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding as the ATen calls of a trace: [1, N, H, D]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos.unsqueeze(2) + torch.cat([-second, first], dim=-1) * sin.unsqueeze(2)


def layer_before(layer: Layer, x: Tensor, rows: Rows) -> Tensor:
    """One layer as a graph without the pass has it."""
    head_dim = rows.cos.shape[-1]
    normed = norm(x, layer.norm)
    q, k, v = (F.linear(normed, weight).unflatten(-1, (-1, head_dim)) for weight in (layer.q, layer.k, layer.v))
    q, k = turn(q, rows.cos, rows.sin), turn(k, rows.cos, rows.sin)
    kv_ops.STORE_KV(k, v, rows.slots, layer.k_cache, layer.v_cache, layer=0)
    x = x + F.linear(q.flatten(-2), layer.o)
    normed = norm(x, layer.mlp_norm)
    return x + F.linear(F.silu(F.linear(normed, layer.gate)) * F.linear(normed, layer.up), layer.down)


def layer_after(layer: Layer, x: Tensor, rows: Rows) -> Tensor:
    """One layer as the pass leaves it."""
    head_dim, projections = rows.cos.shape[-1], [layer.q, layer.k, layer.v]
    parts = decode_ops.RMS_NORM_LINEAR(x, layer.norm, projections, [None] * 3, eps=EPS)
    q, k, v = (part.unflatten(-1, (-1, head_dim)) for part in parts)
    caches = layer.k_cache, layer.v_cache
    turned, _ = decode_ops.ROPE_STORE_KV(q, k, v, rows.cos, rows.sin, rows.slots, *caches, layer=0)
    x = decode_ops.LINEAR_RESIDUAL(turned.flatten(-2), layer.o, None, x)
    inner = decode_ops.RMS_NORM_SWIGLU(x, layer.mlp_norm, layer.gate, layer.up, eps=EPS)
    out: Tensor = decode_ops.LINEAR_RESIDUAL(inner, layer.down, None, x)
    return out


def step(model: Model, rows: Rows, *, is_fused: bool) -> Tensor:
    """Return the greedy token of each row, [1, N]."""
    x, run_layer = rows.x, layer_after if is_fused else layer_before
    for layer in model.layers:
        x = run_layer(layer, x, rows)
    x = norm(x, model.norm)
    return decode_ops.LINEAR_ARGMAX(x, model.head)[0] if is_fused else F.linear(x, model.head).argmax(-1)


def check_agreement(model: Model, rows: Rows) -> None:
    """Compare the forms layer by layer, each time from the same rows, and their tokens by the logits they have."""
    x = rows.x
    for layer in model.layers:
        before = layer_before(layer, x, rows)
        k_before, v_before = layer.k_cache[rows.slots].clone(), layer.v_cache[rows.slots].clone()
        after = layer_after(layer, x, rows)
        for a, b in ((before, after), (k_before, layer.k_cache[rows.slots]), (v_before, layer.v_cache[rows.slots])):
            error = float((a.float() - b.float()).pow(2).mean().sqrt() / a.float().pow(2).mean().sqrt())
            assert error < 2**-6, f"forms differ by {error:.1e} of the root mean square"
        x = before
    x = norm(x, model.norm)
    logits = F.linear(x, model.head).float()
    chosen = logits.gather(-1, decode_ops.LINEAR_ARGMAX(x, model.head)[0].unsqueeze(-1)).squeeze(-1)
    assert ((logits.amax(-1) - chosen) <= 2**-6 * logits.abs().amax(-1)).all(), "forms choose different tokens"


# -- measure ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the table."""

    shape: str
    rows: int
    form: str
    launches_per_layer: int
    eager_ms: float
    graph_ms: float
    gain: float
    bandwidth_fraction: float


def count_launches(run: Callable[[], object]) -> int:
    """Return how many kernels and copies the device ran in one call."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return sum(event.device_type.name == "CUDA" for event in profile.events() or ())


def captured(run: Callable[[], object]) -> Callable[[], None]:
    """Return a replay of one call as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def time_ms(run: Callable[[], object]) -> float:
    """Return how long one call takes the device, from the moment it has nothing else to do."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def copy_bandwidth() -> float:
    """Return bytes read and written per millisecond by a copy of 2 GiB."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    times = [time_ms(partial(target.copy_, source)) for _ in range(10)]
    return 2 * source.numel() / statistics.median(times[2:])


def measure(model: Model, num_rows: int, num_repeats: int, bandwidth: float) -> list[Result]:
    """Return a line per form; forms take turns, so that a slow second slows all of them."""
    rows = make_rows(model.shape, num_rows)
    check_agreement(model, rows)
    forms = {"before": (layer_before, False), "after": (layer_after, True)}
    launches = {name: count_launches(partial(run, model.layers[0], rows.x, rows)) for name, (run, _) in forms.items()}
    runs: dict[tuple[str, str], Callable[[], object]] = {}
    for name, (_, is_fused) in forms.items():
        eager = partial(step, model, rows, is_fused=is_fused)
        runs[name, "eager"], runs[name, "graph"] = eager, captured(eager)
    times: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
    for _ in range(num_repeats):
        for key, run in runs.items():
            times[key].append(time_ms(run))
    ms = {key: statistics.median(values) for key, values in times.items()}
    return [
        Result(
            model.shape.name, num_rows, name, launches[name], ms[name, "eager"], ms[name, "graph"],
            ms["before", "graph"] / ms[name, "graph"], model.num_bytes / ms[name, "graph"] / bandwidth,
        )
        for name in forms
    ]  # fmt: skip


def print_table(results: Sequence[Result], title: str) -> None:
    """Print one markdown table."""
    print(f"{title}\n")
    print("| shape | rows | form | launches per layer | eager ms | graph ms | gain | of copy bandwidth |")
    print("|---|---|---|---|---|---|---|---|")
    for r in results:
        print(
            f"| {r.shape} | {r.rows} | {r.form} | {r.launches_per_layer} | {r.eager_ms:.2f} | {r.graph_ms:.3f} "
            f"| {r.gain:.2f}x | {r.bandwidth_fraction:.0%} |"
        )


# -- tiles ------------------------------------------------------------------------------------------------------------


def tile_choices(num_rows: int) -> list[Tile]:
    """Return the tiles worth trying."""
    if num_rows == 1:
        return [Tile(o, 256 * warps, warps, 1) for o, warps in itertools.product((2, 4, 8), (2, 4, 8))]
    return [Tile(*sizes) for sizes in itertools.product((16, 32, 64), (64, 128, 256), (4,), (3, 5))]


def tune(shape: Shape, num_rows: int, bandwidth: float) -> None:
    """Print the tile of the table and the best one, for each kernel; the cache is cold, as in a step."""
    rows = make_rows(shape, num_rows)
    layer, head = make_model(Shape(shape.name, 1, *list(asdict(shape).values())[2:])).layers[0], shape.vocab
    x, inner = rows.x[0], torch.randn(num_rows, shape.mlp, device=DEVICE, dtype=DTYPE)
    vocabulary = torch.randn(head, shape.hidden, device=DEVICE, dtype=DTYPE)
    projections = [layer.q, layer.k, layer.v]
    kernels: dict[str, tuple[Callable[..., object], list[Tensor]]] = {
        "q, k, v": (partial(decode_rows.rms_norm_linear, x, layer.norm, projections, [None] * 3, eps=EPS), projections),
        "o": (partial(decode_rows.linear_residual, x, layer.o, None, x), [layer.o]),
        "gate, up": (
            partial(decode_rows.rms_norm_swiglu, x, layer.mlp_norm, layer.gate, layer.up, eps=EPS),
            [layer.gate, layer.up],
        ),
        "down": (partial(decode_rows.linear_residual, inner, layer.down, None, x), [layer.down]),
        "head": (partial(decode_rows.linear_argmax, x, vocabulary), [vocabulary]),
    }
    for name, (kernel, weights) in kernels.items():
        num_outputs = weights[0].shape[0] if name == "gate, up" else sum(weight.shape[0] for weight in weights)
        listed, times = pick_tile(num_rows, num_outputs), {}
        for tile in dict.fromkeys((listed, *tile_choices(num_rows))):
            try:
                times[tile] = triton.testing.do_bench(partial(kernel, tile=tile), warmup=3, rep=15)
            except triton.runtime.errors.OutOfResources:
                continue
        best = min(times, key=times.__getitem__)
        floor = sum(weight.numel() * weight.element_size() for weight in weights) / bandwidth
        print(
            f"| {shape.name} | {num_rows} | {name} | {tuple(listed)} | {1e3 * times[listed]:.1f} | {tuple(best)} "
            f"| {1e3 * times[best]:.1f} | {floor / times[best]:.0%} |", flush=True
        )  # fmt: skip


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--tune", action="store_true", help="try tiles instead")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    options = parser.parse_args()
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    torch.cuda.empty_cache()
    if options.tune:
        print("| shape | rows | weights | listed tile | us | best tile | us | of copy bandwidth |\n" + "|---" * 8 + "|")
        for name, num_rows in itertools.product(options.shape, options.rows):
            tune(SHAPES[name], num_rows, bandwidth)
        return
    results: list[Result] = []
    with torch.no_grad():
        for name in options.shape:
            model = make_model(SHAPES[name])
            for num_rows in options.rows:
                results += measure(model, num_rows, options.repeats, bandwidth)
            del model
    title = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {bandwidth / 1e9:.2f} TB/s, bfloat16"
    if options.json:
        print(json.dumps({"setting": title, "rows": [asdict(result) for result in results]}, indent=2))
    else:
        print_table(results, title)


if __name__ == "__main__":
    main()
