"""The `Config` tree: every option a user can set, how it is read from a dict or a file, and what is refused.

A key is accepted only when it works. Keys that are planned are refused by name, unknown keys with the nearest name,
and all faults of one source are reported in one `ConfigError`.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import reprlib
import tomllib
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    PrivateAttr,
    ValidationError,
)
from pydantic_core import ErrorDetails

from pcp_compiler.errors import ConfigError

PLANNED_KEYS: Final = (
    "parallel.dcp_size",
    "parallel.tp_size",
    "parallel.pp_size",
    "attention.backend_per_kind.sparse_index",
    "draft.backend_per_kind.sparse_index",
    "draft.taps",
    "draft.noise_token_id",
    "draft.layout",
    "draft.markov_topk",
    "draft.adaptive_verification",
    "draft.confidence",
    "draft.threshold",
    "capture.segment_compiler",
    "capture.cache_dir",
)
"""Keys of the design that do not work yet."""

PLANNED_VALUES: Final = (("draft.method", "dspark"), ("role", "draft"))
"""Values, of keys that work, that do not work yet."""

VLLM_ALIASES: Final[Mapping[str, str]] = {
    "prefill_context_parallel_size": "parallel.pcp_size",
    "pcp": "parallel.pcp_size",
    "decode_context_parallel_size": "parallel.dcp_size",
    "dcp": "parallel.dcp_size",
    "tensor_parallel_size": "parallel.tp_size",
    "tp": "parallel.tp_size",
    "pipeline_parallel_size": "parallel.pp_size",
    "pp": "parallel.pp_size",
    "debug_dump_path": "dump.dir",
    "compilation_config.debug_dump_path": "dump.dir",
    "cudagraph_mode": "capture.mode",
    "compilation_config.cudagraph_mode": "capture.mode",
    "cudagraph_capture_sizes": "capture.sizes",
    "compilation_config.cudagraph_capture_sizes": "capture.sizes",
    "splitting_ops": "capture.splitting_ops",
    "compilation_config.splitting_ops": "capture.splitting_ops",
    "compilation_config.cache_dir": "capture.cache_dir",
    "num_speculative_tokens": "draft.num_speculative_tokens",
    "num_speculative_tokens_per_batch_size": "draft.k_schedule",
    "draft_sample_method": "draft.sampling",
    "enable_adaptive_verification": "draft.adaptive_verification",
    "speculative_config.method": "draft.method",
    "speculative_config.model": "draft.model",
    "speculative_config.attention_backend": "draft.attention_backend",
    "speculative_config.num_speculative_tokens": "draft.num_speculative_tokens",
    "speculative_config.num_speculative_tokens_per_batch_size": "draft.k_schedule",
    "speculative_config.draft_sample_method": "draft.sampling",
    "speculative_config.enable_adaptive_verification": "draft.adaptive_verification",
    "attention_backend": "attention.backend",
    "attention_config.backend": "attention.backend",
    "attention_config.backend_per_kind.full_attention": "attention.backend_per_kind.full",
    "attention_config.backend_per_kind.sliding_window": "attention.backend_per_kind.sliding_window",
    "attention_config.backend_per_kind.mla_attention": "attention.backend_per_kind.mla",
    "attention.backend_per_kind.full_attention": "attention.backend_per_kind.full",
    "attention.backend_per_kind.mla_attention": "attention.backend_per_kind.mla",
    "draft.backend_per_kind.full_attention": "draft.backend_per_kind.full",
    "draft.backend_per_kind.mla_attention": "draft.backend_per_kind.mla",
    "max_model_len": "limits.max_model_len",
    "max_num_seqs": "limits.max_num_requests",
    "max_num_batched_tokens": "limits.max_num_tokens",
    "block_size": "limits.kv_block_size",
    "num_gpu_blocks_override": "limits.kv_blocks",
    "kv_cache_dtype": "limits.kv_cache_dtype",
    "enable_prefix_caching": "limits.prefix_cache",
}
"""vLLM spelling, without leading dashes and with `_` for `-`, to our key."""

VLLM_SHORT_GROUPS: Final[Mapping[str, str]] = {"cc": "compilation_config"}
"""Short form of a vLLM group to its name in `VLLM_ALIASES`."""

FILE_SUFFIXES: Final = (".yaml", ".yml", ".toml", ".json")

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


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", use_attribute_docstrings=True)


class TimeoutConfig(_Section):
    """How long a rank waits for the others, in seconds."""

    start: Annotated[float, Field(gt=0, allow_inf_nan=False), Allowed("seconds > 0")] = 600.0
    """Until all ranks have come to the first call. Stands still while a rank says that it compiles."""

    step: Annotated[float, Field(gt=0, allow_inf_nan=False), Allowed("seconds > 0")] = 60.0
    """Until all ranks have come to the next collective, or to the next call."""


class ParallelConfig(_Section):
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


class CheckConfig(_Section):
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


class BackendPerKind(_Section):
    """Attention backend of the layers of one kind."""

    full: Annotated[BackendName | None, _BACKEND_OR_NONE] = None
    """Backend of layers that attend to the whole context."""

    sliding_window: Annotated[BackendName | None, _BACKEND_OR_NONE] = None
    """Backend of layers that attend to the last `window` tokens."""

    mla: Annotated[BackendName | None, _BACKEND_OR_NONE] = None
    """Backend of multi-head latent attention layers."""


class AttentionConfig(_Section):
    """Which attention backend runs a layer."""

    backend: Annotated[BackendOrAuto, Allowed(f"auto, {_BACKENDS}")] = "auto"
    """Backend of the target's layers whose kind is not set in `backend_per_kind`. `auto`: the first that can run the
    layer's kind in the phase at hand."""

    backend_per_kind: Annotated[BackendPerKind, Allowed("mapping of attention kind to backend")] = BackendPerKind()
    """Backend by attention kind, of target and drafter; wins over `backend` and over `draft.attention_backend`."""


