"""pcp_compiler: Prefill Context Parallelism and speculative decoding as a compiler over torch.fx graphs.

    torch.compile(model, backend="pcp_spec", dynamic=True, options={"parallel": {"pcp_size": 4}})

The public names are imported on first use, so that `import pcp_compiler.plan.partition` stays light.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pcp_compiler.api import assert_sharded, attention, compilations, compile, inspect
    from pcp_compiler.config import Config, load_config
    from pcp_compiler.placement import register_placement
    from pcp_compiler.runtime.decoder import SpeculativeDecoder
    from pcp_compiler.runtime.generation import Generation
    from pcp_compiler.runtime.sampling import SamplingParams

_HOMES = {
    "assert_sharded": "api", "attention": "api", "compilations": "api", "compile": "api", "inspect": "api",
    "Config": "config", "load_config": "config", "register_placement": "placement",
    "Generation": "runtime.generation", "SamplingParams": "runtime.sampling", "SpeculativeDecoder": "runtime.decoder",
}  # fmt: skip

__all__ = [
    "Config", "Generation", "SamplingParams", "SpeculativeDecoder", "assert_sharded", "attention", "compilations",
    "compile", "inspect", "load_config", "register_placement",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pcp_compiler' has no attribute {name!r}")
    return getattr(import_module(f"pcp_compiler.{_HOMES[name]}"), name)
