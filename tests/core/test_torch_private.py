"""What shardpass uses of torch beyond its documentation does what we rely on, and no other file uses such names."""

import copy
import gc
import importlib
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import shardpass
from shardpass.core.ranks import torch_private


def test_versions_count_changes_in_place_also_by_views():
    x = torch.zeros(4)
    before = torch_private.version_of(x)
    x.detach()[:2].add_(1)
    assert torch_private.version_of(x) == before + 1
    with torch.inference_mode():
        assert torch_private.version_of(torch.zeros(1)) == -1


def test_arguments_of_an_operator_have_names():
    x = torch.zeros(2, 3)
    bound = torch_private.bound_arguments(torch.ops.aten.sum.dim_IntList, (x, [1]), {})
    assert bound["self"] is x and (bound["dim"], bound["keepdim"]) == ([1], False)


def test_a_symbol_is_no_number():
    shapes, mode = torch_private.symbolic_shapes()
    size = torch_private.symbolic_size(shapes)
    assert size >= 2 and size != 1 and size * 8 == 8 * size
    with pytest.raises(Exception, match="u0"):
        bool(size == 40)
    with mode:
        assert (torch.empty(size, 8) * 2).shape[0] == size


def test_operators_are_composed_of_others():
    x = torch.randn(3, 4)
    decomposition = torch_private.decomposition_of(torch.ops.aten.logit.default)
    assert decomposition is not None and torch.equal(decomposition(x.sigmoid()), torch.logit(x.sigmoid()))
    assert torch_private.decomposition_of(torch.ops.aten.mm.default) is None


def test_bases():
    x = torch.zeros(4)
    assert torch_private.base_of(x[1:].view(3)) is x and torch_private.base_of(x) is x


def test_storages_are_told_apart_and_are_gone_with_their_last_tensor():
    x, y = torch.zeros(4), torch.zeros(4)
    numbers = [torch_private.storage_number(t.untyped_storage()) for t in (x, x[1:], y)]
    assert numbers[0] == numbers[1] != numbers[2]
    gone = torch_private.StorageWeakRef(x.untyped_storage())
    view = x[1:]
    del x
    assert not gone.expired()
    del view
    assert gone.expired()


def test_tensors_are_dropped_as_keys():
    known, x = torch_private.WeakTensorKeyDictionary(), torch.zeros(2)
    known[x] = 1
    assert known.get(x) == 1 and known.get(torch.zeros(2)) is None
    del x
    gc.collect()
    assert not len(known)


def test_nodes_are_numbered_in_the_order_in_which_they_are_made():
    x = torch.ones(1, requires_grad=True)
    early = x * 2
    border = torch_private.next_node_number()
    late = x * 2
    assert torch_private.node_number(early.grad_fn) < border < torch_private.node_number(late.grad_fn)


def test_saved_tensor_hooks():
    def pack(tensor):
        return tensor

    assert torch_private.saved_tensor_hooks() is None
    with torch.autograd.graph.saved_tensors_hooks(pack, pack):
        assert torch_private.saved_tensor_hooks()[0] is pack
    assert torch_private.saved_tensor_hooks() is None


def test_forward_hooks():
    module, hook = nn.Linear(1, 1), lambda *_: None
    assert not torch_private.has_forward_hook(module)
    handle = module.register_forward_pre_hook(hook)
    assert torch_private.has_forward_hook(module) and torch_private.has_forward_hook(module, hook)
    assert not torch_private.has_forward_hook(module, print)
    handle.remove()
    module.register_forward_hook(hook)
    assert torch_private.has_forward_hook(module)


class Seen(torch.overrides.TorchFunctionMode):
    """Counts the torch functions that are called."""

    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("block", "count"), [("DisableTorchFunction", 0), ("DisableTorchFunctionSubclass", 1)])
def test_blocks_without_torch_functions(block, count):
    with Seen() as seen, getattr(torch_private, block)():
        torch.ones(1) + 1
    assert (seen.count > 0) == bool(count)