class DraftConfig(_Section):
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


class LimitsConfig(_Section):
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


class CaptureConfig(_Section):
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


class DumpConfig(_Section):
    """What is written to disk while compiling."""

    dir: Annotated[str | None, Field(min_length=1), Allowed("folder path (non-empty string), or None for off")] = None
    """Folder that receives the graph of each stage; None writes nothing."""

    level: Annotated[Literal["passes", "final"], Allowed("passes, final")] = "passes"
    """`passes` writes the graph after every pass, `final` only the last stage."""


class _Values(_Section):
    """The config tree with each value checked on its own, as a file that inline keys complete may hold it."""

    parallel: ParallelConfig = ParallelConfig()
    """How token rows are spread over ranks."""

    attention: AttentionConfig = AttentionConfig()
    """Which attention backend runs a layer."""

    draft: DraftConfig = DraftConfig()
    """How draft tokens are made and verified."""

    limits: LimitsConfig = LimitsConfig()
    """Sizes of the decoder's batches and of its KV cache."""

    capture: CaptureConfig = CaptureConfig()
    """Which programs are captured, so that they run again without Python in between."""

    tokens: Annotated[
        Mapping[Annotated[str, Field(min_length=1)], int],
        AfterValidator(TokenDims),
        PlainSerializer(dict, return_type=dict[str, int]),
        Allowed("mapping of argument name (non-empty string) to token dim (integer, may be negative)"),
    ] = TokenDims({})
    """Token dim of each argument that carries token rows; empty: found from the graph."""

    check: CheckConfig = CheckConfig()
    """What is checked on every call."""

    dump: DumpConfig = DumpConfig()
    """What is written to disk while compiling."""

    role: Annotated[Literal["target"], Allowed("target")] = "target"
    """Part the model plays in speculative decoding."""

    numerics: Annotated[Literal["exact", "fast"], Allowed("exact, fast")] = "exact"
    """`fast`: steps of decode rows run fused kernels, which round less often than the model does: the same up to
    rounding, not the same bits. `exact`: the model's own operations."""

    _notes: tuple[str, ...] = PrivateAttr(default=())

    def __init__(self, **options: Any) -> None:
        try:
            super().__init__(**options)
        except ValidationError as error:
            raise ConfigError("\n".join(_describe_fault(fault) for fault in error.errors())) from None

    @property
    def notes(self) -> tuple[str, ...]:
        """What loading decided (aliases read, file values replaced), one sentence each; not part of the value."""
        return self._notes


