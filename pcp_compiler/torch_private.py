"""Everything that touches private names of torch; one small function each.

Each is tested in tests/backend/test_torch_private.py.

The names exist in torch 2.11 to 2.14. Keep all private access here, so that a new torch release means one file.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any

import sympy
import torch
import torch._dynamo
import torch.distributed as dist
from torch import fx
from torch._C._distributed_c10d import PrefixStore, Store
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

_EVAL_FRAME_FILE = "_dynamo/eval_frame.py"
TracingFailed = torch._dynamo.exc.Unsupported
"""What Dynamo raises under fullgraph=True for code that it cannot trace."""

_CONVERT_FRAME_FILE = "_dynamo/convert_frame.py"
_EXTERNAL_FILE = "_dynamo/external_utils.py"


@dataclasses.dataclass(frozen=True, slots=True)
class CompileFrame:
    """Where Dynamo was called from: the compiled module or function, and what runs un-compiled in between."""

    target: object
    foreign: traceback.FrameSummary | None


def graph_break(gm: fx.GraphModule) -> traceback.FrameSummary | None:
    """Return the user's line that broke the graph, or None when Dynamo hands over a whole frame."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    stack = reason.user_stack
    return stack[-1] if stack else traceback.FrameSummary("<unknown>", 0, reason.reason)


def compile_frame() -> CompileFrame | None:
    """Walk out from a backend call, or from compiled code, to torch.compile's wrapper; None when there is none."""
    frame: FrameType | None = sys._getframe(1)
    foreign: FrameType | None = None
    seen_convert = False
    while frame is not None:
        path = frame.f_code.co_filename
        if path.endswith(_EVAL_FRAME_FILE) and frame.f_code.co_name == "compile_wrapper":
            summary = None
            if foreign is not None:
                code = foreign.f_code
                summary = traceback.FrameSummary(code.co_filename, foreign.f_lineno, code.co_name)
            return CompileFrame(_unwrap_target(frame.f_locals["fn"]), summary)
        if path.endswith(_CONVERT_FRAME_FILE):
            seen_convert = True
            foreign = None
        elif seen_convert and not path.endswith("torch/nn/modules/module.py"):
            foreign = frame
        frame = frame.f_back
    return None


def compiled_target(compiled: object) -> object:
    """Return the module or function that `torch.compile` was given for this compiled object, None if it is none."""
    wrapper = _compile_wrapper(compiled)
    if isinstance(wrapper, torch._dynamo.eval_frame.OptimizedModule):
        return wrapper._orig_mod
    if inspect.isfunction(wrapper) and "fn" in wrapper.__code__.co_freevars:
        return _unwrap_target(_closure(wrapper)["fn"])
    return None


def compiled_options(compiled: object) -> Mapping[str, object] | None:
    """Return the `options` that a `torch.compile` wrapper hands to its backend; None when it has another backend."""
    wrapper = _compile_wrapper(compiled)
    if isinstance(wrapper, torch._dynamo.eval_frame.OptimizedModule):
        context = wrapper.dynamo_ctx
    elif inspect.isfunction(wrapper) and "self" in wrapper.__code__.co_freevars:
        context = _closure(wrapper)["self"]
    else:
        return None
    for layer in _callbacks(getattr(context, "callback", None)):
        if isinstance(layer, torch._TorchCompileWrapper):
            return layer.kwargs.get("options") or {} if layer.compiler_name == "pcp_spec" else None
    return None


def runs_untraced_under(backend_name: str) -> bool:
    """Return whether plain Python runs now inside a torch.compile wrapper of that backend (it was bypassed)."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith(_EVAL_FRAME_FILE) and frame.f_code.co_name == "compile_wrapper":
            layers = _callbacks(getattr(frame.f_locals["self"], "callback", None))
            return any(getattr(layer, "compiler_name", None) == backend_name for layer in layers)
        frame = frame.f_back
    return False


def open_store(prefix: str) -> Store:
    """Return a new connection to the store through which the processes of torch.distributed met.

    Args:
        prefix: put before all keys.
    """
    store: Any = dist.distributed_c10d._get_default_store()
    return PrefixStore(prefix, store.clone())


def new_backend(library: str, store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Return connections of our own, unknown to torch.distributed's registry, so that they can be made again.

    `new_group` cannot: it names a group by its ranks and finds the old one's keys in the store.

    Returns:
        A `torch.distributed.Backend`, whose methods torch does not type.
    """
    if library != "nccl":
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


