"""The `Config` tree: how options are read from a dict or a file, and what is refused; the groups are `config_sections`.

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
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    PlainSerializer,
    PrivateAttr,
    ValidationError,
)
from pydantic_core import ErrorDetails

from pcp_compiler.config_sections import (
    Allowed,
    AttentionConfig,
    CaptureConfig,
    CheckConfig,
    DraftConfig,
    DumpConfig,
    LimitsConfig,
    ParallelConfig,
    Section,
    TokenDims,
)
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


class _Values(Section):
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
    for group, section, switch in (("draft", draft, "method"), ("capture", config.capture, "mode")):
        given = [name for name in type(section).model_fields if name in section.model_fields_set]
        if given and switch not in given:
            others = ", ".join(f"{group}.{name}" for name in given)
            key = f"{group}.{switch}"
            yield f"{key}: not given beside {others}; allowed: {_describe_allowed(key)}"
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
