"""The groups of the `Config` tree: every option, what it takes and what it means."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from itertools import pairwise
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator

BUILTIN_ATTENTION_BACKENDS: Final = ("triton", "varlen", "sdpa_prefix", "sdpa", "flex")
"""Attention backends of this package; what each can do is in its file in `backends/attention/`."""

ATTENTION_ENTRY_POINTS: Final = "pcp_compiler.attention"
"""Entry point group of the attention backends of other packages."""


def attention_backend_names() -> tuple[str, ...]:
    """Return the names of all attention backends; no code of theirs is loaded for that."""
    others = {entry.name for entry in entry_points(group=ATTENTION_ENTRY_POINTS)}
    return (*BUILTIN_ATTENTION_BACKENDS, *sorted(others))


def _check_backend(name: str) -> str:
    if name not in attention_backend_names():
        raise ValueError("not an attention backend")
    return name


def _check_backend_or_auto(name: str) -> str:
    return name if name == "auto" else _check_backend(name)


BackendName = Annotated[str, AfterValidator(_check_backend)]
BackendOrAuto = Annotated[str, AfterValidator(_check_backend_or_auto)]


@dataclass(frozen=True, slots=True)
class Allowed:
    """Mark of a config field: the words an error message uses for what the field takes."""

    text: str


class TokenDims(Mapping[str, int]):
    """Read-only map of argument name to token dim; unlike `MappingProxyType` it can be pickled for another process."""

    __slots__ = ("_dims",)

    def __init__(self, dims: Mapping[str, int]) -> None:
        self._dims = dict(dims)

    def __getitem__(self, name: str) -> int:
        return self._dims[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._dims)

    def __len__(self) -> int:
        return len(self._dims)

    def __repr__(self) -> str:
        return repr(self._dims)


def _check_k_schedule(value: object) -> tuple[tuple[int, int, int], ...]:
    """Return the (low, high, K) ranges sorted by low; ValueError if they are no table of draft lengths."""
    if not isinstance(value, list | tuple):
        raise ValueError("not a list")
    ranges = tuple(sorted(_check_k_range(entry) for entry in value))
    if ranges and ranges[0][0] != 1:
        raise ValueError("the first range does not start at 1")
    if any(following[0] <= entry[1] for entry, following in pairwise(ranges)):
        raise ValueError("two ranges overlap")
    return ranges


def _check_k_range(entry: object) -> tuple[int, int, int]:
    if not isinstance(entry, list | tuple) or len(entry) != 3 or any(type(number) is not int for number in entry):
        raise ValueError("not three integers")
    low, high, num_draft_tokens = entry
    if not (1 <= low <= high and num_draft_tokens >= 0):
        raise ValueError("not 1 <= low <= high and K >= 0")
    return low, high, num_draft_tokens


def _check_integers(value: object) -> tuple[int, ...] | None:
    """Return a list of positive integers as it is; None stays None."""
    if value is None:
        return None
    if not isinstance(value, list | tuple) or any(type(number) is not int or number < 1 for number in value):
        raise ValueError("not a list of integers >= 1")
    return tuple(value)


def _check_names(value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) and name for name in value):
        raise ValueError("not a list of names")
    return tuple(value)


def _list_or_none(value: tuple[int, ...] | None) -> list[int] | None:
    return None if value is None else list(value)


def _check_kv_blocks(value: object) -> int | Literal["auto"]:
    if value == "auto":
        return "auto"
    if type(value) is not int or value < 2:
        raise ValueError("neither auto nor an integer >= 2")
    return value


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", use_attribute_docstrings=True)


class TimeoutConfig(Section):
    """How long a rank waits for the others, in seconds."""

    start: Annotated[float, Field(gt=0, allow_inf_nan=False), Allowed("seconds > 0")] = 600.0
    """Until all ranks have come to the first call. Stands still while a rank says that it compiles."""

    step: Annotated[float, Field(gt=0, allow_inf_nan=False), Allowed("seconds > 0")] = 60.0
    """Until all ranks have come to the next collective, or to the next call."""


class ParallelConfig(Section):
    """How token rows are spread over ranks."""

    pcp_size: Annotated[int, Field(ge=1), Allowed("integer >= 1")] = 1
    """Prefill context parallel ranks; each runs 1/pcp_size of the token rows of a prefill."""

    ranks: Annotated[Literal["auto", "virtual", "distributed"], Allowed("auto, virtual, distributed")] = "auto"
    """Where ranks run. `virtual`: all in this process, in lock-step, with one copy of the weights. `distributed`: one
    in each process of a process group. `auto`: distributed if there is a process group of more than one rank, or
    torchrun's environment to make one; else virtual."""

    min_tokens_to_shard: Annotated[int | None, Field(ge=0), Allowed("integer >= 0, or None for 2 * pcp_size")] = None
    """Prompts with fewer tokens run whole on every rank. None: 2 * pcp_size, one token per shard chunk."""

    on_token_mixing: Annotated[Literal["refuse", "gather"], Allowed("refuse, gather")] = "refuse"
    """What to do with an op that mixes token rows: `refuse` the model, or `gather` all rows before the op."""

    shard_decode: Annotated[bool, Allowed("true, false")] = False
    """`false`: decode and verify rows run on every rank, without a PCP collective. `true`: each request's rows run on
    one rank, its owner, and the K/V of a layer's new rows are gathered."""

    timeout_s: TimeoutConfig = TimeoutConfig()
    """How long a rank waits for the others."""

    @property
    def min_tokens_to_shard_resolved(self) -> int:
        """`min_tokens_to_shard` in tokens, with None decided."""
        if self.min_tokens_to_shard is None:
            return 2 * self.pcp_size
        return self.min_tokens_to_shard


