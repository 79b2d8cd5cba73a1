"""Capture: nothing escapes, nothing is kept, no trace is left."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from dpspan import Capture, CaptureError, per_sample_gradients
from helpers.oracle import per_sample_matrix
from helpers.problems import PROBLEMS, loss_per_sample, make
from helpers.traces import traces


class Functional(nn.Module):
    """Uses a layer's weight outside the layer, beside or instead of calling it."""

    def __init__(self, *, also_call: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.also_call = also_call

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x)) if self.also_call else self.first(x)
        return F.linear(x, self.second.weight)


@pytest.mark.parametrize("also_call", [True, False])
def test_functional_use_of_a_parameter_is_an_error_that_names_it(also_call: bool) -> None:
    with pytest.raises(CaptureError, match=r"Parameter 'second.weight' takes part in the loss"):
        per_sample_gradients(Functional(also_call=also_call), loss_per_sample, torch.randn(3, 4))


def test_weight_decay_in_the_loss_is_an_error() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(CaptureError, match="'weight' takes part in the loss"):
        per_sample_gradients(
            model, lambda m, x: m(x).sum(1) + m.weight.square().sum(), torch.randn(3, 4)
        )


def test_autograd_computes_no_weight_gradient() -> None:
    model, x = make("mlp")
    with Capture(model) as capture:
        capture.expect(len(x))
        output = model(x)
        graph, found = [output.grad_fn], []
        while graph:
            node = graph.pop()
            if node is not None:
                found.append(node.name())
                graph += [edge[0] for edge in node.next_functions]
        # The only leaf is the tap's anchor: no parameter is reachable from the loss.
        assert found.count("torch::autograd::AccumulateGrad") == 1
        output.sum().backward()
        capture.collect()
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_nothing_is_recorded_without_gradients_or_without_a_batch() -> None:
    model, x = make("mlp")
    with Capture(model) as capture:
        model(x)  # no batch is expected: an ordinary forward pass
        capture.expect(len(x))
        with torch.no_grad():
            output = model(x)
        assert not output.requires_grad
        with pytest.raises(CaptureError, match="No gradient was recorded for the batch of 6"):
            capture.collect()


def test_recorded_tensors_are_freed() -> None:
    model, x = make("linear on short sequences (ghost)")
    with Capture(model) as capture:
        capture.expect(len(x))
        hidden = x * 2
        alive = weakref.ref(hidden.untyped_storage())
        (model(hidden) ** 2).sum().backward()
        del hidden
        J = capture.collect()
        assert J.norms().shape == (6,)
        del J
        gc.collect()
        assert alive() is None


@pytest.mark.parametrize("name", PROBLEMS)
def test_removing_leaves_no_trace(name: str) -> None:
    model, x = make(name)
    before = {k: dict(vars(m)) for k, m in model.named_modules()}
    keys = list(model.state_dict())
    per_sample_gradients(model, loss_per_sample, x)
    after = {k: dict(vars(m)) for k, m in model.named_modules()}
    assert before == after
    assert all(not p._backward_hooks for p in model.parameters())
    assert keys == list(model.state_dict())
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(loss_per_sample(again, x), loss_per_sample(model, x))


@pytest.mark.parametrize("name", ["mlp", "custom module inside", "multi-head attention"])
def test_a_copy_made_while_attached_is_an_ordinary_model(name: str) -> None:
    model, x = make(name)
    reference = loss_per_sample(model, x)
    with Capture(model) as capture:
        assert type(model) is type(make(name)[0])
        capture.expect(len(x))
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            for p in twin.parameters():
                p.data.mul_(1.0)
            loss = loss_per_sample(twin, x)
            assert torch.allclose(loss, reference)
            loss.sum().backward()  # plain autograd, no escape
            assert all(p.grad is not None for p in twin.parameters())
            with torch.no_grad():
                next(twin.parameters()).add_(1.0)
            assert not torch.allclose(loss_per_sample(twin, x), reference)


def test_failing_forward_gives_parameters_back() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with Capture(model) as capture:
        capture.expect(2)
        with pytest.raises(RuntimeError):
            model(torch.randn(2, 5))
    assert all(p.requires_grad for p in model.parameters())


def test_several_losses_on_one_batch_add_up() -> None:
    model, x = make("mlp")
    with Capture(model) as capture:
        capture.expect(len(x))
        model(x).sum().backward()
        (model(-x) ** 2).sum().backward()
        J = capture.collect()
    expected = per_sample_matrix(model, lambda m, x: m(x).sum(1) + (m(-x) ** 2).sum(1), x)
    assert torch.allclose(J.matrix(), expected)


