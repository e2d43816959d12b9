"""The plan of a step's memory against what is really there: counted parameters, states, saved tensors, and the peak."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import pytest
import torch
from memory import PeakMemory, saved_bytes
from training import attached, settings
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from grpo_engine.algo.head import TILES
from grpo_engine.algo.logprobs import token_logprobs
from grpo_engine.errors import ModelError
from grpo_engine.flags import parse_flags, to_flags
from grpo_engine.models import optimizers, rounding
from grpo_engine.models.config import LoraSettings
from grpo_engine.models.lora import add_lora
from grpo_engine.models.merged_lora import MergedLora
from grpo_engine.train.config import TrainConfig
from grpo_engine.train.memory.advice import advice
from grpo_engine.train.memory.dry_run import card_of_size, free_in_a_step, model_shape
from grpo_engine.train.memory.plan import (
    CUDA_CONTEXT_BYTES,
    Card,
    MemoryPlan,
    Moment,
    Part,
    available_bytes,
    longest_micro_batch,
    memory_plan,
    state_bytes,
)
from grpo_engine.train.memory.rehearsal import longest_batch, rehearse
from grpo_engine.train.step import gradient_step
from grpo_engine.train.trainee import Trainee

QWEN = {"vocab_size": 151_936, "num_attention_heads": 16, "tie_word_embeddings": True}
LLAMA_8B = LlamaConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    tie_word_embeddings=False,
)
PUBLISHED: dict[str, tuple[PreTrainedConfig, int]] = {
    "Qwen3-0.6B": (
        Qwen3Config(
            **QWEN, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_key_value_heads=8, head_dim=128
        ),
        596_049_920,
    ),
    "Qwen2.5-3B": (
        Qwen2Config(**QWEN, hidden_size=2048, intermediate_size=11_008, num_hidden_layers=36, num_key_value_heads=2),
        3_085_938_688,
    ),
    "Llama-3.1-8B": (LLAMA_8B, 8_030_261_248),
}
ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LORA = {"bridge": {"mode": "lora_only"}}
MERGED = {"bridge": {"mode": "lora_merged"}}
ON_H200 = Card(name="H200", total_bytes=141_000_000_000, free_bytes=77_500_000_000, inference_share=0.45)


def small(kind: type[PreTrainedConfig] = LlamaConfig, *, layers: int = 4) -> PreTrainedConfig:
    return kind(
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=48,
        vocab_size=64,
    )


def trainee(pretrained: PreTrainedConfig, config: TrainConfig, *, is_shared: bool = False) -> Trainee:
    model = AutoModelForCausalLM.from_config(pretrained, dtype=getattr(torch, config.dtype))
    if config.bridge.trains_adapter:
        base = {name: parameter.detach() for name, parameter in model.named_parameters()}
        lora = LoraSettings(
            rank=config.lora_r,
            dropout=config.lora_dropout,
            target_modules=config.lora_target_modules,
            layer_indices=config.lora_layer_indices,
        )
        model = add_lora(model, lora)
        if config.bridge.mode == "lora_merged":
            MergedLora(model, base).merge()
    return Trainee(attached(model, is_shared=is_shared), config)


def plan_of(pretrained: PreTrainedConfig, config: TrainConfig) -> MemoryPlan:
    return memory_plan(model_shape(pretrained, config), config)


def part(plan: MemoryPlan, name: str) -> int:
    return sum(each.num_bytes for each in plan.parts if each.name == name)


def storage_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Of each storage once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(storages.values())


def saved_by(really: Trainee) -> int:
    """What autograd saves of the longest batch."""
    known = [*really.model.parameters(), *really.model.buffers()]
    return saved_bytes(lambda: really.logprobs(longest_batch(really.config)), known)


@pytest.mark.parametrize(("pretrained", "count"), PUBLISHED.values(), ids=PUBLISHED)
def test_parameters_are_as_many_as_the_published_models_have(pretrained: PreTrainedConfig, count: int) -> None:
    config = settings(dtype="bfloat16")
    plan = plan_of(pretrained, config)
    assert plan.num_trained == count
    assert part(plan, "weights") == 2 * count
    assert part(plan, "master weights") == part(plan, "gradients") == 4 * count
    assert part(plan, "optimizer state") == 8 * count


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"train_layer_indices": "1,3"},
        LORA,
        {**LORA, "lora_target_modules": ALL_LINEAR, "lora_r": 8, "lora_layer_indices": "2-3"},
    ],
    ids=["all", "layers", "adapters", "adapters on layers"],
)
def test_as_many_parameters_are_planned_as_are_trained(changes: dict[str, object]) -> None:
    config = settings(**changes)
    really = trainee(small(), config)
    assert plan_of(small(), config).num_trained == sum(
        parameter.numel() for parameter in really.model.parameters() if parameter.requires_grad
    )


def test_layers_and_adapter_targets_that_the_model_lacks_are_refused() -> None:
    with pytest.raises(ModelError, match=r"9 not in this model, which has 4 layers"):
        model_shape(small(), settings(train_layer_indices="9"))
    with pytest.raises(ModelError, match=r"w_pack are no linear layers of this model"):
        model_shape(small(), settings(**LORA, lora_target_modules=("q_proj", "w_pack")))


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
@pytest.mark.parametrize("masters", ["float32", "stochastic_rounding"])
@pytest.mark.parametrize("is_shared", [False, True])
def test_masters_and_states_take_the_planned_bytes(optimizer: str, masters: str, is_shared: bool) -> None:
    bridge = {"mode": "shared_vllm"} if is_shared else {"mode": "none"}
    config = settings(dtype="bfloat16", optimizer=optimizer, master_weights=masters, bridge=bridge)
    really = trainee(small(), config, is_shared=is_shared)
    gradient_step(really, longest_batch(config), step=0, policy_version=0)
    states = [
        value
        for state in really.optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.numel() > 1  # without counts of steps
    ]
    live = {parameter.untyped_storage().data_ptr() for parameter in really.model.parameters()}
    own = [m for m in really._masters.state_dict().values() if m.untyped_storage().data_ptr() not in live]
    plan = plan_of(small(), config)
    assert part(plan, "optimizer state") == sum(value.nbytes for value in states)
    assert part(plan, "master weights") == storage_bytes(own)
    assert part(plan, "weights") == (0 if is_shared else sum(p.nbytes for p in really.model.parameters()))


@pytest.mark.parametrize("gradients", ["float32", "bfloat16"])
@pytest.mark.parametrize("masters", ["float32", "stochastic_rounding"])
@pytest.mark.parametrize("changes", [{}, {"dtype": "float32"}, {"train_layer_indices": "1,3"}], ids=str)
def test_gradients_take_the_planned_bytes(gradients: str, masters: str, changes: dict[str, object]) -> None:
    config = settings(**{"dtype": "bfloat16", "gradient_dtype": gradients, "master_weights": masters, **changes})
    really = trainee(small(), config)
    batch = longest_batch(config)
    for _ in range(2):
        torch.autograd.backward(really.logprobs(batch)[0].sum())
    gradients_now = [parameter.grad for group in really.optimizer.param_groups for parameter in group["params"]]
    gradients_now += [parameter.grad for parameter in really.model.parameters()]
    assert part(plan_of(small(), config), "gradients") == storage_bytes(gradients_now)


@pytest.mark.parametrize("gradients", ["float32", "bfloat16"])
@pytest.mark.parametrize("masters", ["float32", "stochastic_rounding"])
@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_an_update_takes_the_planned_bytes(
    optimizer: str, masters: str, gradients: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizers, "STEPPED_AT_ONCE", 1)  # these parameters are small
    monkeypatch.setattr(rounding, "ROUNDED_AT_ONCE", 1024)
    config = settings(
        dtype="bfloat16", optimizer=optimizer, master_weights=masters, gradient_dtype=gradients, batch_size=1
    )
    pretrained = small()
    pretrained.vocab_size = 8000  # the largest parameters are then the first and the last, as they most often are
    really = trainee(pretrained, config)
    gradient_step(really, longest_batch(config), step=0, policy_version=0)  # makes the optimizer's state
    torch.autograd.backward(really.logprobs(longest_batch(config))[0].sum())
    state = [value for values in really.optimizer.state.values() for value in values.values()]
    parameters = [parameter for group in really.optimizer.param_groups for parameter in group["params"]]
    known = [*really.model.parameters(), *really._masters.state_dict().values(), *parameters, *state]
    known += [parameter.grad for parameter in parameters if parameter.grad is not None]
    with PeakMemory([tensor for tensor in known if isinstance(tensor, torch.Tensor)]) as memory:
        really.update(1e-6, is_finite=True)
    # What counts as freed here is what was made here, and not a gradient that stood in bf16.
    largest = max(parameter.numel() for parameter in really.model.parameters())
    in_bf16 = 2 * largest if gradients == "bfloat16" else 0
    planned = part(plan_of(pretrained, config), "optimizer update") + in_bf16
    assert memory.peak_bytes == pytest.approx(planned, abs=0.06 * 4 * largest)


def test_a_gradient_in_bf16_is_freed_before_its_update_is_computed() -> None:
    really = trainee(small(), settings(dtype="bfloat16", gradient_dtype="bfloat16"))
    torch.autograd.backward(really.logprobs(longest_batch(really.config))[0].sum())
    [group, *_] = really.optimizer.param_groups
    gradients = [weakref.ref(parameter.grad) for parameter in group["params"]]
    alive: list[int] = []
    really.optimizer.register_step_pre_hook(lambda *_: alive.append(sum(each() is not None for each in gradients)))
    really.update(1e-6, is_finite=True)
    assert alive
    assert alive[-1] == 0


def test_an_8_bit_state_has_two_bytes_a_number_and_a_scale_for_each_block() -> None:
    config = settings(optimizer="adamw_8bit")
    assert state_bytes((1024, 1024), config) == 2 * (2**20 + 4 * 2**20 // 256)
    assert state_bytes((128,), config) == 8 * 128  # too small for blocks: it stays fp32


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen3Config])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": "float32"},
        {"gradient_checkpointing": True},
        {"dtype": "float32", "gradient_checkpointing": True},
        LORA,
        {**LORA, "lora_dropout": 0},
        {**LORA, "lora_target_modules": ("o_proj", "down_proj")},
        {**LORA, "lora_target_modules": ALL_LINEAR},
        MERGED,
        {**MERGED, "lora_target_modules": ("o_proj", "down_proj")},
        {**MERGED, "lora_target_modules": ALL_LINEAR},
    ],
    ids=str,
)
def test_a_layer_saves_the_planned_bytes(kind: type[PreTrainedConfig], changes: dict[str, object]) -> None:
    config = settings(**{"dtype": "bfloat16", "seq_len": 33, "gradient_accumulation_steps": 1, **changes})
    models = [small(kind, layers=layers) for layers in (2, 3)]
    saved = [saved_by(trainee(model, config)) for model in models]
    planned = [part(plan_of(model, config), "saved activations") for model in models]
    assert planned[1] - planned[0] == saved[1] - saved[0]
    if not config.bridge.trains_adapter:
        assert planned[1] == pytest.approx(saved[1], rel=0.06)


@pytest.mark.filterwarnings("default")  # torch's compiler warns of its own
@pytest.mark.extended("compiling takes 5 to 15 s; of layers that are not compiled each part is measured above")
@pytest.mark.parametrize("kind", [LlamaConfig, Qwen3Config])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": "float32"},
        {"gradient_checkpointing": True},
        LORA,
        {**LORA, "lora_dropout": 0, "lora_target_modules": ALL_LINEAR},
        {**MERGED, "lora_target_modules": ("o_proj", "down_proj")},
        {**MERGED, "lora_target_modules": ALL_LINEAR},
    ],
    ids=str,
)
def test_a_compiled_layer_saves_the_planned_bytes(kind: type[PreTrainedConfig], changes: dict[str, object]) -> None:
    """The plan was for others: it had a third more, and micro-batches were called too large that fit."""
    torch.compiler.reset()
    config = settings(
        **{"dtype": "bfloat16", "seq_len": 33, "gradient_accumulation_steps": 1, "compile_layers": True, **changes}
    )
    models = [small(kind, layers=layers) for layers in (2, 3)]
    saved = [saved_by(trainee(model, config)) for model in models]
    planned = [part(plan_of(model, config), "saved activations") for model in models]
    assert planned[1] - planned[0] == pytest.approx(saved[1] - saved[0], rel=0.01)


def test_layers_below_the_first_trained_one_save_nothing() -> None:
    config = settings(dtype="bfloat16", train_layer_indices="2-3", seq_len=33, gradient_accumulation_steps=1)
    saved = saved_by(trainee(small(), config))
    assert part(plan_of(small(), config), "saved activations") == pytest.approx(saved, rel=0.06)


FURTHER = pytest.mark.extended("each part of the plan is measured alone by the tests above")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [LlamaConfig, pytest.param(Qwen3Config, marks=FURTHER)])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"gradient_checkpointing": True}, marks=FURTHER),
        pytest.param({"gradient_dtype": "bfloat16"}, marks=FURTHER),
        pytest.param({"train_layer_indices": "2-3"}, marks=FURTHER),
        pytest.param(LORA, marks=FURTHER),
        pytest.param(MERGED, marks=FURTHER),
        {**MERGED, "gradient_checkpointing": True, "lora_target_modules": ALL_LINEAR},
    ],
    ids=["all", "recompute", "bf16 gradients", "layers", "adapters", "merged", "merged and recompute"],
)
def test_a_step_peaks_at_the_planned_bytes(
    kind: type[PreTrainedConfig], changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounding, "ROUNDED_AT_ONCE", 1024)  # a small part of a parameter, as of a large one
    config = settings(dtype="bfloat16", batch_size=2, gradient_accumulation_steps=2, seq_len=513, **changes)
    really = trainee(small(kind), config)
    known = [*really.model.parameters(), *really.model.buffers()]
    known += [parameter for group in really.optimizer.param_groups for parameter in group["params"]]
    with PeakMemory(known) as memory:
        rehearse(really)
    plan = plan_of(small(kind), config)
    lasting = ("weights", "weights under adapters", "master weights", "optimizer state")
    before_it = sum(part(plan, name) for name in lasting)
    assert plan.allocated_bytes - before_it == pytest.approx(memory.peak_bytes, rel=0.15)


def test_the_output_layer_takes_the_planned_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TILES, "cuda", TILES["cpu"])  # the plan is for a GPU, the measurement is not
    config = settings(dtype="float32", batch_size=1, gradient_accumulation_steps=1, seq_len=4001)
    pretrained = small()
    pretrained.vocab_size = 10_000
    hidden = torch.randn(4000, pretrained.hidden_size, requires_grad=True)
    weight = torch.randn(pretrained.vocab_size, pretrained.hidden_size, requires_grad=True)
    labels = torch.arange(4000)
    with PeakMemory([hidden, weight, labels]) as memory:
        logprobs, entropy = token_logprobs(hidden, weight, labels)
        torch.autograd.backward(logprobs.sum() + entropy.sum())
    assert part(plan_of(pretrained, config), "output layer") == pytest.approx(memory.peak_bytes, rel=0.25)


def test_rows_and_tokens_of_the_longest_micro_batch() -> None:
    assert longest_micro_batch(settings(batch_size=4, seq_len=128)) == (4, 127)
    assert longest_micro_batch(settings(micro_batch_tokens=1024, seq_len=129, batch_size=64)) == (8, 128)
    assert longest_micro_batch(settings(micro_batch_tokens=1000, seq_len=601)) == (2, 500)
    assert longest_micro_batch(
        settings(micro_batch_tokens=4096, seq_len=129, batch_size=2, gradient_accumulation_steps=1)
    ) == (2, 128)


def test_a_reference_is_a_copy_unless_it_is_under_the_adapters() -> None:
    weights = part(plan_of(small(), settings()), "weights")
    assert part(plan_of(small(), settings()), "reference model") == 0
    assert part(plan_of(small(), settings(kl_coef=0.1)), "reference model") == weights
    assert part(plan_of(small(), settings(**LORA, kl_coef=0.1)), "reference model") == 0
    assert part(plan_of(small(), settings(**LORA, kl_coef=0.1, reference_model="other")), "reference model") == weights


def test_shared_weights_are_private_while_a_batch_is_trained_on_twice() -> None:
    shared = {"bridge": {"mode": "shared_vllm"}, "dtype": "bfloat16"}
    once, twice = plan_of(small(), settings(**shared)), plan_of(small(), settings(**shared, num_iterations=2))
    assert part(twice, "weights unseen") == 2 * twice.num_trained
    assert part(once, "weights unseen") == 0


def test_merged_adapters_keep_the_weights_under_them_and_nothing_else_of_the_model() -> None:
    plan = plan_of(small(), settings(bridge={"mode": "lora_merged"}, dtype="bfloat16"))
    q_and_v = 4 * (4 * 48 * 128 + 2 * 48 * 128)  # layers × (heads × head_dim × hidden, of queries and of values)
    assert part(plan, "weights under adapters") == 2 * q_and_v
    assert part(plan, "weights") == 0
    assert part(plan_of(small(), settings(**LORA, dtype="bfloat16")), "weights under adapters") == 0


def test_parts_of_different_moments_do_not_add_up() -> None:
    plan = MemoryPlan(
        parts=(
            Part(name="a", num_bytes=1000),
            Part(name="b", num_bytes=300, when=frozenset({Moment.HEAD})),
            Part(name="c", num_bytes=200, when=frozenset({Moment.LAYER, Moment.UPDATE})),
        ),
        num_trained=1,
        rows=1,
        row_tokens=1,
    )
    assert (plan.peak, plan.allocated_bytes, plan.slack_bytes) == (Moment.HEAD, 1300, 30)
    assert plan.needed_bytes == 1330 + CUDA_CONTEXT_BYTES


LARGE = settings(
    dtype="bfloat16", batch_size=4, gradient_accumulation_steps=4, seq_len=2048, bridge={"mode": "shared_vllm"}
)


def test_suggestions_come_cheapest_first_and_free_what_they_say() -> None:
    model = model_shape(LLAMA_8B, LARGE)
    suggestions = advice(model, LARGE, ON_H200).each
    assert [suggestion.text for suggestion in suggestions] == [
        "--gradient-checkpointing",
        "--batch-size 1 --gradient-accumulation-steps 16",
        "--gradient-dtype bfloat16",
        "--master-weights stochastic_rounding",
        "--optimizer adafactor",
        "gpu_memory_utilization of the inference server 0.30 lower",
        "--train-layer-indices 24-31",
        "--weight-bridge-mode lora_only",
        "--seq-len 512",
    ]
    recompute = LARGE.model_copy(update={"gradient_checkpointing": True})
    frees = memory_plan(model, LARGE).needed_bytes - memory_plan(model, recompute).needed_bytes
    assert suggestions[0].frees_bytes == frees


def test_suggestions_that_fit_together_have_nothing_superfluous_and_need_a_card_that_is_large_enough() -> None:
    model = model_shape(LLAMA_8B, LARGE)
    small_card = Card(name="small", total_bytes=8 * 10**9, free_bytes=8 * 10**9)
    assert advice(model, LARGE, small_card).together is None
    together = advice(model, LARGE, ON_H200).together
    assert together is not None
    assert together.text == "--gradient-checkpointing --gradient-dtype bfloat16 --optimizer adamw_8bit"

    def fits(**changes: object) -> bool:
        changed = LARGE.model_copy(update=changes)
        return memory_plan(model, changed).needed_bytes <= available_bytes(ON_H200, changed)

    enough = {"gradient_checkpointing": True, "gradient_dtype": "bfloat16", "optimizer": "adamw_8bit"}
    assert fits(**enough)
    for name in enough:
        assert not fits(**{other: value for other, value in enough.items() if other != name}), name


QWEN_14B = Qwen2Config(
    vocab_size=152_064,
    hidden_size=5120,
    intermediate_size=13_824,
    num_hidden_layers=48,
    num_attention_heads=40,
    num_key_value_heads=8,
    tie_word_embeddings=False,
)
LEAST_STATE = "--gradient-checkpointing --gradient-dtype bfloat16 --master-weights stochastic_rounding"


@pytest.mark.parametrize(
    ("pretrained", "flags", "enough"),
    [
        (
            LLAMA_8B,
            {"batch_size": 4, "gradient_accumulation_steps": 4, "gpu_memory_utilization": 0.5, "optimizer": "adamw"},
            f"{LEAST_STATE} --optimizer adafactor",
        ),
        (
            QWEN_14B,
            {"batch_size": 2, "gpu_memory_utilization": 0.45, "optimizer": "adamw_8bit"},
            f"{LEAST_STATE} --optimizer adafactor --train-layer-indices 12-47",
        ),
    ],
    ids=["8B", "14B"],
)
def test_the_flags_are_named_with_which_all_weights_are_trained_on_80_gb(
    pretrained: PreTrainedConfig, flags: dict[str, object], enough: str
) -> None:
    config = settings(dtype="bfloat16", device="cuda", seq_len=2048, bridge={"mode": "shared_vllm"}, **flags)
    model, card = model_shape(pretrained, config), card_of_size(config, 80)
    assert memory_plan(model, config).needed_bytes > available_bytes(card, config)
    together = advice(model, config, card).together
    assert together is not None
    assert together.text == enough
    changed = parse_flags(TrainConfig, [*to_flags(config), *enough.split()], prog="train", description="")
    assert memory_plan(model, changed).needed_bytes <= available_bytes(card, changed)


def test_a_smaller_share_for_inference_leaves_more_but_not_less_than_inference_needs() -> None:
    config = settings(dtype="bfloat16", bridge={"mode": "shared_vllm"})
    lower = config.model_copy(update={"gpu_memory_utilization": 0.25})
    assert available_bytes(ON_H200, lower) - available_bytes(ON_H200, config) == round(0.2 * ON_H200.total_bytes)
    cramped = Card(name="x", total_bytes=40 * 10**9, free_bytes=22 * 10**9, inference_share=0.45)  # weights: 16 GB
    assert not any("inference" in s.text for s in advice(model_shape(LLAMA_8B, config), config, cramped).each)


@pytest.mark.parametrize(
    ("changes", "measured_gb"),
    [
        ({"optimizer": "adamw", "compile_layers": False}, 95.8),
        ({"optimizer": "adamw", "compile_layers": True}, 87.7),
        ({"optimizer": "adamw", "compile_layers": True, "sharding_strategy": "shard_grad_op"}, 101.2),
        (
            {
                "optimizer": "adamw_8bit",
                "master_weights": "stochastic_rounding",
                "gradient_dtype": "bfloat16",
                "compile_layers": False,
            },
            55.7,
        ),
    ],
)
def test_each_of_two_ranks_is_planned_what_it_took_on_an_h200(changes: dict[str, object], measured_gb: float) -> None:
    base = {"dtype": "bfloat16", "device": "cuda", "seq_len": 2049, "micro_batch_tokens": 4096, "processes": 2}
    config = settings(**{**base, **changes})
    plan = memory_plan(model_shape(LLAMA_8B, config), config)
    assert plan.allocated_bytes / 1e9 == pytest.approx(measured_gb, rel=0.02)


def test_each_rank_is_planned_a_shard_of_the_base_model_and_the_whole_adapter() -> None:
    lora = {"dtype": "bfloat16", "device": "cuda", "seq_len": 2049, "bridge": {"mode": "lora_only"}}
    one, four = (
        {part.name: part.num_bytes for part in memory_plan(model_shape(LLAMA_8B, config), config).parts}
        for config in (settings(**lora), settings(**lora, processes=4))
    )
    assert four["adapters"] == 4 * 32 * 16 * (4096 + 4096 + 4096 + 1024)  # fp32, rank 16, q and v of 32 layers
    assert four["weights"] == (one["weights"] - four["adapters"]) // 4
    assert four["gradients"] == one["gradients"]
    assert four["optimizer state"] == one["optimizer state"]
    assert "gradients of a layer" not in four


def test_shards_in_main_memory_take_none_of_the_card() -> None:
    config = settings(dtype="bfloat16", device="cuda", seq_len=2049, processes=2, cpu_offload=True)
    parts = {part.name: part.num_bytes for part in memory_plan(model_shape(LLAMA_8B, config), config).parts}
    assert parts["master weights"] == parts["gradients"] == parts["optimizer state"] == 0
    assert parts["gathered layers"] > 0


def test_a_step_has_the_memory_of_a_server_that_sleeps_meanwhile() -> None:
    def free(mode: str, free_bytes: int) -> int:
        config = settings(bridge={"mode": mode}, gpu_memory_utilization=0.4)
        return free_in_a_step(config, free_bytes=free_bytes, total_bytes=1000)

    assert free("turns", 550) == 950  # awake now
    assert free("turns", 900) == 1000  # asleep already
    assert free("none", 550) == 550


def test_a_mode_of_turns_plans_a_step_beside_a_sleeping_engine_and_staging_memory() -> None:
    model = model_shape(
        LlamaConfig(vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=2), settings()
    )
    parts = {
        mode: {part.name: part.num_bytes for part in memory_plan(model, settings(bridge=bridge, device="cuda")).parts}
        for mode, bridge in {"turns": {"mode": "turns", "staging_mb": 7}, "none": {"mode": "none"}}.items()
    }
    assert parts["turns"] == parts["none"] | {"engine, asleep": 1_400_000_000, "staging memory": 7_000_000}