def all_gather(backend: Any, received: torch.Tensor, sent: torch.Tensor) -> dist.Work:
    """Start to lay the [n] elements that each rank sends in rank order into [P * n]."""
    work: dist.Work = backend._allgather_base(received, sent)
    return work


def is_last_recompile() -> bool:
    """Return whether this compile would fill Dynamo's cache, after which the original model would run."""
    codes = torch._guards.TracingContext.get_traced_code()
    if not codes:
        return False
    entries = torch._dynamo.eval_frame._debug_get_cache_entry_list(codes[0])
    return len(entries) + 1 >= recompile_limit()


def recompile_limit() -> int:
    """Return how many variants of one code object Dynamo keeps."""
    return int(torch._dynamo.config.recompile_limit)


def errors_are_suppressed() -> bool:
    """Return whether Dynamo would swallow our errors and run the original model."""
    return bool(torch._dynamo.config.suppress_errors)


def source_name(placeholder: fx.Node) -> str:
    """Return the Python expression of a Dynamo placeholder ("L['input_ids']"), or its node name."""
    grapharg = placeholder.meta.get("grapharg")
    source = getattr(grapharg, "source", None)
    if source is None:
        return placeholder.name
    name = source.name
    return str(name() if callable(name) else name)


def source_example(placeholder: fx.Node) -> object:
    """Return the real value behind a Dynamo placeholder; None for sizes."""
    return getattr(placeholder.meta.get("grapharg"), "example", None)


def overrides_dispatch(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's class decides what torch's ops do with it, as DTensor and quantised tensors do."""
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def mutated_inputs() -> list[int]:
    """Return, inside an AOT compiler, positions of the inputs that the model writes in place.

    Their new values are the first results of the graph, in this order.
    """
    metadata = torch._guards.TracingContext.get().fw_metadata
    return [] if metadata is None else list(metadata.mutated_inp_runtime_indices)


def value_was_read(fault: BaseException) -> bool:
    """Return whether an error of tracing means that the model branched on, or took a size from, a tensor's value."""
    symbolic = torch.fx.experimental.symbolic_shapes
    return isinstance(
        fault, (symbolic.GuardOnDataDependentSymNode, torch._subclasses.fake_tensor.DataDependentOutputException)
    )


def devices_differ(fault: BaseException) -> bool:
    """Return whether an error of tracing means that one op got tensors on several devices."""
    return isinstance(fault, torch._subclasses.fake_tensor.FakeTensorDeviceMismatchError)


@contextmanager
def real_tensors() -> Iterator[None]:
    """Compute with real tensors inside an AOT compiler, which is called with a fake mode switched on."""
    with torch.utils._python_dispatch._disable_current_modes():
        yield


@contextmanager
def one_trace_settings() -> Iterator[None]:
    """Settings under which one trace serves every length >= 1 (sizes of 0 and 1 and equal sizes stay symbols)."""
    shapes = torch.fx.experimental._config.patch(backed_size_oblivious=True, use_duck_shape=False)  # type: ignore[attr-defined]
    with shapes, torch._dynamo.config.patch(specialize_float=True):
        yield


def mark_dynamic(tensor: torch.Tensor, dim: int) -> None:
    """Let Dynamo make a size of an input a symbol at its first call."""
    torch._dynamo.mark_dynamic(tensor, dim)


def is_grouped_mm(function: object) -> bool:
    """Return whether a function is what torch.nn.functional.grouped_mm calls, the first that a function mode sees."""
    return function is torch._grouped_mm


def profiler_is_active() -> bool:
    """Return whether a torch profiler records now."""
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]


def is_structured_trace_on() -> bool:
    """Return whether TORCH_TRACE collects artifacts; False on a torch that keeps this elsewhere.

    Until the first artifact of a process torch does not know either, and this is True.
    """
    internal = getattr(torch._logging, "_internal", None)
    return bool(getattr(getattr(internal, "trace_log", None), "handlers", ()))


def add_trace_artifact(name: str, text: str) -> None:
    """Add a text to the log that TORCH_TRACE collects and tlparse shows; warn on a torch that takes it no more."""
    try:
        torch._logging.trace_structured(  # type: ignore[attr-defined]
            "artifact",
            metadata_fn=lambda: {"name": name, "encoding": "string"},
            payload_fn=lambda: text,
            expect_trace_id=False,  # programs of `inspect` belong to no compile of Dynamo's
        )
    except (AttributeError, TypeError) as fault:
        warnings.warn(f"TORCH_TRACE: torch {torch.__version__} does not take {name}: {fault}", stacklevel=2)


