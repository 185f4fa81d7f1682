"""Multi-token-prediction modules: one decoder layer that turns (next token, hidden state) into the next hidden state.

Row i of the first module combines the target's hidden state of position i with the token at i+1 and predicts the token
at i+2. A single module is used again for every draft, fed with its own output; of several modules, module m drafts
token m from the output of module m-1, and each has key and value rows of its own.

Checkpoint form: DeepSeek-V3's. Module m is layer `num_hidden_layers + m`; embedding and output matrix are in the file
or shared with the target.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pcp_compiler.drafters import checkpoint, layers, transformers_layer
from pcp_compiler.drafters.base import Capabilities, Drafter, TargetParts
from pcp_compiler.drafters.checkpoint import CONFIG, Shape, StoredTensor, read_choice, read_int, read_number
from pcp_compiler.errors import ConfigError

PLAIN_FAMILIES = ("llama", "qwen3")
FAMILIES = (*PLAIN_FAMILIES, *transformers_layer.CLASS_PREFIXES)
_OWN_PARTS = ("enorm", "hnorm", "eh_proj", "shared_head", "embed_tokens")
_FLOAT32_WEIGHTS = (".mlp.gate.weight", ".e_score_correction_bias")  # the router's; transformers keeps them so too
_OUTER_TENSORS = ("model.embed_tokens.", "model.norm.", "lm_head.")


@dataclass(frozen=True, slots=True)
class MTPForm:
    """What a drafter's config says about its modules, apart from the decoder layer."""

    family: str
    hidden: int
    first_layer: int
    num_modules: int
    eps: float
    zero_first_embedding: bool
    recycles_normed: bool
    shares_embedding: bool
    shares_head: bool

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> MTPForm:
        """Return the form that a config.json states; the fields `mtp_*` may be left out.

        Raises:
            ConfigError: a family, an order or a convention that we do not have.
        """
        family = str(config.get("model_type")).removesuffix("_mtp")
        if family not in FAMILIES:
            raise ConfigError(
                f"{CONFIG}: model_type: got {config.get('model_type')!r}; allowed: {', '.join(FAMILIES)}, "
                "each also with _mtp behind it"
            )
        read_choice(config, "mtp_hidden_state", ["post_final_norm"])
        read_choice(config, "mtp_position", ["hidden_state_index"])
        read_choice(config, "mtp_concat_order", [["embedding", "hidden_state"]])
        recycled = read_choice(config, "mtp_recycled_hidden_state", ["post_shared_head_norm", "pre_shared_head_norm"])
        modules = "num_mtp_layers" if "num_mtp_layers" in config else "num_nextn_predict_layers"
        return cls(
            family, read_int(config, "hidden_size"), read_int(config, "num_hidden_layers"), read_int(config, modules),
            read_number(config, "rms_norm_eps", 1e-6),
            zero_first_embedding=read_choice(config, "mtp_zero_embedding_at_position_zero", [True, False]),
            recycles_normed=recycled == "post_shared_head_norm",
            shares_embedding=read_choice(config, "shares_target_embedding", [True, False]),
            shares_head=read_choice(config, "shares_target_lm_head", [True, False]),
        )  # fmt: skip


class SharedHead(nn.Module):
    """The norm in front of the output matrix, and the matrix."""

    def __init__(self, hidden: int, eps: float, head: nn.Module) -> None:
        super().__init__()
        self.norm = layers.RMSNorm(hidden, eps)
        self.head = head


