"""Everything that shardpass uses of torch and that torch does not document.

A new release of torch may break this file and no other. `tests/core/test_torch_private.py` checks what each name does,
and that no other file uses such names.
"""

from __future__ import annotations

import logging
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._C import _len_torch_dispatch_stack
from torch.multiprocessing.reductions import StorageWeakRef as StorageWeakRef
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._pytree import tree_unflatten as tree_unflatten
from torch.utils.checkpoint import _StopRecomputationError
from torch.utils.weak import WeakTensorKeyDictionary as WeakTensorKeyDictionary

Function = TypeVar("Function", bound=Callable[..., Any])
AnyBatchNorm = _BatchNorm
"""The class of what normalises by the moments of a batch."""
RecomputationStops = _StopRecomputationError
"""Ends the recomputation of `torch.utils.checkpoint`, once it has what it wanted."""
DisableTorchFunction = torch._C.DisableTorchFunction
"""A block in which neither subclasses nor function modes see what torch functions are called."""
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
"""A block in which subclasses do not see what torch functions are called; function modes do."""
NO_TORCH_FUNCTION = torch._C._disabled_torch_function_impl
"""The `__torch_function__` of a subclass that only wants to see primitive operations."""
RECORD_ENTER = torch.ops.profiler._record_function_enter_new.default
"""The operator with which a `torch.profiler.record_function` block begins, as a dispatch mode is given it."""
RECORD_EXIT = torch.ops.profiler._record_function_exit._RecordFunction
"""The operator with which it ends."""


_LEAVES = (Tensor, str, int, float)


def tree_leaves(value: Any) -> list[Any]:
    """As ``tree_leaves`` of torch, in a fifth of its time for what is mostly given."""
    found: list[Any] = []
    _add_leaves(value, found)
    return found


def _add_leaves(value: Any, found: list[Any]) -> None:
    kind = type(value)
    if kind is tuple or kind is list or kind is dict:
        for one in value.values() if kind is dict else value:
            _add_leaves(one, found)
    elif value is None or isinstance(value, _LEAVES):
        found.append(value)
    else:
        found += _pytree.tree_leaves(value)


def version_of(tensor: Tensor) -> int:
    """How often `tensor`, or a tensor that shares its memory, was changed in place; -1 for an inference tensor."""
    return -1 if tensor.is_inference() else tensor._version


def base_of(tensor: Tensor) -> Tensor:
    """The tensor of which `tensor` is a view, or `tensor` itself."""
    return tensor if tensor._base is None else tensor._base


def storage_number(storage: torch.UntypedStorage) -> int:
    """A number that tells `storage` from all others that are alive."""
    return storage._cdata


def storage_of(tensor: Tensor) -> tuple[int, StorageWeakRef] | None:
    """The number of the storage of `tensor` and a weak reference to it; `None` for a tensor without one."""
    with suppress(NotImplementedError, RuntimeError):  # of sparse tensors, for example
        storage = tensor.untyped_storage()
        return storage_number(storage), StorageWeakRef(storage)
    return None


def node_number(node: torch.autograd.graph.Node) -> int:
    """How many autograd nodes this thread made before `node`."""
    return node._sequence_nr()  # type: ignore[attr-defined, no-any-return]


def is_asked_for(node: Any) -> bool:
    """Whether the backward that runs goes on to a node of its graph; `None` stands for a tensor without gradient."""
    with suppress(RuntimeError):  # torch does not tell of a leaf that ``autograd.grad`` was given
        return node is not None and bool(torch._C._will_engine_execute_node(node))
    return True


def next_node_number() -> int:
    """A number that is larger than that of any autograd node this thread has made."""
    return node_number((torch.ones((), requires_grad=True) * 1).grad_fn)  # type: ignore[arg-type]


def saved_tensor_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """The innermost pair of saved-tensor hooks that is active in this thread, or `None`."""
    hooks: tuple[Callable[..., Any], Callable[..., Any]] | None
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)  # type: ignore[attr-defined]
    return hooks


def has_forward_hook(module: nn.Module, hook: Callable[..., Any] | None = None) -> bool:
    """Whether `hook` is a forward pre-hook of `module`; without `hook`, whether it has any forward hook or pre-hook."""
    if hook is not None:
        return hook in module._forward_pre_hooks.values()
    return bool(module._forward_pre_hooks or module._forward_hooks)


def has_hook(module: nn.Module) -> bool:
    """Whether `module` has any hook that is called when it runs forward or backward."""
    return has_forward_hook(module) or bool(module._backward_pre_hooks or module._backward_hooks)