class Config(_Values):
    """All options of one compiled model: immutable, equal and hashable by value.

    `Config(parallel={"pcp_size": 4})` takes nested keys; `load_config` also takes dotted keys, aliases and files.

    Raises:
        ConfigError: a key, value or combination of values is not allowed; one line per fault.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if conflicts := list(_find_conflicts(self)):
            raise ConfigError("\n".join(conflicts))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Config):
            return NotImplemented
        return self.model_dump() == other.model_dump()

    def __hash__(self) -> int:
        return hash(self.key())

    def with_pcp_size(self, pcp_size: int) -> Config:
        """Return the same config for another number of ranks."""
        values = self.resolved()
        values["parallel"]["pcp_size"] = pcp_size
        return load_config(values)

    def resolved(self) -> dict[str, Any]:
        """Return a plain, JSON-able dict with every default filled in and each choice that needs no model decided.

        `parallel.ranks` may stay `auto`: that depends on the process group, not on the config.
        """
        values = self.model_dump()
        values["parallel"]["min_tokens_to_shard"] = self.parallel.min_tokens_to_shard_resolved
        values["limits"]["prefill_chunk"] = self.limits.prefill_chunk_resolved
        return values

    def key(self) -> str:
        """Return the SHA-256 (64 hex digits) of the resolved config: the same in every process, for cache keys."""
        text = json.dumps(self.resolved(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def to_yaml(self) -> str:
        """Return YAML text with every key; loading it gives an equal Config."""
        return yaml.safe_dump(self.model_dump(), sort_keys=False)


_AnyValues = TypeVar("_AnyValues", bound=_Values)


DECODER_KEYS: Final = ("attention", "capture", "draft", "limits", "numerics", "parallel.shard_decode")
"""Keys that SpeculativeDecoder alone uses."""

COMPILER_KEYS: Final = ("tokens", "check", "dump", "parallel.ranks", "parallel.timeout_s")
"""Keys that a compiled model alone uses: the decoder finds its token rows itself and runs virtual ranks."""


def check_used(config: Config, unused_keys: tuple[str, ...], user: str, instead: str) -> None:
    """Raise ConfigError when a key that `user` would not read has another value than its default.

    `parallel.ranks: virtual` is what the decoder runs, so it is no other value.
    """
    given, default = config.resolved(), Config().resolved()
    for key in unused_keys:
        value: Any = given
        usual: Any = default
        for part in key.split("."):
            value, usual = value[part], usual[part]
        if value != usual and value != "virtual":
            raise ConfigError(f"{key}: got {value!r}, which {user} does not use; leave it out, or use {instead}")


def load_config(options: Mapping[str, Any] | str | Path | Config | None) -> Config:
    """Return the Config that `options` describe.

    Args:
        options: None (defaults), a ready Config (returned as it is), the path of a YAML, TOML or JSON file, or a
            mapping with nested keys, dotted keys (`"parallel.pcp_size"`) or both. Key `config` of a mapping is the
            path of a file whose values the other keys replace, one by one (`tokens` per argument). vLLM spellings
            are accepted, see `VLLM_ALIASES`.
    Returns:
        Config; its `notes` name the aliases that were read and the file values that were replaced.
    Raises:
        ConfigError: a file cannot be read, or a key, value or combination is not allowed; one line per fault of a
            source. Combinations are checked when the file and the other keys are put together.
    """
    if options is None:
        return Config()
    if isinstance(options, Config):
        return options
    if isinstance(options, str | Path):
        return _load_file(Path(options), Config)
    if isinstance(options, Mapping):
        return _load_inline(options)
    raise ConfigError(f"options: got {_show(options)}; allowed: mapping, path, Config or None")


# --- combinations ----------------------------------------------------------------------------------------------------


def _find_conflicts(config: Config) -> Iterator[str]:
    """Yield one line for each pair of allowed values that do not go together."""
    draft, limits = config.draft, config.limits
    unused = [f"draft.{name}" for name in DraftConfig.model_fields if name in draft.model_fields_set]
    if unused and "draft.method" not in unused:
        yield f"draft.method: not given beside {', '.join(unused)}; allowed: {_describe_allowed('draft.method')}"
    verify_rows = 1 + draft.num_speculative_tokens
    if draft.method != "none" and limits.max_num_tokens < verify_rows:
        least = f"integer >= {verify_rows}, the 1 + draft.num_speculative_tokens rows that verify one request"
        yield f"limits.max_num_tokens: got {_show(limits.max_num_tokens)}; allowed: {least}"
    if limits.prefill_chunk_resolved > limits.max_num_tokens:
        most = f"integer from 1 to limits.max_num_tokens = {limits.max_num_tokens}"
        yield f"limits.prefill_chunk: got {_show(limits.prefill_chunk)}; allowed: {most}"
    capture = config.capture
    if capture.splitting_ops and capture.mode not in ("piecewise", "full_and_piecewise"):
        yield (
            f"capture.splitting_ops: got {_show(list(capture.splitting_ops))} with capture.mode {_show(capture.mode)}, "
            "which has no pieces; allowed: [], or capture.mode piecewise or full_and_piecewise"
        )
    if limits.kv_blocks != "auto" and limits.max_model_len is not None:
        least_blocks = 1 + -(-limits.max_model_len // limits.kv_block_size)
        if limits.kv_blocks < least_blocks:
            pool = f"auto, or integer >= {least_blocks}: the reserved kv_block and {least_blocks - 1} of"
            request = f"{limits.kv_block_size} tokens for one request of limits.max_model_len = {limits.max_model_len}"
            yield f"limits.kv_blocks: got {_show(limits.kv_blocks)}; allowed: {pool} {request}"


# --- names -----------------------------------------------------------------------------------------------------------


def _find_sections(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield (dotted name, type) of every section below `model`, each before those inside it."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield prefix + name, field.annotation
            yield from _find_sections(field.annotation, f"{prefix}{name}.")


_SECTIONS: Final[Mapping[str, type[BaseModel]]] = dict(_find_sections(Config))
_MODELS: Final[Mapping[str, type[BaseModel]]] = {**_SECTIONS, "": Config}
_FIELDS: Final = {
    key: field
    for section, model in _MODELS.items()
    for name, field in model.model_fields.items()
    if (key := f"{section}.{name}".lstrip(".")) not in _SECTIONS
}
_LEAVES: Final = frozenset(_FIELDS) - {"tokens"}
_ALLOWED_KEYS: Final = ", ".join([*("tokens.<argument>" if name == "tokens" else name for name in _FIELDS), "config"])
_WORKING_GROUPS: Final = (*_SECTIONS, "tokens")
_GROUPS: Final = frozenset(
    [*_WORKING_GROUPS, *(name.rpartition(".")[0] for name in (*PLANNED_KEYS, *VLLM_ALIASES))]
) - {""}


def _plain_name(key: str) -> str:
    """Return `key` as `VLLM_ALIASES` spells it: `-cc.a` and `--compilation-config.a` are `compilation_config.a`."""
    group, dot, name = key.lstrip("-").replace("-", "_").partition(".")
    return VLLM_SHORT_GROUPS.get(group, group) + dot + name


def _is_working(key: str) -> bool:
    return key in _LEAVES or key.startswith("tokens.")


def _native_key(key: str) -> str:
    """Return our key for a vLLM spelling, and any other key unchanged."""
    return key if _is_working(key) else VLLM_ALIASES.get(_plain_name(key), key)


def _find_planned(key: str) -> str | None:
    """Return the planned key, or group of only planned keys, that `key` names or lies in; None if there is none."""
    for name in PLANNED_KEYS:
        if key == name or key.startswith(f"{name}."):
            return name
    is_group = key not in _WORKING_GROUPS and any(name.startswith(f"{key}.") for name in PLANNED_KEYS)
    return key if is_group else None


def _find_nearest(key: str) -> str | None:
    """Return the known name most like `key`, by whole name and then by last part; None if none is alike."""
    groups = sorted(group for group in _GROUPS if not key.startswith(f"{group}."))
    names = [*_FIELDS, *groups, *PLANNED_KEYS, *VLLM_ALIASES, "config"]
    by_name = {name: name for name in names}
    by_last_part = {name.rpartition(".")[2]: name for name in reversed(names)}
    for wanted, known in ((_plain_name(key), by_name), (key.rpartition(".")[2], by_last_part)):
        if matches := difflib.get_close_matches(wanted, known, n=1, cutoff=0.7):
            return known[matches[0]]
    return None


# --- messages --------------------------------------------------------------------------------------------------------


def _show(value: object) -> str:
    """Return `value` and its type as messages show them: `"4" (str)`; long values are shortened."""
    if not isinstance(value, str):
        text = reprlib.repr(value)
    else:
        text = json.dumps(value if len(value) <= 80 else f"{value[:77]}...", ensure_ascii=False)
    return f"{text} ({type(value).__name__})"


def _describe_unknown(key: str) -> str:
    nearest = _find_nearest(key)
    if nearest is None:
        return f"{key} is not a config key; allowed: {_ALLOWED_KEYS}"
    planned = " (planned, does not work yet)" if _find_planned(_native_key(nearest)) else ""
    return f"{key} is not a config key; did you mean {nearest}{planned}? allowed: {_ALLOWED_KEYS}"


def _describe_key(key: str, spelling: str, value: object) -> str | None:
    """Return what is wrong with the name `key`, which the user wrote as `spelling`; None if it names a field."""
    if _is_working(key):
        return None
    if planned := _find_planned(key):
        alias = "" if spelling == key else f" (given as {spelling})"
        return f"{planned}{alias} is planned and does not work yet; remove it"
    if _plain_name(key) in _GROUPS:
        return f"{key}: got {_show(value)}; allowed: {_describe_allowed(_plain_name(key))}"
    return _describe_unknown(key)


def _describe_allowed(key: str) -> str:
    """Return what the field or group `key` takes."""
    if key in _SECTIONS:
        return f"mapping with the keys {', '.join(_SECTIONS[key].model_fields)}"
    if key.startswith("tokens."):
        return "integer (token dim, may be negative)"
    if key not in _FIELDS:
        return "mapping of vLLM keys"
    return next(mark.text for mark in _FIELDS[key].metadata if isinstance(mark, Allowed))


def _describe_fault(fault: ErrorDetails) -> str:
    """Return one line for one finding of pydantic: field, value, type, and what is allowed."""
    key, value = ".".join(map(str, fault["loc"])), fault["input"]
    if fault["loc"][-1] == "[key]":
        return f"tokens: got the name {_show(value)}; allowed: {_describe_allowed('tokens')}"
    if fault["type"] == "extra_forbidden":
        if _is_working(key):
            return f"{key}: Config takes nested keys; dotted keys are read by load_config"
        planned = _find_planned(key)
        return f"{planned} is planned and does not work yet; remove it" if planned else _describe_unknown(key)
    is_planned = isinstance(value, str) and (key, value) in PLANNED_VALUES
    planned_value = ", which is planned and does not work yet" if is_planned else ""
    return f"{key}: got {_show(value)}{planned_value}; allowed: {_describe_allowed(key)}"


# --- mappings --------------------------------------------------------------------------------------------------------


def _flatten(options: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value); only known groups are opened, so a value that is a mapping stays one."""
    for name, value in options.items():
        if not isinstance(name, str):
            raise ConfigError(f"{prefix.rstrip('.') or 'config'}: got the key {_show(name)}; allowed: keys are strings")
        key = prefix + name
        is_group = _plain_name(key) in _GROUPS and isinstance(value, Mapping)
        if is_group and (value or not _find_planned(key)):
            yield from _flatten(value, f"{key}.")
        else:
            yield key, value


