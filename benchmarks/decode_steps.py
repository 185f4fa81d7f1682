"""Time the steps of the decoder on a GPU: decode, verify, proposal, whole round; eager, and captured as CUDA graphs.

A *decode step* generates a token per request without drafts; a *round* verifies K drafts per request and proposes new
ones. Verify and proposal are timed by themselves, with a synchronisation around each; decode step and round run as they
do in production. All are the median over steps.

    python benchmarks/decode_steps.py --shape smollm2 --batch 1 8 32 --context 256 4096

`--shape smollm2` needs the weights of the examples; its drafter is the trained one. `--shape 8b` has Llama-3-8B's sizes
and random weights. `--baselines` adds transformers with a static cache, eager and compiled with reduce-overhead.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))

from pcp_compiler import SamplingParams, SpeculativeDecoder  # noqa: E402

LLAMA_3_8B = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rope_theta": 500000.0,
    "tie_word_embeddings": False, "head_dim": 128,
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """Times of one setting in ms; `tokens` are those of the first request, to compare modes."""

    shape: str
    mode: str
    batch: int
    context: int
    decode: float
    verify: float
    proposal: float
    round: float
    replays: int
    eager_runs: int
    tokens: list[int]


def main() -> int:
    options = parse_arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target, draft = load(options.shape, device)
    rows: list[Row] = []
    console = Console(width=140)
    settings = product(options.context, options.batch, options.numerics, options.modes)
    for context, batch, numerics, mode in settings:
        row = measure(target, draft, options, context, batch, mode, numerics)
        rows.append(row)
        console.print(f"{context} x {batch}, {row.mode}: decode {row.decode:.3f} ms, round {row.round:.3f} ms")
    if options.baselines:
        for context in options.context:
            for batch in options.batch:
                baseline(target, context, batch, console)
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(row) for row in rows]))
    console.print(table(rows, f"{device.type}, torch {torch.__version__}, {options.dtype}, K = {options.k}"))
    different = [row for row in rows if row.tokens != first_of(rows, row).tokens]
    for row in different:
        console.print(f"other tokens than {first_of(rows, row).mode}: {row.mode}, {row.batch} x {row.context}")
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=["smollm2", "8b", "tiny"], default="smollm2")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--context", type=int, nargs="+", default=[256])
    parser.add_argument("--modes", nargs="+", default=["none", "full_decode"], help="values of capture.mode")
    parser.add_argument("--numerics", nargs="+", default=["exact"], help="exact, fast or both (default exact)")
    parser.add_argument("--k", type=int, default=3, help="draft tokens (default 3)")
    parser.add_argument("--steps", type=int, default=20, help="steps that are timed (default 20)")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--baselines", action="store_true", help="transformers with a static cache too")
    parser.add_argument("--json", help="file for the results")
    return parser.parse_args()


def load(shape: str, device: torch.device) -> tuple[nn.Module, str]:
    """Return target and folder of the drafter."""
    if shape == "smollm2":
        import smollm2

        drafter = ROOT / "examples" / "drafters" / "smollm2-135m-mtp"
        return smollm2.load_model(torch.bfloat16).to(device), str(drafter)
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = dict(LLAMA_3_8B)
    if shape == "tiny":
        sizes |= {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
                  "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512}  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        target = LlamaForCausalLM(LlamaConfig(**sizes)).requires_grad_(False).train(False)
        torch.set_default_dtype(torch.float32)
    return target, random_mtp(target, sizes)


def random_mtp(target: Any, sizes: dict[str, Any]) -> str:
    """Write one random MTP module in DeepSeek's form; return its folder."""
    from safetensors.torch import save_file

    folder = Path(tempfile.mkdtemp())
    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    kv, q = sizes["num_key_value_heads"] * sizes["head_dim"], sizes["num_attention_heads"] * sizes["head_dim"]
    shapes = {
        "enorm": (hidden,), "hnorm": (hidden,), "eh_proj": (hidden, 2 * hidden), "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,), "shared_head.norm": (hidden,), "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden), "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    base = f"model.layers.{sizes['num_hidden_layers']}."
    tensors = {
        f"{base}{name}.weight": (torch.randn(shape) * 0.02 + (len(shape) == 1)).bfloat16()
        for name, shape in shapes.items()
    }
    (folder / "config.json").write_text(json.dumps({**target.config.to_dict(), "num_nextn_predict_layers": 1}))
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def measure(
    target: nn.Module, draft: str, options: argparse.Namespace, context: int, batch: int, mode: str, numerics: str
) -> Row:
    """Return the times of one setting."""
    plain = make_decoder(target, None, options, context, batch, mode, numerics)
    decode, tokens = run(plain, context, batch, options.steps, {})
    del plain
    decoder = make_decoder(target, draft, options, context, batch, mode, numerics)
    parts: dict[str, list[float]] = {}
    whole, tokens_of_rounds = run(decoder, context, batch, options.steps, parts)
    stats = decoder.capture_stats()
    medians = {name: statistics.median(times) for name, times in parts.items()}
    return Row(
        options.shape, f"{mode}, {numerics}", batch, context, decode, medians["verify"], medians["proposal"], whole,
        stats.num_replays, stats.misses.total(), tokens + tokens_of_rounds,
    )  # fmt: skip