def test_backward_after_the_batch_is_over() -> None:
    model, x = make("mlp")
    with Capture(model) as capture:
        capture.expect(len(x))
        loss = loss_per_sample(model, x).sum()
        loss.backward(retain_graph=True)
        capture.collect()
        with pytest.raises(CaptureError, match="after its batch was finished"):
            loss.backward()


def test_gradient_outside_a_private_step() -> None:
    model, x = make("mlp")
    with Capture(model), pytest.raises(CaptureError, match=r"outside a private step"):
        model(x).sum().backward()


def test_batch_in_another_dimension() -> None:
    class SequenceFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.transpose(0, 1)).transpose(0, 1)

    torch.manual_seed(0)
    for samples in (3, 5):
        check(SequenceFirst(), torch.randn(samples, 5, 4))
    # Of a layer alone nobody can tell: it is not called as part of a model on the batch.
    with pytest.raises(CaptureError, match=r"Layer 'layer' saw 5 samples, the batch has 3"):
        per_sample_gradients(
            SequenceFirst(),
            lambda m, x: m.layer(x.transpose(0, 1)).sum((0, 2)),
            torch.ones(3, 5, 4),
        )


def test_input_changed_in_place() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x) * 1.0
            output = self.second(hidden)
            hidden.mul_(2.0)
            return output

    with pytest.raises(CaptureError, match="input of 'second' was modified in place"):
        per_sample_gradients(InPlace(), loss_per_sample, torch.randn(3, 4))


def test_parameter_unfrozen_later_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight.requires_grad_(False)
    with Capture(model) as capture:
        model[1].weight.requires_grad_(True)
        capture.expect(3)
        with pytest.raises(CaptureError, match=r"'1\.weight'"):
            loss_per_sample(model, torch.randn(3, 4)).sum().backward()
            capture.collect()


def test_parameter_registered_later_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4))
    with Capture(model) as capture:
        model[0].bias = nn.Parameter(torch.zeros(4))
        capture.expect(3)
        with pytest.raises(CaptureError, match=r"Parameter '0\.bias' became trainable after"):
            loss_per_sample(model, torch.randn(3, 4)).sum().backward()


def test_module_replaced_later_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with Capture(model) as capture:
        model[1] = nn.Linear(4, 4)
        capture.expect(3)
        model[1](model[0](torch.randn(3, 4))).sum().backward()
        with pytest.raises(CaptureError, match=r"Parameter '1\.weight' belongs to another module"):
            capture.collect()


def test_parameter_tied_later_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with Capture(model) as capture:
        model[1].weight = model[0].weight
        capture.expect(3)
        loss_per_sample(model, torch.randn(3, 4)).sum().backward()
        with pytest.raises(
            CaptureError, match=r"Parameter '1\.weight' belongs to another module, or is shared"
        ):
            capture.collect()


def test_parameter_replaced_later_keeps_its_name() -> None:
    model, x = make("mlp")
    with Capture(model) as capture:
        model[0].weight = nn.Parameter(2 * model[0].weight.detach())
        capture.expect(len(x))
        loss_per_sample(model, x).sum().backward()
        J = capture.collect()
        model[0].weight = nn.Parameter(2 * model[0].weight.detach())
        capture.expect(len(x))
        with pytest.raises(CaptureError, match=r"Parameter '0\.weight' takes part in the loss"):
            (loss_per_sample(model, x).sum() + model[0].weight.sum()).backward()
    model[0].weight = nn.Parameter(model[0].weight.detach() / 2)
    assert torch.allclose(J.matrix(), per_sample_matrix(model, loss_per_sample, x))
    assert not model[0].weight._backward_hooks


@pytest.fixture
def one_process() -> Iterator[None]:
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7):
        pytest.skip("fully_shard needs a newer torch on a CPU")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("name", ["mlp", "tied embedding", "reused linear"])
def test_parameters_of_a_sharded_model_are_recorded(name: str, one_process: None) -> None:
    """fully_shard exchanges the parameters for others while a layer runs."""
    model, x = make(name)
    expected = per_sample_matrix(model, loss_per_sample, x)
    for layer in () if name == "tied embedding" else model.children():
        fully_shard(layer)
    fully_shard(model)
    J = per_sample_gradients(model, loss_per_sample, x)
    assert type(J.like) is Tensor
    assert torch.allclose(J.norms(), expected.norm(dim=1))
    assert torch.allclose(J.matrix(), expected)