class CheckConfig(Section):
    """What is checked on every call, beyond what is always checked."""

    mode: Annotated[Literal["none", "inputs", "shadow"], Allowed("none, inputs, shadow")] = "none"
    """`inputs`: distributed ranks compare the token ids of every call; the shapes, and the ids of the first call, are
    always compared. `shadow`: every call also runs unsharded, and all results are compared: with the unsharded program
    of the same trace, and under `pcp_compiler.compile` with the original model too."""

    rtol: Annotated[float | None, Field(ge=0, allow_inf_nan=False), Allowed("number >= 0, or None by dtype")] = None
    """`shadow`: difference allowed per unit of the expected value. None: by dtype, see `pcp_compiler.compare`."""

    atol: Annotated[float | None, Field(ge=0, allow_inf_nan=False), Allowed("number >= 0, or None by dtype")] = None
    """`shadow`: difference allowed everywhere. None: that of `rtol` at the largest expected value of the result."""

    rows: Annotated[bool, Allowed("True, False")] = False
    """Whether the first sharded call runs each row-local op on some rows alone and compares: finds wrong placement
    rules. `pcp_compiler.inspect(..., check_rows=True)` does the same with its example inputs."""


_BACKENDS: Final = ", ".join(attention_backend_names())
_BACKEND_OR_NONE: Final = Allowed(f"{_BACKENDS}, or None for not set")


class BackendPerKind(Section):
    """Attention backend of the layers of one kind."""

    full: Annotated[BackendName | None, _BACKEND_OR_NONE] = None
    """Backend of layers that attend to the whole context."""

    sliding_window: Annotated[BackendName | None, _BACKEND_OR_NONE] = None
    """Backend of layers that attend to the last `window` tokens."""

    mla: Annotated[BackendName | None, _BACKEND_OR_NONE] = None
    """Backend of multi-head latent attention layers."""


class AttentionConfig(Section):
    """Which attention backend runs a layer."""

    backend: Annotated[BackendOrAuto, Allowed(f"auto, {_BACKENDS}")] = "auto"
    """Backend of the target's layers whose kind is not set in `backend_per_kind`. `auto`: the first that can run the
    layer's kind in the phase at hand."""

    backend_per_kind: Annotated[BackendPerKind, Allowed("mapping of attention kind to backend")] = BackendPerKind()
    """Backend by attention kind, of target and drafter; wins over `backend` and over `draft.attention_backend`."""


class DraftConfig(Section):
    """How draft tokens are made and verified."""

    method: Annotated[Literal["none", "mtp", "model"], Allowed("none, mtp, model")] = "none"
    """Drafter. `none`: no speculation, the other keys of this group are unused. `mtp`: a multi-token-prediction module
    over the target's hidden states. `model`: a smaller model of its own."""

    model: Annotated[
        str | None, Field(min_length=1), Allowed("path (non-empty string), or None for a ready drafter")
    ] = None
    """Checkpoint of the drafter; None: a ready drafter is passed beside the config."""

    num_speculative_tokens: Annotated[int, Field(ge=0), Allowed("integer >= 0")] = 3
    """Draft tokens K of a request and round, the upper bound of `k_schedule`. 0: none are drafted, but the drafter's
    K/V is kept up to date."""

    attention_backend: Annotated[BackendOrAuto, Allowed(f"auto, {_BACKENDS}")] = "auto"
    """Backend of the drafter's layers whose kind is in neither `backend_per_kind` of this group nor of `attention`."""

    backend_per_kind: Annotated[BackendPerKind, Allowed("mapping of attention kind to backend")] = BackendPerKind()
    """Backend by attention kind, of the drafter alone; wins over every other backend key."""

    mode: Annotated[Literal["auto", "sharded", "replicated"], Allowed("auto, sharded, replicated")] = "auto"
    """Rows of the drafter's first pass. `sharded`: each rank's own. `replicated`: all, on every rank. `auto`: sharded
    where the drafter and its attention backend allow it."""

    sampling: Annotated[Literal["greedy", "probabilistic"], Allowed("greedy, probabilistic")] = "greedy"
    """How the drafter picks tokens: the likeliest, or drawn at the request's temperature."""

    verification: Annotated[Literal["token", "block"], Allowed("token, block")] = "token"
    """Acceptance test: each draft token on its own, or all of a request's drafts together. Both keep the target's
    distribution; `block` accepts at least as many tokens on average."""

    k_schedule: Annotated[
        tuple[tuple[int, int, int], ...],
        PlainValidator(_check_k_schedule),
        PlainSerializer(lambda ranges: [list(entry) for entry in ranges], return_type=list[list[int]]),
        Allowed(
            "list of [low, high, K], integers with low <= high and K >= 0, the lowest range from 1, no overlap; "
            "[] for off"
        ),
    ] = ()
    """Draft tokens by number of running requests, both ends included. Gaps and numbers above the last range keep the K
    of the range before; no K exceeds `num_speculative_tokens`."""

    vocab_mismatch: Annotated[Literal["refuse", "pad"], Allowed("refuse, pad")] = "refuse"
    """A drafter whose vocabulary is smaller or larger than the target's: `refuse` it, or treat the ids that only one
    has as padding that is never drafted."""