def has_any_forward_hook() -> bool:
    """Whether there is a forward hook or pre-hook of all modules."""
    hooks = torch.nn.modules.module
    return bool(hooks._global_forward_pre_hooks or hooks._global_forward_hooks)


def modules_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The modules that `module` itself holds, by name; changing the dict changes the module."""
    return module._modules


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """The buffers of `module` itself by name; changing the dict changes the module."""
    return module._buffers


def backward_hooks(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """The hooks of `module` that see gradients; changing the dicts changes the module."""
    return module._backward_pre_hooks, module._backward_hooks


def forward_hooks(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """The hooks of `module` that are called before and after its forward; changing the dicts changes the module."""
    return module._forward_pre_hooks, module._forward_hooks


def function_of(node: Any) -> type | None:
    """The `torch.autograd.Function` whose backward a node of the graph runs; `None` for a node of torch's own."""
    return getattr(node, "_forward_cls", None)


def is_batched(tensor: Tensor) -> bool:
    """Whether ``torch.autograd.grad(..., is_grads_batched=True)`` made `tensor`, which stands for several."""
    return torch._C._functorch.is_batchedtensor(tensor) or torch._C._functorch.is_legacy_batchedtensor(tensor)


def unwrapped(tensor: Tensor) -> Tensor:
    """The tensor that transforms of ``torch.func`` have wrapped, which operations see."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The parameters of `module` itself by name; changing the dict changes the module."""
    return module._parameters


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The modules that are attributes of `module`, by name; changing the dict changes the module."""
    return module._modules


def dispatch_modes() -> list[Any]:
    """The dispatch modes that are on in this thread, the innermost last."""
    return list(_get_current_dispatch_mode_stack())


def function_modes() -> list[Any]:
    """The function modes that are on in this thread, the innermost last."""
    return list(_get_current_function_mode_stack())


def is_profiled() -> bool:
    """Whether a profiler of torch is on."""
    return bool(torch._C._autograd._profiler_enabled())  # type: ignore[attr-defined]


def span(name: str) -> AbstractContextManager[Any]:
    """A block that a profiler, or a dispatch mode, sees under this name. It costs nothing where there is neither."""
    is_seen = is_profiled() or _len_torch_dispatch_stack() > 0
    return torch.profiler.record_function(name) if is_seen else nullcontext()


def is_mutable(operator: Any) -> bool:
    """Whether an operator, as a dispatch mode is given it, may write into an operand."""
    return bool(operator._schema.is_mutable)


def is_view(operator: Any) -> bool:
    """Whether an operator, as a dispatch mode is given it, returns a tensor that shares the memory of an operand."""
    returned = [value.alias_info for value in operator._schema.returns]
    return any(alias is not None and not alias.is_write for alias in returned)


def argument_names(operator: Any) -> set[str]:
    """The names of the arguments of an operator, as a dispatch mode is given it."""
    return {argument.name for argument in operator._schema.arguments}


def bound_arguments(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What an operator, as a dispatch mode is given it, is called with, by name, with its defaults."""
    schema = operator._schema.arguments
    bound = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    return bound | {argument.name: value for argument, value in zip(schema, args)} | kwargs