def test_dispatch_modes_see_operators_and_their_arguments():
    seen = []

    class Mode(torch_private.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(torch_private.argument_names(func))
            return func(*args, **(kwargs or {}))

    x = torch.ones(1)
    with Mode():
        x.bernoulli_(0.5)
    assert seen == [{"self", "p", "generator"}]


def test_blocks_of_the_profiler():
    seen = []

    class Mode(torch_private.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append((func, args[0]))
            return func(*args, **(kwargs or {}))

    with Mode(), torch_private.span("a name"):
        pass
    assert seen[0] == (torch_private.RECORD_ENTER, "a name") and seen[-1][0] is torch_private.RECORD_EXIT
    with torch.profiler.profile() as profile, torch_private.span("another"):
        pass
    assert "another" in {event.key for event in profile.key_averages()}


def test_what_a_module_holds_and_calls():
    layer = nn.Linear(2, 2)
    assert list(torch_private.parameters_of(layer)) == ["weight", "bias"]
    assert not torch_private.has_hook(layer) and not torch_private.has_any_forward_hook()
    for register in (layer.register_forward_pre_hook, layer.register_forward_hook, layer.register_full_backward_hook):
        hook = register(lambda *_: None)
        assert torch_private.has_hook(layer)
        hook.remove()
    hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert torch_private.has_any_forward_hook()
    hook.remove()


def test_function_modes():
    class Mode(torch.overrides.TorchFunctionMode):
        pass

    with Mode() as outer, Mode() as inner:
        assert torch_private.function_modes() == [outer, inner]
    assert not torch_private.function_modes()


def test_what_backward_goes_on_to():
    asked = []

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *tensors):
            return tensors[0] * 1

        @staticmethod
        def backward(ctx, grad):
            asked.append([torch_private.is_asked_for(node) for node, _ in ctx.next_functions])
            return grad, grad, None, None

    leaf, other = (torch.ones(1, requires_grad=True) for _ in range(2))
    out = Seen.apply(leaf, other * 2, torch.ones(1), other * 3)
    torch.autograd.grad(out, leaf, retain_graph=True)
    torch.autograd.grad(out, other, retain_graph=True)
    out.backward()
    assert asked == [[True, False, False, False], [False, True, False, True], [True, True, False, True]]


def test_trees():
    tree = {"a": [1, (2, None)], "b": 3}
    assert torch_private.tree_leaves(tree) == [1, 2, None, 3]
    assert torch_private.tree_map(lambda x: x and x + 1, tree) == {"a": [2, (3, None)], "b": 4}
    assert torch_private.tree_map_only(int, lambda x: -x, tree) == {"a": [-1, (-2, None)], "b": -3}
    leaves, structure = torch_private.tree_flatten(tree)
    assert torch_private.tree_unflatten(leaves, structure) == tree


def test_parts_of_modules():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout2d())
    assert list(torch_private.children_of(model).values()) == list(model)
    assert torch_private.buffers_of(model[0])["running_mean"] is model[0].running_mean
    assert isinstance(model[0], torch_private.AnyBatchNorm)


def test_versions_of_a_state_dict():
    model = nn.BatchNorm1d(2)
    versions = torch_private.state_versions(model.state_dict())
    assert versions[""]["version"] == 2
    assert torch_private.state_versions(torch_private.with_versions(dict(model.state_dict()), versions)) == versions


def test_copies_of_traced_modules_are_told():
    traced, copies = torch.fx.symbolic_trace(nn.Linear(1, 1)), []
    torch_private.on_deepcopy(traced, copies.append)
    made = copy.deepcopy(traced)
    assert len(copies) == 1 and copies[0] is made


def test_in_backward():
    seen = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda grad: seen.append(torch_private.is_in_backward()))
    (x * 2).sum().backward()
    assert seen == [True] and not torch_private.is_in_backward()


def test_ddp(monkeypatch):
    assert torch_private.ddp_around() is None
    around = object()
    monkeypatch.setattr(torch_private.DistributedDataParallel, "_active_ddp_module", around)
    assert torch_private.ddp_around() is around


def test_functions_are_called_around_the_compiler():
    compiled, seen = [], []

    def backend(graph, _):
        compiled.append([node.target for node in graph.graph.nodes if node.op == "call_method"])
        return graph

    @torch_private.not_compiled
    def aside(x):
        compiler = torch_private.SET_COMPILER(None)
        seen.append(callable(compiler))
        x = x.cos()
        torch_private.SET_COMPILER(compiler)
        return inner(x)

    def inner(x):
        return x.tan()

    torch.compile(lambda x: aside(x.sin()).exp(), backend=backend)(torch.ones(2))
    assert compiled == [["sin"], ["tan"], ["exp"]]
    assert seen == [True]


def test_a_call_of_a_module_is_another_one():
    module = torch.nn.Linear(2, 2)
    torch_private.set_call(module, lambda it: lambda x: torch_private.call_as_written(it, x) * 2)
    x = torch.ones(1, 2)
    torch.testing.assert_close(module(x), module.forward(x) * 2)
    assert copy.deepcopy(module)._compiled_call_impl is None


PRIVATE = re.compile(
    r"torch\._(?!_)|torch\.utils\._|torch\.utils\.weak|torch\.multiprocessing\.reductions"
    r"|torch\.nn\.modules\.\w+ import _|nn\.modules\.\w+\._"
    r"|\._(C|cdata|base|sequence_nr|schema|metadata|forward_hooks|forward_pre_hooks|parameters|modules)\b"
    r"|_post_accumulate_grad_hooks|_backward_hooks|_get_active_ddp_module|_register_deepcopy_hook|profiler\._record|\b(?!self|p\b)\w+\._version\b"
)


def test_functional_transforms():
    seen = []

    def note(x):
        seen.append(torch_private.running_transform())
        return x.sum()

    note(torch.ones(2))
    torch.vmap(note)(torch.ones(2, 2))
    torch.func.grad(note)(torch.ones(2))
    torch.func.jvp(note, (torch.ones(2),), (torch.ones(2),))
    with torch.autograd.forward_ad.dual_level():
        note(torch.ones(2))
    assert seen == [None, "vmap", "grad, vjp or jacrev", "jvp or jacfwd", "forward-mode AD"]


def test_no_other_file_uses_such_names():
    root = Path(shardpass.__file__).parent
    found = {
        f"{path.relative_to(root)}:{number}: {line.strip()}"
        for path in root.rglob("*.py")
        if path.name != "torch_private.py"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if PRIVATE.search(line)
    }
    assert not found, "use, or add to, shardpass/core/ranks/torch_private.py:\n" + "\n".join(sorted(found))


def test_blocks_without_a_compiler_may_overlap():
    stance = importlib.import_module("torch._dynamo.eval_frame")
    first, second = torch_private.uncompiled(), torch_private.uncompiled()
    first.__enter__()
    second.__enter__()
    assert stance._stance.stance == "force_eager"
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert stance._stance.stance == "default"