class MTPModule(nn.Module):
    """One module. Its attention is causal over the rows of the call; row order is position order.

    Args:
        embed_tokens, head: own ones, or the target's, which are then the same objects.
        rotary: (x, positions) -> (cos, sin). layer: decoder layer with the signature of `layers.DecoderLayer`.
    """

    def __init__(
        self, form: MTPForm, embed_tokens: nn.Module, head: nn.Module, rotary: nn.Module, layer: nn.Module
    ) -> None:
        super().__init__()
        self.form = form
        self.enorm = layers.RMSNorm(form.hidden, form.eps)
        self.hnorm = layers.RMSNorm(form.hidden, form.eps)
        self.eh_proj = nn.Linear(2 * form.hidden, form.hidden, bias=False)
        self.layer = layer
        self.rotary = rotary
        self.embed_tokens = embed_tokens
        self.shared_head = SharedHead(form.hidden, form.eps, head)

    def forward(self, next_ids: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        """Return the hidden states that stand for the next position.

        Args:
            next_ids: [B, T] integers, for row i the token at position i+1.
            hidden: [B, T, H], the target's hidden state of position i after its final norm, or, in later draft steps,
                what this method returned for the row before.
            positions: [B, T] integers, i.
        Returns:
            [B, T, H], to be given to `compute_logits` and to the next step.
        """
        embedded = self.embed_tokens(next_ids)
        if self.form.zero_first_embedding:
            # by position: a shard or a chunk starts anywhere in the sequence
            nothing = torch.zeros((), dtype=embedded.dtype, device=embedded.device)
            embedded = torch.where((positions == 0)[..., None], nothing, embedded)
        x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
        x = self.layer(x, position_embeddings=self.rotary(x, positions), attention_mask=None)
        out: Tensor = self.shared_head.norm(x) if self.form.recycles_normed else x
        return out

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return logits [.., V] of what `forward` returned, [.., H]."""
        if not self.form.recycles_normed:
            hidden = self.shared_head.norm(hidden)
        logits: Tensor = self.shared_head.head(hidden)
        return logits


class MTPDrafter(Drafter):
    """The MTP modules of one checkpoint.

    Args:
        has_own_embedding, has_own_head: whether they are the file's and not the target's.
    """

    def __init__(
        self, modules: list[MTPModule], *, has_own_embedding: bool, has_own_head: bool, max_positions: int | None
    ) -> None:
        super().__init__()
        self.mtp = nn.ModuleList(modules)
        self.training = self.mtp.training = False  # not by eval(), which would reach the target's embedding
        self._capabilities = Capabilities(
            method="mtp", row_form="next_token_and_hidden", attention_kinds=("full",), needs_hidden=True,
            has_own_embedding=has_own_embedding, has_own_head=has_own_head, max_positions=max_positions,
            hidden_size=modules[0].form.hidden, vocab_size=_num_logits(modules[0]),
            # a later module's key and value rows come from its own inputs, so module m drafts token m only
            max_draft_tokens=None if len(modules) == 1 else len(modules),
        )  # fmt: skip

    @property
    def capabilities(self) -> Capabilities:
        """See `Drafter`."""
        return self._capabilities

    def module_of_step(self, step: int) -> MTPModule:
        """Return the only module, or module number `step`."""
        module = self.mtp[0 if len(self.mtp) == 1 else step]
        assert isinstance(module, MTPModule)
        return module

    def forward(self, next_ids: Tensor, hidden: Tensor, positions: Tensor, step: int = 0) -> Tensor:
        """Run the module of a step; see `MTPModule.forward`."""
        out: Tensor = self.module_of_step(step)(next_ids, hidden, positions)
        return out

    def compute_logits(self, hidden: Tensor, step: int = 0) -> Tensor:
        """See `Drafter`."""
        return self.module_of_step(step).compute_logits(hidden)


def _num_logits(module: MTPModule) -> int:
    weight = module.shared_head.head.weight
    assert isinstance(weight, Tensor)
    return weight.shape[0]


# ---------------------------------------------------------------------------------------------------------------------
# Loading


def load_mtp(parts: TargetParts, folder: Path) -> MTPDrafter:
    """Return the MTP modules in a folder: of their own, or the target's whole checkpoint that also holds them.

    Weights take type and device of the target's embedding; the target is left as it is.

    Raises:
        ConfigError: config or tensors are at fault, or do not fit the target. ImportError: the extra `hf` is missing.
    """
    config = checkpoint.read_config(folder)
    form = MTPForm.from_config(config)
    _check_fits_target(config, form, parts)
    files = checkpoint.list_files(folder)
    _check_names(files, form)
    numbers = range(form.first_layer, form.first_layer + form.num_modules)
    own_parts: set[str] = set()
    modules = []
    for number in numbers:
        prefix = f"model.layers.{number}."
        headers = checkpoint.read_headers({name: file for name, file in files.items() if name.startswith(prefix)})
        own_parts |= {name.removeprefix(prefix) for name in headers}
        modules.append(_load_module(config, form, parts, number, headers))
    return MTPDrafter(
        modules, has_own_embedding="embed_tokens.weight" in own_parts,
        has_own_head="shared_head.head.weight" in own_parts, max_positions=config.get("max_position_embeddings"),
    )  # fmt: skip


def _check_fits_target(config: Mapping[str, Any], form: MTPForm, parts: TargetParts) -> None:
    target_family = parts.config.model_type
    if form.family != target_family:
        raise ConfigError(
            f"draft.model: {CONFIG}: model_type: {form.family!r} in the drafter and {target_family!r} in the target; "
            "allowed: equal families"
        )
    checkpoint.check_fit(config, parts.config.to_dict(), ["hidden_size", "vocab_size", "num_hidden_layers"])


def _check_names(files: Mapping[str, Path], form: MTPForm) -> None:
    """Refuse tensors that are neither in the modules nor in a target: a misspelt name, or one module too many."""
    num_layers = form.first_layer + form.num_modules
    extra = [name for name in files if not _is_in_model(name, num_layers)]
    if extra:
        checkpoint.check_tensors(checkpoint.read_headers({name: files[name] for name in extra}), {})


def _is_in_model(name: str, num_layers: int) -> bool:
    """Return whether a tensor belongs to a target and its modules, which together have `num_layers` layers."""
    if layer := re.match(r"model\.layers\.(\d+)\.", name):
        return int(layer[1]) < num_layers
    return name.startswith(_OUTER_TENSORS)


def _load_module(config: Mapping[str, Any], form: MTPForm, parts: TargetParts, number: int,
                 headers: Mapping[str, StoredTensor]) -> MTPModule:  # fmt: skip
    prefix = f"model.layers.{number}."
    module = _build_module(config, form, parts, number)
    shapes = {prefix + _stored_name(name): tuple(value.shape) for name, value in module.state_dict().items()}
    optional: dict[str, Shape] = {}
    if form.shares_embedding:
        optional |= {f"{prefix}embed_tokens.weight": shapes.pop(f"{prefix}embed_tokens.weight")}
    if form.shares_head:
        optional |= {f"{prefix}shared_head.head.weight": shapes.pop(f"{prefix}shared_head.head.weight")}
    checkpoint.check_tensors(headers, split_experts(shapes, headers), optional)
    weight = parts.embedding.weight
    tensors = stack_experts(checkpoint.read_tensors(headers), shapes)
    tensors = checkpoint.cast(tensors, weight.dtype, weight.device, keep_float32=_FLOAT32_WEIGHTS)
    module.load_state_dict(
        {_module_name(name.removeprefix(prefix)): value for name, value in tensors.items()}, strict=False, assign=True
    )
    module.rotary.to(weight.device)
    module.eval().requires_grad_(False)
    if f"{prefix}embed_tokens.weight" not in headers:
        module.embed_tokens = parts.embedding
    if f"{prefix}shared_head.head.weight" not in headers:
        module.shared_head.head = parts.head
    assert not any(value.is_meta for value in module.state_dict().values())
    return module


def _build_module(config: Mapping[str, Any], form: MTPForm, parts: TargetParts, number: int) -> MTPModule:
    """Return a module whose weights have shapes and no data, with an embedding and a head of its own."""
    if form.family in PLAIN_FAMILIES:
        shape = layers.LayerShape.from_config(config, form.family)
        rotary: nn.Module = layers.RotaryEmbedding(config, shape.head_dim)
        with torch.device("meta"):
            layer: nn.Module = layers.DecoderLayer(shape, number)
    else:
        layers.check_rope_type(config)
        experts = getattr(parts.config, "_experts_implementation", None)
        rotary, layer = transformers_layer.build_layer(config, form.family, number, experts)
    with torch.device("meta"):
        embedding = nn.Embedding(parts.vocab_size, form.hidden)
        head = nn.Linear(form.hidden, parts.vocab_size, bias=False)
        return MTPModule(form, embedding, head, rotary, layer)


def _stored_name(name: str) -> str:
    """Return the checkpoint's name, behind its prefix, of a weight of `MTPModule`."""
    return name.removeprefix("layer.")


def _module_name(stored: str) -> str:
    """Undo `_stored_name`."""
    return stored if stored.startswith(_OWN_PARTS) else f"layer.{stored}"


def split_experts(shapes: Mapping[str, Shape], found: Mapping[str, StoredTensor]) -> dict[str, Shape]:
    """Return the shapes of tensors as a checkpoint has them, expert by expert where the layer has them stacked.

    Args:
        shapes: `mlp.experts.gate_up_proj` [E, 2*I, H] and `mlp.experts.down_proj` [E, H, I], and any others.
        found: what the file holds; a stacked tensor that is in it stays as it is.
    """
    split: dict[str, Shape] = {}
    for name, shape in shapes.items():
        if ".mlp.experts." not in name or name in found:
            split[name] = shape
            continue
        base, kind = name.rsplit(".", 1)
        num_experts, rows, columns = shape
        parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
        for expert in range(num_experts):
            split |= {f"{base}.{expert}.{part}.weight": (rows // len(parts), columns) for part in parts}
    return split


def stack_experts(tensors: Mapping[str, Tensor], shapes: Mapping[str, Shape]) -> dict[str, Tensor]:
    """Return the tensors with the experts of a checkpoint stacked; undoes `split_experts`."""
    stacked = {name: value for name, value in tensors.items() if name in shapes or ".mlp.experts." not in name}
    for name, shape in shapes.items():
        if ".mlp.experts." not in name or name in stacked:
            continue
        base, kind = name.rsplit(".", 1)
        parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
        stacked[name] = torch.stack([
            torch.cat([tensors[f"{base}.{expert}.{part}.weight"] for part in parts]) for expert in range(shape[0])
        ])  # fmt: skip
    return stacked
