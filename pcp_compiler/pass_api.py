"""What a pass is: a named, frozen rewrite of one graph with its conditions before and after."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from pcp_compiler.config import Config
from pcp_compiler.errors import UnsupportedGraphError
from pcp_compiler.trace import source_line


@dataclass(frozen=True, slots=True)
class CallCheck:
    """A property of a caller's input that a rewrite relied on; checked on every call."""

    input_name: str
    kind: str
    reason: str


@dataclass(slots=True)
class Decisions:
    """What the passes chose, for `decisions.json`, and what every call has to check."""

    entries: dict[str, list[str]] = field(default_factory=dict)
    call_checks: list[CallCheck] = field(default_factory=list)

    def add(self, topic: str, text: str) -> None:
        """Note one decision under a topic."""
        self.entries.setdefault(topic, []).append(text)


@dataclass(frozen=True, slots=True)
class RowMetadata:
    """That each row of a program is a request of its own, so that attention metadata is made in the graph."""

    position_input: str
    """Input [1, N] with the position of each row."""
    max_model_len: int
    """Rows at this position or above write nothing."""


@dataclass(frozen=True, slots=True)
class DraftChain:
    """A drafter's step as part of a proposal: what `unroll_draft` has to know of its inputs, beside the positions.

    The step takes token ids and hidden states, [1, N] and [1, N, H], and returns hidden states [L, H] and logits [L, V]
    of the rows that `row_input` [L] picks.
    """

    num_draft_tokens: int
    """K, >= 1."""
    is_greedy: bool
    """Whether the most likely token is taken; otherwise the program takes temperatures and keys of draws."""
    token_input: str
    hidden_input: str
    row_input: str


@dataclass(frozen=True, slots=True)
class Phase:
    """What a program is for: which rows it runs and what it keeps between calls."""

    name: str = "prefill"
    is_sharded: bool = True
    """Whether each rank runs its own rows; otherwise every rank runs all of them."""
    block_size: int | None = None
    """Slots of a KV block; None: the program has no cache."""
    has_fp8_kv: bool = False
    """Whether keys and values are stored in eight bits."""
    local_inputs: frozenset[str] = frozenset()
    """Token inputs that hold this rank's rows only."""
    local_outputs: frozenset[int] = frozenset()
    """Results that stay this rank's rows."""
    rows: RowMetadata | None = None
    """None: the host says with spans what each row sees."""
    chain: DraftChain | None = None
    """Of a program that runs a whole proposal; with `rows`."""
    is_captured: bool = False
    """Whether the whole program, attention included, may become a captured graph."""
    has_few_rows: bool = False
    """Whether the program serves steps of decode rows only."""
    is_split: bool = False
    """Whether the program is cut into segments, which are captured one by one."""
    splitting_ops: tuple[str, ...] = ()
    """More ops to cut at, see `passes.split_segments`."""


@dataclass(frozen=True, slots=True)
class PassContext:
    """All that a pass may read besides the graph."""

    config: Config
    seeds: Mapping[str, int]
    position_inputs: frozenset[str] = frozenset()
    user_inputs: frozenset[str] = frozenset()
    decisions: Decisions = field(default_factory=Decisions)
    phase: Phase = Phase()


class PassResult(NamedTuple):
    """The rewritten graph, which is the one given, edited, and how many places changed."""

    graph_module: fx.GraphModule
    num_rewrites: int


class Pass(ABC):
    """One rewrite. Subclasses are frozen dataclasses; their fields are their options."""

    name: ClassVar[str]
    keeps_signature: ClassVar[bool] = True
    keeps_numerics: ClassVar[bool] = True

    @abstractmethod
    def __call__(self, gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        """Rewrite `gm` in place."""

    def requires(self, gm: fx.GraphModule, ctx: PassContext) -> None:  # noqa: B027 - optional for a pass
        """Raise UnsupportedGraphError when the graph cannot be rewritten: node, reason, knob."""

    def ensures(self, gm: fx.GraphModule, ctx: PassContext) -> None:  # noqa: B027 - optional for a pass
        """Raise InvariantError when the job is not done."""


def refuse(node: fx.Node, reason: str, knob: str) -> UnsupportedGraphError:
    """Return the error for a node that cannot be sharded: what, where in the user's code, what to change."""
    return UnsupportedGraphError(f"{node.name} ({node.target}): {reason}\n  at {source_line(node)}\n  {knob}")


def erase_unused(gm: fx.GraphModule) -> int:
    """Erase nodes that nobody uses and that change nothing; return how many.

    FX's own dead-code elimination asks a module-level table whether a node is impure and drops in-place method calls;
    here only calls of ops with a pure schema go, and placeholders and collectives always stay.
    """
    unused = unused_nodes(gm)
    for node in unused:
        gm.graph.erase_node(node)
    return len(unused)


def unused_nodes(gm: fx.GraphModule) -> list[fx.Node]:
    """Return the nodes that `erase_unused` would erase, users before what they use."""
    unused: dict[fx.Node, None] = {}
    for node in reversed(gm.graph.nodes):
        if node.op in ("call_function", "get_attr") and not _has_effect(node) and all(u in unused for u in node.users):
            unused[node] = None
    return list(unused)


def _has_effect(node: fx.Node) -> bool:
    if node.op == "get_attr":
        return False
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return not _is_size_arithmetic(node)
    return schema.is_mutable or node.target in fx.node._side_effectful_functions


def _is_size_arithmetic(node: fx.Node) -> bool:
    module = getattr(node.target, "__module__", "")
    return module in ("_operator", "math") or getattr(node.target, "__name__", "").startswith("sym_")


def calls(gm: fx.GraphModule, *targets: object) -> Iterator[fx.Node]:
    """Yield the call_function nodes of these targets in graph order; safe to edit while iterating."""
    wanted = set(targets)
    yield from [node for node in gm.graph.nodes if node.op == "call_function" and node.target in wanted]


def add_index_input(graph: fx.Graph, role: str, value: Tensor) -> fx.Node:
    """Add a placeholder for an index tensor behind the others."""
    last = graph.find_nodes(op="placeholder")[-1]
    with graph.inserting_after(last):
        node = graph.placeholder(role)
    node.meta.update(val=value, index_input=role)
    return node


def add_call(
    graph: fx.Graph, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None = None,
    name: str | None = None,
) -> fx.Node:  # fmt: skip
    """Add a call at the insertion point, with the value that the op gives for the values of its inputs."""
    node = graph.create_node("call_function", target, args, kwargs or {}, name=name)
    values, named = fx.map_arg((args, kwargs or {}), lambda source: source.meta["val"])
    tensors = [value for value in tree_leaves((values, named)) if isinstance(value, Tensor)]
    mode = next((mode for value in tensors if (mode := getattr(value, "fake_mode", None))), None)
    with mode or nullcontext():
        node.meta["val"] = target(*values, **named)
    return node


def copy_meta(source: fx.Node, target: fx.Node) -> None:
    """Give a new node the source line and module path of the node it stands for."""
    for key in ("stack_trace", "nn_module_stack"):
        if key in source.meta and key not in target.meta:
            target.meta[key] = source.meta[key]