@pytest.mark.parametrize("also_call", [True, False])
def test_functional_use_in_a_sharded_model_is_named(also_call: bool, one_process: None) -> None:
    model = Functional(also_call=also_call)
    fully_shard(model)
    with pytest.raises(CaptureError, match=r"Parameter 'second.weight' takes part in the loss"):
        per_sample_gradients(model, loss_per_sample, torch.randn(3, 4))


def test_parameter_frozen_later_leaves_the_gradients() -> None:
    model, x = make("mlp")
    with Capture(model) as capture:
        model.get_parameter("0.weight").requires_grad_(False)
        capture.expect(len(x))
        loss_per_sample(model, x).sum().backward()
        J = capture.collect()
    assert "0.weight" not in J.shapes
    assert torch.allclose(J.matrix(), per_sample_matrix(model, loss_per_sample, x))


def test_users_forward_hook_does_not_change_the_gradient() -> None:
    model, x = make("mlp")
    model[0].register_forward_hook(lambda module, args, output: 3 * output)
    J = per_sample_gradients(model, loss_per_sample, x)
    assert torch.allclose(J.matrix(), per_sample_matrix(model, loss_per_sample, x))


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.block = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, self.first(x), use_reentrant=reentrant)

    torch.manual_seed(0)
    model, x = Checkpointed().double(), torch.randn(5, 4, dtype=torch.float64)
    J = per_sample_gradients(model, loss_per_sample, x)
    oracle = Checkpointed().double()
    oracle.load_state_dict(model.state_dict())
    plain = nn.Sequential(oracle.first, *oracle.block)
    assert torch.allclose(J.matrix(), per_sample_matrix(plain, loss_per_sample, x))


def test_dropout_in_a_custom_module_is_the_dropout_of_the_forward_pass() -> None:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(50))
            self.dropout = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.dropout(x * self.scale)

    model, outputs = Dropped(), []

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        outputs.append(m(x))
        return outputs[-1].sum(1)

    J = per_sample_gradients(model, loss, torch.ones(4, 50))
    assert torch.equal(J.matrix(), outputs[0])  # d/d scale of Σ 2·mask·scale is the output itself
    assert not torch.equal(outputs[0][0], outputs[0][1])


def test_module_that_torch_func_cannot_vectorise_is_named() -> None:
    class DataDependent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale if x.sum().item() > 0 else x

    model = nn.Sequential(nn.Linear(4, 4), DataDependent())
    with pytest.raises(CaptureError, match=r"Module '1' \(DataDependent\).*dpspan.fix"):
        per_sample_gradients(model, loss_per_sample, torch.randn(3, 4))


