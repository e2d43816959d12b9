"""How layers are run: computed again, with and without attention kept, and compiled, all to the same gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from training import VOCABULARY, attached, made_up_groups, scored_group, settings, small_model, trainee
from transformers import GPT2Config, GPT2LMHeadModel, OPTConfig, OPTForCausalLM

from grpo_engine.data.batching import make_batch
from grpo_engine.errors import ModelError
from grpo_engine.models.config import LoraSettings
from grpo_engine.models.execution import decoder_layers, recompute_layers, silence
from grpo_engine.models.lora import add_lora
from grpo_engine.train.trainee import Trainee


def gradients(**changes: object) -> dict[str, torch.Tensor]:
    subject = trainee(settings(**changes))
    subject._scorer.shares_prompts = False  # plain rows, as a GPU has them
    logprobs, entropy = subject.logprobs(make_batch(made_up_groups(0, groups=2), seq_len=32))
    torch.autograd.backward((logprobs * 3 + entropy).sum())
    return gradients_of(subject)


def gradients_of(subject: Trainee) -> dict[str, torch.Tensor]:
    return {
        name: parameter.grad if parameter.grad is not None else master.grad
        for (name, parameter), master in zip(subject.model.named_parameters(), subject._masters.parameters, strict=True)
    }


@pytest.mark.parametrize("keep", [False, True])
def test_layers_that_are_computed_again_give_the_same_gradients(keep: bool) -> None:
    expected = gradients()
    found = gradients(gradient_checkpointing=True, keep_attention=keep)
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


class Counting(TorchDispatchMode):
    """Counts the kernels of attention that really run."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.name() == "aten::_scaled_dot_product_flash_attention_for_cpu"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("keep", [False, True])
def test_attention_that_is_kept_is_not_computed_again(keep: bool) -> None:
    subject = trainee(settings(gradient_checkpointing=True, keep_attention=keep))
    subject._scorer.shares_prompts = False  # plain rows, as a GPU has them
    logprobs, _ = subject.logprobs(make_batch(made_up_groups(0, groups=2), seq_len=32))
    with Counting() as backward:
        torch.autograd.backward(logprobs.sum())
    assert backward.count == (0 if keep else len(decoder_layers(subject._scorer.causal_lm)))


@pytest.mark.parametrize("recomputes", [False, True])
def test_dropout_of_the_models_configuration_is_off_in_training(recomputes: bool) -> None:
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2))
    opt = OPTForCausalLM(
        OPTConfig(vocab_size=VOCABULARY, hidden_size=32, ffn_dim=32, num_hidden_layers=2, num_attention_heads=2)
    )
    batch = make_batch(made_up_groups(0, groups=2), seq_len=32)
    for model in (gpt2, opt):
        subject = Trainee(attached(model), settings(gradient_checkpointing=recomputes))
        trained = subject.logprobs(batch)[0].detach()
        model.eval()
        assert torch.equal(subject.logprobs(batch)[0], trained)


def test_dropout_of_adapters_stays() -> None:
    adapted = add_lora(small_model(), LoraSettings(dropout=0.5))
    silence(adapted)
    assert {module.p for module in adapted.modules() if isinstance(module, nn.Dropout)} == {0.5}


def test_a_model_without_gradient_checkpointing_is_refused_by_name() -> None:
    model = small_model()
    model.supports_gradient_checkpointing = False
    with pytest.raises(ModelError, match="gradient_checkpointing: LlamaForCausalLM has none"):
        recompute_layers(model)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.GraphModule]:
    """The graphs that torch traces for compiled layers; they run as they are."""
    torch._dynamo.reset()
    traced: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[object], **_options: object) -> Callable[..., object]:
        traced.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    return traced