@contextmanager
def symbolic_composite_ops() -> Iterator[None]:
    """Let composite ops (linear, matmul) keep sizes symbolic while make_fx traces; torch >= 2.12 does so by itself."""
    if torch.__version__ >= "2.12":  # a TorchVersion, which compares by number
        yield
        return
    from torch._dispatch.python import enable_python_dispatcher

    with enable_python_dispatcher():
        yield


def fake_mode_with_symbols() -> FakeTensorMode:
    """Return a fake mode of our own for make_fx: sizes marked dynamic become symbols, 0 and 1 included."""
    env = ShapeEnv(duck_shape=False, specialize_zero_one=False)
    return FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)


def fake_input(mode: FakeTensorMode, tensor: torch.Tensor, dynamic_dims: frozenset[int], name: str) -> torch.Tensor:
    """Return a fake copy of a tensor whose sizes are symbols at `dynamic_dims` and numbers elsewhere."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    if not dynamic_dims:
        return mode.from_tensor(tensor, static_shapes=True)
    dims = [DimDynamic.DYNAMIC if dim in dynamic_dims else DimDynamic.STATIC for dim in range(tensor.ndim)]
    context: StatelessSymbolicContext[Any, Any] = StatelessSymbolicContext(dims)
    return mode.from_tensor(tensor, source=ConstantSource(name), symbolic_context=context)


def new_row_symbol(mode: FakeTensorMode | None) -> tuple[FakeTensorMode, torch.SymInt]:
    """Return a fake mode and a size of it that has no value: the rows W of a rank, any number from 0 up."""
    if mode is None or mode.shape_env is None:
        mode = fake_mode_with_symbols()
    assert mode.shape_env is not None
    with mode.shape_env.ignore_fresh_unbacked_symbols():
        width = mode.shape_env.create_unbacked_symint()
    torch._check(width >= 0)
    return mode, width


def is_at_most_one(size: int | torch.SymInt) -> bool:
    """Return whether a size is known to be 0 or 1."""
    return bool(torch.fx.experimental.symbolic_shapes.statically_known_true(size <= 1))


def is_number(size: int | torch.SymInt) -> bool:
    """Return whether a size has become a number: it never was a symbol, or tracing fixed it."""
    return isinstance(size, int) or size.node.maybe_as_int() is not None


def size_now(size: int | torch.SymInt) -> object:
    """Return the value of a size in the call that is traced; the symbol when it has none."""
    return size if isinstance(size, int) or size.node.hint is None else size.node.hint


def is_surely_equal(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    """Return whether two sizes are equal, guarding on it when they are symbols with equal values."""
    return bool(torch.fx.experimental.symbolic_shapes.guard_or_false(a == b))


def size_expression(size: int | torch.SymInt) -> sympy.Expr:
    """Return a size as a sympy expression over the graph's symbols."""
    if isinstance(size, torch.SymInt):
        return size.node.expr
    return sympy.Integer(size)


def size_from_expression(mode: FakeTensorMode, expression: sympy.Expr) -> int | torch.SymInt:
    """Return the size of a sympy expression: an int when it is a number."""
    if expression.is_Integer:
        return int(expression)
    assert mode.shape_env is not None
    size = mode.shape_env.create_symintnode(expression, hint=None)
    assert isinstance(size, torch.SymInt)
    return size


def _compile_wrapper(compiled: object) -> object:
    """Return what `torch.compile` returned: the object itself, or what `nn.Module.compile` keeps in the module."""
    if isinstance(compiled, torch.nn.Module) and not isinstance(compiled, torch._dynamo.eval_frame.OptimizedModule):
        return compiled._compiled_call_impl
    return compiled


def _callbacks(callback: object) -> Iterator[object]:
    """Yield a Dynamo callback and what it wraps, outside in."""
    for _ in range(16):
        if callback is None:
            return
        yield callback
        callback = getattr(callback, "_torchdynamo_orig_backend", None) or getattr(
            callback, "_torchdynamo_orig_callable", None
        )


def _unwrap_target(fn: Any) -> object:
    """Return the module behind the bound method that torch.compile calls, or the function itself."""
    if inspect.ismethod(fn):
        return fn.__self__
    # its __module__ and __qualname__ are those of what it wraps
    if inspect.isfunction(fn) and fn.__code__.co_filename.endswith(_EXTERNAL_FILE):
        return _closure(fn).get("fn", fn)
    return fn


def _closure(fn: Callable[..., object]) -> dict[str, Any]:
    cells = fn.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(fn.__code__.co_freevars, cells, strict=True)}