def test_half_precision_forward() -> None:
    model, x = make("mlp", torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        J = per_sample_gradients(model, lambda m, x: loss_per_sample(m, x).float(), x)
    exact = per_sample_matrix(model, loss_per_sample, x)
    assert J.matrix().dtype == torch.float32
    assert torch.allclose(J.matrix(), exact, rtol=0.1, atol=0.05 * float(exact.abs().max()))


def test_empty_batch() -> None:
    for name in ("mlp", "conv2d grouped backward", "tied embedding", "custom module inside"):
        model, x = make(name)
        J = per_sample_gradients(model, loss_per_sample, x[:0])
        assert J.samples == 0
        assert all(not v.any() for v in J.combine(torch.zeros(0)).values())


# -- modules that are not quite what they seem ----------------------------------------------------


def check(model: nn.Module, x: Tensor) -> None:
    J = per_sample_gradients(model, loss_per_sample, x)
    assert torch.allclose(J.matrix(), per_sample_matrix(model, loss_per_sample, x), atol=1e-5)


def test_a_forward_pass_of_the_users_that_has_an_inner_one() -> None:
    class Doubled:
        def __init__(self, inner: nn.Module) -> None:
            self.inner = inner

        def __call__(self, x: Tensor) -> Tensor:
            return 2 * self.inner(x)

    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    model[0].forward = Doubled(model[0].forward)
    check(model, torch.randn(5, 4, dtype=torch.float64))


class Standardised(nn.Conv2d):
    """Overrides what forward calls, not forward itself."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        weight = weight - weight.mean((1, 2, 3), keepdim=True)
        return super()._conv_forward(x, weight, bias)


def test_subclass_that_overrides_a_part_of_forward() -> None:
    torch.manual_seed(0)
    check(nn.Sequential(Standardised(3, 4, 3)), torch.randn(5, 3, 6, 6))


@pytest.mark.parametrize("kind", [nn.Linear, nn.Bilinear])
def test_forward_given_to_an_instance_is_used_and_given_back(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 4) if kind is nn.Linear else nn.Bilinear(4, 4, 4)
    weight = layer.weight if kind is nn.Linear else layer.weight[0]
    layer.forward = lambda x: F.linear(
        x, (layer.weight if kind is nn.Linear else layer.weight[0]) ** 2
    )
    mine = layer.forward
    x = torch.randn(5, 4)
    assert torch.allclose(layer(x), F.linear(x, weight**2))
    check(nn.Sequential(layer), x)
    assert layer.forward is mine


def test_hooks_on_a_module_without_a_rule_run_once() -> None:
    from helpers.problems import Custom

    torch.manual_seed(0)
    model = nn.Sequential(Custom())
    model[0].register_forward_hook(lambda module, args, output: 2 * output)
    model[0].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    check(model, torch.randn(5, 5))


def test_a_refused_model_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpspan.gradients.capture.is_of_opacus", lambda _: True)
    model = make("custom module inside")[0]
    with pytest.raises(CaptureError, match="is Opacus'"):
        Capture(model)
    assert not traces(model)
    assert not any(p._backward_hooks for p in model.parameters())


def test_lists_of_parameters_belong_to_their_holder() -> None:
    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = nn.ParameterList([nn.Parameter(torch.randn(4)) for _ in range(2)])

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.scales[0]).tanh() * self.scales[1]

    check(nn.Sequential(nn.Linear(4, 4), Scales()), torch.randn(5, 4))


def test_attention_mask_of_the_size_of_the_batch() -> None:
    class Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            return self.attention(x, x, x, attn_mask=mask)[0]

    torch.manual_seed(0)
    check(Causal(), torch.randn(4, 4, 8))


def test_output_without_a_batch_is_refused() -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x * self.scale, self.scale.sum()

    with pytest.raises(CaptureError, match="no batch dimension in front"):
        per_sample_gradients(Norm(), lambda m, x: m(x)[0].sum(1), torch.randn(3, 4))


def test_input_by_keyword() -> None:
    model = nn.LayerNorm(4)
    J = per_sample_gradients(model, lambda m, x: m(input=x).sum(1), torch.randn(3, 4))
    assert J.samples == 3


def test_gradients_of_gradients_are_refused() -> None:
    model, x = make("mlp")
    x.requires_grad_(True)

    def penalised(m: nn.Module, x: Tensor) -> Tensor:
        output = m(x).sum(1)
        (grad,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return output + grad.square().sum(1)

    with pytest.raises(CaptureError, match="create_graph"):
        per_sample_gradients(model, penalised, x)


def test_two_captures_do_not_meet() -> None:
    model, x = make("mlp")
    with Capture(model) as capture:
        per_sample_gradients(model, loss_per_sample, x)  # the other one is at rest: fine
        capture.expect(len(x))
        with pytest.raises(CaptureError, match="in the middle of a private step"):
            per_sample_gradients(model, loss_per_sample, x)


def test_an_interrupted_forward_pass_gives_parameters_back() -> None:
    class Interrupted(nn.Linear):
        pass

    model = nn.Sequential(Interrupted(4, 4))
    with Capture(model) as capture:
        capture.expect(2)

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        handle = model[0].register_forward_hook(interrupt, prepend=True)
        with pytest.raises(KeyboardInterrupt):
            model(torch.randn(2, 4))
        handle.remove()
        capture.expect(2)
        assert all(p.requires_grad for p in model.parameters())
        model(torch.randn(2, 4)).sum().backward()
        assert set(capture.collect().shapes) == {"0.weight", "0.bias"}


def test_half_precision_around_backward_leaves_the_sums_exact() -> None:
    """Two tokens that nearly cancel: in bfloat16 the norm would be lost, and with it the clip."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64, bias=False)
    a = torch.randn(1, 1, 64).expand(1, 2, 64) * torch.tensor([[[1.0], [1.001]]])
    direction = torch.randn(1, 1, 64)
    with Capture(model) as capture:
        capture.expect(1)
        output = model(a)
        signs = torch.tensor([[[1.0], [-1.0]]])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            (output * signs * direction).sum().backward()
            J = capture.collect()
            bound, rows = J.norm_bounds(), J.matrix()
    assert rows.dtype == torch.float32
    assert float(bound) >= float(rows.double().norm())
    assert float(bound) <= 0.1 * float(direction.norm() * a.norm())


def test_a_square_input_that_may_be_a_mask_or_a_batch() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return (mask @ x) * self.scale

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.masked = Masked()

        def forward(self, x: Tensor) -> Tensor:
            return self.masked(x, torch.ones(x.shape[1], x.shape[1]).tril())

    torch.manual_seed(0)
    check(Model(), torch.randn(5, 4, 3))
    check(Model(), torch.randn(4, 4, 3))
