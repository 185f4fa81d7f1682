"""Tiny targets, checkpoints of random MTP modules in DeepSeek's form, and a stand-in for a paged cache."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import MtpLayer

import smollm2
from pcp_compiler import ops

SMOLLM2_MTP = Path(smollm2.__file__).parent / "drafters" / "smollm2-135m-mtp"

SIZES: Mapping[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64,
    "max_position_embeddings": 128, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}  # fmt: skip
GROUPED: Mapping[str, Any] = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
LATENT: Mapping[str, Any] = {
    **SIZES, "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 10, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6, "v_head_dim": 8, "moe_intermediate_size": 24, "n_routed_experts": 4, "n_group": 2,
    "topk_group": 1, "num_experts_per_tok": 2,
}  # fmt: skip
FAMILY_SIZES: Mapping[str, Mapping[str, Any]] = {
    "llama": GROUPED,
    "qwen3": GROUPED,
    "deepseek_v3": {**LATENT, "first_k_dense_replace": 1},
    "glm4_moe_lite": {**LATENT, "mlp_layer_types": ["dense", "sparse"]},
}
CLASSES = {"llama": "Llama", "qwen3": "Qwen3", "deepseek_v3": "DeepseekV3", "glm4_moe_lite": "Glm4MoeLite"}


class GrowingKV(TorchDispatchMode):
    """Runs `pcp::attention` with the key and value rows of the calls before it, as a cache would; counts the calls."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows: dict[int, tuple[Tensor, Tensor]] = {}
        self.num_calls = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not ops.ATTENTION:
            return func(*args, **(kwargs or {}))
        assert kwargs is not None
        self.num_calls += 1
        q, k, v, mask, q_rows = args
        assert mask is None
        assert q_rows is None
        before = self.rows.get(kwargs["layer"])
        if before is not None:
            k, v = torch.cat([before[0], k], dim=1), torch.cat([before[1], v], dim=1)
        self.rows[kwargs["layer"]] = (k, v)
        return ops.attention(q, k, v, None, torch.arange(k.shape[1] - q.shape[1], k.shape[1]), **kwargs)


@dataclass(frozen=True)
class Made:
    """A tiny target and a checkpoint of MTP modules for it, with the modules that the checkpoint was made from."""

    target: Any
    folder: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    references: list[MtpLayer]

    def write(self) -> Path:
        """Write config and tensors as they are now; return the folder."""
        (self.folder / "config.json").write_text(json.dumps(self.config), encoding="utf-8")
        save_file({name: value.contiguous() for name, value in self.tensors.items()}, self.folder / "model.safetensors")
        return self.folder

    def draft(self, **changes: object) -> dict[str, object]:
        """Return a section `draft` that names the folder."""
        return {"method": "mtp", "model": str(self.folder), **changes}


def random_weights(module: nn.Module) -> None:
    """Give every weight a value that shows: none is 0 or 1, norms are not alike."""
    for weight in module.parameters():
        nn.init.normal_(weight, mean=0.5 if weight.dim() == 1 else 0.0, std=0.25)
    for name, value in module.named_buffers():
        if name.endswith("e_score_correction_bias"):
            nn.init.normal_(value, std=0.2)


def tiny_target(family: str, **changes: Any) -> Any:
    """Return a random causal language model of two layers."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**FAMILY_SIZES[family], **changes})
    model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    random_weights(model)
    return model.eval()


def stored_tensors(reference: MtpLayer, number: int) -> dict[str, Tensor]:
    """Return the weights of a module of transformers under the names of DeepSeek's checkpoints, expert by expert."""
    stored = {}
    for name, value in reference.state_dict().items():
        short = name.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
        short = name.removeprefix("mtp_block.") if name.startswith("mtp_block.") else short
        base = f"model.layers.{number}."
        if not short.startswith("mlp.experts."):
            stored[base + short] = value
            continue
        for expert, rows in enumerate(value):
            expert_base = f"{base}mlp.experts.{expert}."
            if short.endswith("down_proj"):
                stored[f"{expert_base}down_proj.weight"] = rows
            else:
                gate, up = rows.chunk(2)
                stored |= {f"{expert_base}gate_proj.weight": gate, f"{expert_base}up_proj.weight": up}
    return stored


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Made]:
    """Return a function that makes a target of a family and writes a checkpoint of random MTP modules for it."""

    def make_checkpoint(family: str = "llama", num_modules: int = 1, **changes: Any) -> Made:
        target = tiny_target(family, **changes)
        mtp_config = AutoConfig.for_model(family, **{**FAMILY_SIZES[family], **changes})
        mtp_config._attn_implementation = "sdpa"
        mtp_config.first_k_dense_replace = 0
        mtp_config.mlp_layer_types = ["sparse"] * num_modules
        modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        layer_class = getattr(modeling, f"{CLASSES[family]}DecoderLayer")
        norm_class = getattr(modeling, f"{CLASSES[family]}RMSNorm")
        references = [MtpLayer(mtp_config, layer_class, norm_class, number) for number in range(num_modules)]
        tensors: dict[str, Tensor] = {}
        for number, reference in enumerate(references):
            random_weights(reference)
            tensors |= stored_tensors(reference.eval(), target.config.num_hidden_layers + number)
        config = {**target.config.to_dict(), "num_nextn_predict_layers": num_modules}
        config.pop("num_mtp_layers", None)
        made = Made(target, tmp_path, config, tensors, references)
        made.write()
        return made

    return make_checkpoint


@pytest.fixture(scope="session")
def smollm2_target() -> Any:
    """SmolLM2-135M-Instruct in float32."""
    return smollm2.load_model()


@pytest.fixture(scope="session")
def golden() -> dict[str, Tensor]:
    """The tensors of the drafter's golden file, ids as int64."""
    tensors = load_file(SMOLLM2_MTP / "golden.safetensors")
    return {name: value.long() if value.dtype == torch.int32 else value for name, value in tensors.items()}


@pytest.fixture
def smollm2_mtp() -> Path:
    """Folder of the MTP drafter among the examples."""
    return SMOLLM2_MTP


@pytest.fixture
def growing_kv() -> GrowingKV:
    """An empty cache."""
    return GrowingKV()


@pytest.fixture
def build_target() -> Callable[..., Any]:
    """The function that makes tiny targets."""
    return tiny_target