def _nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree of accepted dotted keys; the name of an argument in `tokens` may hold dots of its own."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *groups, name = key.split(".", 1) if key.startswith("tokens.") else key.split(".")
        branch = tree
        for group in groups:
            branch = branch.setdefault(group, {})
        branch[name] = value
    return tree


def _is_same(left: object, right: object) -> bool:
    """Return whether two values are equal and of one type: 4 is neither 4.0 nor True."""
    return type(left) is type(right) and left == right


class _Settings:
    """Keys and values of one source under our names, with the faults of the keys and the notes for the user."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.values: dict[str, Any] = {}
        self.faults: dict[str, None] = {}  # an ordered set: two keys of one planned group make one line
        self.notes: list[str] = []
        self._spellings: dict[str, str] = {}
        for spelling, value in _flatten(options):
            self._add(_native_key(spelling), spelling, value)

    def _add(self, key: str, spelling: str, value: object) -> None:
        if fault := _describe_key(key, spelling, value):
            self.faults[fault] = None
            return
        if key in self.values and not _is_same(self.values[key], value):
            first = f"{_show(self.values[key])} as {self._spellings[key]}"
            self.faults[f"{key}: got {first} and {_show(value)} as {spelling}; allowed: one value"] = None
            return
        self.values[key] = value
        self._spellings[key] = spelling
        if spelling != key:
            self.notes.append(f"{spelling} is read as {key}")

    def build(self, base: Mapping[str, Any], kind: type[_AnyValues], notes: tuple[str, ...] = ()) -> _AnyValues:
        """Return these values over those of `base` as a `kind`; raise one ConfigError with every fault."""
        faults = list(self.faults)
        try:
            config = kind(**_nest({**base, **self.values}))
        except ConfigError as error:
            raise ConfigError("\n".join([*faults, str(error), *self.notes])) from None
        if faults:
            raise ConfigError("\n".join(faults))
        config._notes = (*notes, *self.notes)
        return config


def _load_inline(options: Mapping[str, Any]) -> Config:
    inline = dict(options)
    if "config" not in inline:
        return _Settings(inline).build({}, Config)
    path = inline.pop("config")
    if not isinstance(path, str | Path):
        raise ConfigError(f"config: got {_show(path)}; allowed: path of a file ending in {', '.join(FILE_SUFFIXES)}")
    file_config = _load_file(
        Path(path), _Values
    )  # checked alone first: a fault of the file is not hidden by an inline value
    base = dict(_flatten(file_config.model_dump(exclude_unset=True)))
    settings = _Settings(inline)
    settings.notes += [
        f"{key}: {_show(value)} replaces {_show(base[key])} of {path}"
        for key, value in settings.values.items()
        if key in base and not _is_same(value, base[key])
    ]
    return settings.build(base, Config, file_config.notes)


# --- files -----------------------------------------------------------------------------------------------------------


def _load_file(path: Path, kind: type[_AnyValues]) -> _AnyValues:
    data = _read_file(path)
    if "config" in data:
        raise ConfigError(f"{path}: config: got {_show(data['config'])}; allowed: a file cannot name another file")
    try:
        return _Settings(data).build({}, kind)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _read_file(path: Path) -> Mapping[str, Any]:
    """Return the top-level mapping of a config file; raise ConfigError naming the path if there is none."""
    if os.path.isdir(path):  # unlike Path.is_dir, no OSError for text too long to be a path
        raise ConfigError(f"{path}: is a folder; allowed: a file ending in {', '.join(FILE_SUFFIXES)}")
    if not os.path.exists(path):
        raise ConfigError(f"{path}: no such file (full path: {path.absolute()})")
    if path.suffix.lower() not in FILE_SUFFIXES:
        raise ConfigError(f'{path}: suffix "{path.suffix}" is not known; allowed: {", ".join(FILE_SUFFIXES)}')
    try:
        data = _parse(path.read_text(encoding="utf-8-sig"), path.suffix.lower())
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:  # JSON, TOML, UTF-8: all ValueError
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    if data is None or data == {}:
        raise ConfigError(f"{path}: is empty; allowed: a mapping of config keys")
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path}: got {_show(data)} at the top; allowed: a mapping of config keys")
    return data


def _parse(text: str, suffix: str) -> object:
    if not text.strip():
        return None
    if suffix == ".json":
        return json.loads(text, object_pairs_hook=_unique_pairs)
    if suffix == ".toml":
        return tomllib.loads(text)
    return _parse_yaml(text)


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs of one JSON object as a dict; ValueError if a key comes twice."""
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f'key "{name}" is given twice')
        values[name] = value
    return values


def _parse_yaml(text: str) -> object:
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _check_unique_keys(node, set())  # on the nodes, because building the dict keeps only the last of two keys
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _check_unique_keys(node: yaml.Node, seen: set[int]) -> None:
    """Raise ValueError if a mapping at or below `node` has a key twice; `seen` ends loops made by anchors."""
    if id(node) in seen or not isinstance(node, yaml.CollectionNode):
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        children = node.value
    else:
        children = [value for _, value in node.value]
        _check_unique_names([name for name, _ in node.value])
    for child in children:
        _check_unique_keys(child, seen)


def _check_unique_names(names: list[yaml.Node]) -> None:
    known: set[tuple[str, Hashable]] = set()
    for name in names:
        if not isinstance(name, yaml.ScalarNode):
            continue  # refused when the mapping is built: only strings are config keys
        if (name.tag, name.value) in known:
            raise ValueError(f'key "{name.value}" is given twice, again in line {name.start_mark.line + 1}')
        known.add((name.tag, name.value))