def inputs_of(graph: torch.fx.GraphModule) -> list[object]:
    """Numbers that vary, and the shapes of tensors, as torch's compiler sees them."""
    values = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
    return [getattr(value, "shape", value) for value in values]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_recomputed_layer_is_not_compiled_again_though_fsdp_gives_it_a_view_only_in_the_forward_pass(
    graphs: list[torch.fx.GraphModule],
) -> None:
    """It was, for each kind of rows: a start traced 14 functions of a Llama layer instead of 8."""
    subject = trainee(settings(gradient_checkpointing=True, compile_layers=True))
    subject._scorer.shares_prompts = False  # plain rows, as a GPU has them
    is_backward = False

    def view_as_fsdp(layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return inputs if is_backward else (inputs[0].view_as(inputs[0]), *inputs[1:])

    for layer in decoder_layers(subject._scorer.causal_lm):
        layer.register_forward_pre_hook(view_as_fsdp)
    logprobs, entropy = subject.logprobs(make_batch(made_up_groups(0, groups=2), seq_len=32))
    traced, is_backward = len(graphs), True
    torch.autograd.backward((logprobs * 3 + entropy).sum())
    assert len(graphs) == traced > 0
    found = gradients_of(subject)
    for name, gradient in gradients().items():
        torch.testing.assert_close(found[name], gradient, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_packed_and_several_rows_take_the_code_that_was_compiled_for_one_plain_row(
    graphs: list[torch.fx.GraphModule],
) -> None:
    """The mask, and the number of rows, each made torch trace each function of a layer again."""
    packed = make_batch(made_up_groups(0, groups=1), seq_len=32)
    expected = trainee(settings()).logprobs(packed)[0]
    subject = trainee(settings(gradient_checkpointing=True, compile_layers=True))
    assert subject.shares_prompts
    plain = make_batch(made_up_groups(1, groups=1, size=1), seq_len=32)
    subject.logprobs(plain)
    traced = len(graphs)
    for subject._scorer.shares_prompts in (True, False):
        found = subject.logprobs(packed)[0]
        found.sum().backward()
        assert len(graphs) == traced > 0
        torch.testing.assert_close(found, expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_no_gradient_of_attention_is_copied_into_zeros(graphs: list[torch.fx.GraphModule]) -> None:
    """That of an indexed query, key and value was: 13 of 657 ms of a step with rows of 16,384 tokens (H200)."""
    subject = trainee(settings(compile_layers=True))
    found = subject.logprobs(make_batch(made_up_groups(0, groups=1), seq_len=32))[0]
    seen, left = set(), [found.grad_fn]
    while left:
        function = left.pop()
        if function is not None and function not in seen:
            seen.add(function)
            left += [each for each, _ in function.next_functions]
    assert len(graphs) > 0
    assert "SelectBackward0" not in {function.name() for function in seen}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_numbers_of_a_sharded_layer_are_constants_of_its_compiled_code(graphs: list[torch.fx.GraphModule]) -> None:
    """Torch takes those of modules that FSDP marks for ones that vary: tracing a layer took more than twice as long."""
    batch, varying = make_batch(made_up_groups(0, groups=2), seq_len=32), []
    for is_sharded in (False, True):
        torch._dynamo.reset()
        graphs.clear()
        model = small_model()
        for module in model.modules():
            module._is_fsdp_managed_module = is_sharded  # type: ignore[assignment]
        Trainee(attached(model), settings(compile_layers=True)).logprobs(batch)
        varying.append(
            sum(isinstance(each, torch.SymInt | torch.SymFloat) for graph in graphs for each in inputs_of(graph))
        )
    assert varying[0] == varying[1] > 0


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_code_does_not_depend_on_which_rows_came_first(graphs: list[torch.fx.GraphModule]) -> None:
    """After a rank was killed, the new ones found half of their code not in the cache, and compiled for 48 s."""
    one = make_batch([scored_group([3] * 5, [[3] * 12])], seq_len=32)  # 16 positions, as many as a head has numbers
    several = make_batch(made_up_groups(1, groups=2), seq_len=32)
    forms = []
    for batches in ((one, several), (several, one)):
        torch._dynamo.reset()
        graphs.clear()
        subject = trainee(settings(compile_layers=True))
        subject._scorer.shares_prompts = False
        for batch in batches:
            subject.logprobs(batch)
        forms.append({str((inputs_of(graph), graph.code)) for graph in graphs})
    assert forms[0] == forms[1]


def test_layers_are_not_compiled_where_there_is_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(ModelError, match=r"compile_layers: neither gcc nor clang is in PATH"):
        trainee(settings(compile_layers=True))