def make_decoder(
    target: nn.Module,
    draft: str | None,
    options: argparse.Namespace,
    context: int,
    batch: int,
    mode: str,
    numerics: str,
) -> SpeculativeDecoder:
    room = context + 8 * options.steps * (1 + options.k) + 64
    config: dict[str, Any] = {
        "limits": {"max_num_requests": batch, "max_model_len": room, "prefix_cache": False,
                   "max_num_tokens": max(2048, batch * (1 + options.k)), "prefill_chunk": 2048,
                   "kv_blocks": batch * -(-room // 16) + 8},
        "capture": {"mode": mode, "sizes": [batch]}, "numerics": numerics,
    }  # fmt: skip
    if draft is not None:
        config["draft"] = {"method": "mtp", "model": draft, "num_speculative_tokens": options.k}
    return SpeculativeDecoder(target, config, tie_margin=0)


def run(
    decoder: SpeculativeDecoder, context: int, batch: int, steps: int, parts: dict[str, list[float]]
) -> tuple[float, list[int]]:
    """Return the median time of a step in ms after all prompts are read, and the first request's tokens.

    Args:
        parts: gets the times of verification and proposal, of further steps.
    """
    generator = torch.Generator().manual_seed(0)
    params = SamplingParams(steps * 16)
    prompts = [torch.randint(5, 1000 if decoder.vocab_size > 1000 else 500, (context,), generator=generator)
               for _ in range(batch)]  # fmt: skip
    requests = [decoder.submit(prompt, params) for prompt in prompts]
    while any(not request.output_ids for request in requests):
        decoder.step()
    for _ in range(3):
        decoder.step()
    times = [timed(decoder.step) for _ in range(steps)]
    tokens = list(requests[0].output_ids[:steps])
    if decoder.proposer is not None:
        decoder.rounds = None  # a captured round has no parts
        hook(decoder, parts)
        for _ in range(steps):
            decoder.step()
    for request in requests:
        decoder.cancel(request)
    return statistics.median(times), tokens


def hook(decoder: SpeculativeDecoder, parts: dict[str, list[float]]) -> None:
    """Time the target's run and the proposal of further steps."""
    for name, method in (("verify", "_run_target"), ("proposal", "_propose")):
        original = getattr(decoder, method)

        def wrapped(*args: Any, _original: Callable[..., Any] = original, _name: str = name) -> Any:
            found: list[Any] = []
            parts.setdefault(_name, []).append(timed(lambda: found.append(_original(*args))))
            return found[0]

        setattr(decoder, method, wrapped)


def timed(function: Callable[[], object]) -> float:
    """Return the ms that a call takes until the device is done."""
    synchronize()
    started = time.perf_counter()
    function()
    synchronize()
    return 1e3 * (time.perf_counter() - started)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@torch.no_grad()
def baseline(target: Any, context: int, batch: int, console: Console) -> None:
    """Print ms per token of transformers with a static cache, eager and compiled."""
    from transformers import StaticCache

    device = next(target.parameters()).device
    ids = torch.randint(5, 500, (batch, context), device=device)
    for name in ("eager", "reduce-overhead"):
        cache = StaticCache(config=target.config, max_cache_len=context + 64)
        logits = target(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        step = target.forward if name == "eager" else torch.compile(target.forward, mode="reduce-overhead")
        token = logits[:, -1].argmax(-1, keepdim=True)
        times = []
        for number in track(range(30), description=f"transformers {name}", console=console, transient=True):
            position = torch.tensor([context + number], device=device)
            times.append(timed(partial(advance, step, cache, token, position)))
        console.print(f"transformers {name}, batch {batch}, context {context}: {statistics.median(times[10:]):.3f} ms")
        torch._dynamo.reset()


def advance(step: Callable[..., Any], cache: Any, token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Run one token a request, as generate does."""
    out = step(token, past_key_values=cache, cache_position=position, position_ids=position[None])
    best: torch.Tensor = out.logits[:, -1].argmax(-1, keepdim=True)
    return best


def first_of(rows: list[Row], row: Row) -> Row:
    return next(other for other in rows if (other.batch, other.context) == (row.batch, row.context))


def table(rows: list[Row], title: str) -> Table:
    shown = Table(title=f"ms per step, {rows[0].shape}, {title}", box=None)
    for heading in ("context", "batch", "capture", "decode", "verify", "proposal", "round", "replays", "eager runs",
                    "tokens as\nfirst mode"):  # fmt: skip
        shown.add_column(heading, justify="right")
    for row in rows:
        numbers = (f"{value:.3f}" for value in (row.decode, row.verify, row.proposal, row.round))
        same = "yes" if row.tokens == first_of(rows, row).tokens else "no"
        shown.add_row(str(row.context), str(row.batch), row.mode, *numbers, str(row.replays), str(row.eager_runs), same)
    return shown


if __name__ == "__main__":
    sys.exit(main())