def written_arguments(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, Any]:
    """What an operator, as a dispatch mode is given it, writes into when it is called with these; by position."""
    found = {}
    for position, argument in enumerate(operator._schema.arguments if is_mutable(operator) else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found[position] = args[position] if position < len(args) else kwargs.get(argument.name)
    return found


def is_foreign(tensor: Tensor) -> bool:
    """Whether the memory is that of another library, as of ``torch.from_numpy(array)``."""
    is_plain = type(tensor) is Tensor and tensor.device.type == "cpu" and storage_of(tensor) is not None
    return is_plain and not tensor.untyped_storage().resizable()


def without_memory(kind: type[Tensor], like: Tensor, device: torch.device) -> Any:
    """A tensor of the subclass `kind` on `device` with the shape, strides and dtype of `like`, but no memory."""
    with DisableTorchFunction():
        shape, strides = like.shape, like.stride()
    return Tensor._make_wrapper_subclass(kind, shape, strides=strides, dtype=like.dtype, device=device)  # type: ignore[attr-defined]


NBYTES = torch._C.TensorBase.nbytes.__get__  # type: ignore[attr-defined]
CALLS_MODES = "torch._compile", "torch._dynamo."
"""The modules through which torch calls a dispatch mode."""
VMAP = "torch._functorch.vmap"
VMAP_SIZES = "torch._functorch"


class PlainSize:
    """What C++ takes a number of Python's by, where it asks for the node of a `SymInt`."""

    def __init__(self, size: int) -> None:
        self._size = size

    def maybe_as_int(self) -> int:
        """The number."""
        return self._size

    def guard_int(self, *_: object) -> int:
        """The number, as code needs it that takes no symbols."""
        return self._size

    def is_int(self) -> bool:
        """It is an integer."""
        return True

    def is_symbolic(self) -> bool:
        """It is no symbol."""
        return False

    is_float = is_bool = is_nested_int = is_symbolic


"""The module of which vmap runs."""


def running_transform() -> str | None:
    """The transform of ``torch.func`` or of forward-mode AD that what runs now is within; `None` if it is in none."""
    interpreter = torch._C._functorch.peek_interpreter_stack()
    if interpreter is not None:
        return {"Vmap": "vmap", "Grad": "grad, vjp or jacrev", "Jvp": "jvp or jacfwd"}.get(
            interpreter.key().name, "torch.func"
        )
    return "forward-mode AD" if torch.autograd.forward_ad._current_level >= 0 else None


def state_versions(state: dict[str, Any]) -> dict[str, Any]:
    """The versions of the modules that torch keeps beside a ``state_dict``, by module."""
    return dict(getattr(state, "_metadata", {}))


def with_versions(state: dict[str, Any], versions: dict[str, Any]) -> dict[str, Any]:
    """`state` as a ``state_dict`` with the versions that `state_versions` returned of it."""
    versioned = OrderedDict(state)
    versioned._metadata = versions  # type: ignore[attr-defined]
    return versioned


def is_in_backward() -> bool:
    """Whether this thread runs backward, which may compute some of forward again."""
    return torch._C._current_graph_task_id() != -1  # type: ignore[no-any-return]


def ddp_around() -> DistributedDataParallel | None:
    """What the caller runs inside the forward of, if that is a DistributedDataParallel."""
    return DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-any-return]


def on_deepcopy(module: torch.fx.GraphModule, hook: Callable[[nn.Module], Any]) -> None:
    """Call `hook` with every deep copy of `module`."""
    module._register_deepcopy_hook(hook)


@contextmanager
def uncompiled() -> Iterator[None]:
    """A block in which what `torch.compile` has compiled runs as it was written."""
    if (frames := sys.modules.get("torch._dynamo.eval_frame")) is None:  # to import it takes a second
        yield
        return
    before = frames._stance.stance
    torch.compiler.set_stance("force_eager")  # for all threads, so that another rank's block may be what is found here
    try:
        yield
    finally:
        torch.compiler.set_stance("default" if before == "force_eager" else before)


def not_compiled(function: Function) -> Function:
    """`function`, where the tracer of `torch.compile` stops. What it calls is compiled unless `SET_COMPILER` says no.

    Imports the tracer, which takes a second; PyG and DGL have done so.
    """
    from torch._dynamo.decorators import skip

    return cast(Function, skip(function))


Compiler = Callable[..., Any] | bool | None
"""What compiles the functions that a thread calls; nothing does for `None` and `False`."""


SET_COMPILER: Callable[[Compiler], Compiler] = torch._C._dynamo.eval_frame.set_eval_frame
"""Has a compiler compile the functions that this thread calls from now on. Returns what did so before."""


def set_call(module: nn.Module, make: Callable[[nn.Module], Any]) -> None:
    """Let a call of `module` run what `make` makes of it. A copy of the module has forgotten it."""
    if module._compiled_call_impl is None:
        module._compiled_call_impl = make(module)


def call_as_written(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What a call of `module` returns that nothing was set for by `set_call`."""
    return module._call_impl(*args, **kwargs)


def symbolic_shapes() -> tuple[Any, Any]:
    """What knows symbols for sizes, and a mode in which torch computes shapes only, which may hold such symbols."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return (shapes := ShapeEnv(duck_shape=False)), FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)


@contextmanager
def quiet_shapes() -> Iterator[None]:
    """A block in which torch does not log what fails on symbols: the error is told in the words of a refusal."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addFilter(nothing := logging.Filter("nothing"))  # each block has its own, since ranks may be threads
    try:
        yield
    finally:
        logger.removeFilter(nothing)


def symbolic_size(shapes: Any) -> Any:
    """A `torch.SymInt` that stands for a number of at least two; whatever asks for the number raises an error."""
    from torch.fx.experimental.symbolic_shapes import constrain_range

    size = shapes.create_unbacked_symint()
    constrain_range(size, min=2)
    return size


def decomposition_of(operator: Any) -> Callable[..., Any] | None:
    """What composes an operator, as a dispatch mode is given it, of others; `None` if torch has nothing."""
    from torch._decomp import core_aten_decompositions, decomposition_table

    found = core_aten_decompositions().get(operator) or decomposition_table.get(operator)
    if found is None and operator.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        found = operator.decompose
    return found