class LimitsConfig(Section):
    """Sizes of the decoder's batches and of its KV cache."""

    max_model_len: Annotated[int | None, Field(ge=1), Allowed("integer >= 1, or None for the model's own")] = None
    """Longest request in tokens, prompt and output together. None: the target's position limit."""

    max_num_requests: Annotated[int, Field(ge=1), Allowed("integer >= 1")] = 32
    """Requests that run at once; more wait in a queue."""

    max_num_tokens: Annotated[int, Field(ge=1), Allowed("integer >= 1")] = 2048
    """Token rows of one step over all requests."""

    kv_block_size: Annotated[int, Field(ge=1), Allowed("integer >= 1")] = 16
    """Tokens in one kv_block."""

    kv_blocks: Annotated[
        int | Literal["auto"],
        PlainValidator(_check_kv_blocks),
        Allowed("auto, or integer >= 2 (kv_block 0 is reserved)"),
    ] = "auto"
    """kv_blocks in the pool, the reserved kv_block 0 among them. `auto`: what free memory holds."""

    kv_cache_dtype: Annotated[
        Literal["auto", "fp32", "bf16", "fp16", "fp8_e4m3"], Allowed("auto, fp32, bf16, fp16, fp8_e4m3")
    ] = "auto"
    """Type of stored keys and values. `auto`: the target's."""

    prefill_chunk: Annotated[int | None, Field(ge=1), Allowed("integer >= 1, or None for max_num_tokens")] = None
    """Most tokens of one prompt in one step; longer prompts take several. None: `max_num_tokens`."""

    prefix_cache: Annotated[bool, Allowed("true, false")] = True
    """Whether a prompt reuses the kv_blocks of an earlier one with the same beginning."""

    @property
    def prefill_chunk_resolved(self) -> int:
        """`prefill_chunk` in tokens, with None decided."""
        return self.max_num_tokens if self.prefill_chunk is None else self.prefill_chunk


class CaptureConfig(Section):
    """Which programs are captured, so that they run again without Python in between."""

    mode: Annotated[
        Literal["none", "piecewise", "full_decode", "full_and_piecewise"],
        Allowed("none, piecewise, full_decode, full_and_piecewise"),
    ] = "none"
    """`full_decode`: steps without prompts and draft chains, each as one graph. `piecewise`: what lies between
    attention, KV writes and collectives, for all steps. `full_and_piecewise`: prompts in pieces, the rest whole."""

    executor: Annotated[
        Literal["auto", "eager", "replay", "cuda_graph"], Allowed("auto, eager, replay, cuda_graph")
    ] = "auto"
    """What runs captured programs. `cuda_graph`: CUDA graphs. `replay`: the same on a CPU, emulated, for tests.
    `eager`: nothing is captured. `auto`: cuda_graph on a GPU, else eager."""

    sizes: Annotated[
        tuple[int, ...] | None,
        PlainValidator(_check_integers),
        PlainSerializer(_list_or_none, return_type=list[int] | None),
        Allowed("list of integers >= 1, [] for off, or None"),
    ] = None
    """Rows of a rank that programs are captured at; more are added so that the largest step has one. None: 1, 2, 4,
    then steps of 8 and more."""

    context_buckets: Annotated[
        tuple[int, ...] | None,
        PlainValidator(_check_integers),
        PlainSerializer(_list_or_none, return_type=list[int] | None),
        Allowed("list of integers >= 1, [] for the whole context only, or None"),
    ] = None
    """Longest contexts that whole graphs are captured for, beside `limits.max_model_len`. None: 2048, 8192, ..."""

    splitting_ops: Annotated[
        tuple[str, ...],
        PlainValidator(_check_names),
        PlainSerializer(list, return_type=list[str]),
        Allowed("list of ops of the target, such as aten.mm.default"),
    ] = ()
    """Ops that stay out of captured pieces, beside attention, KV writes and collectives."""

    memory_mb: Annotated[int | None, Field(ge=1), Allowed("integer >= 1, or None for no limit")] = None
    """Memory for captures in MiB; those that would exceed it are left out and named."""


class DumpConfig(Section):
    """What is written to disk while compiling."""

    dir: Annotated[str | None, Field(min_length=1), Allowed("folder path (non-empty string), or None for off")] = None
    """Folder that receives the graph of each stage; None writes nothing."""

    level: Annotated[Literal["passes", "final"], Allowed("passes, final")] = "passes"
    """`passes` writes the graph after every pass, `final` only the last stage."""
