"""Whether a step fits: the GPU memory of each of its parts, from the model's shape and the settings alone.

What lasts is counted: every parameter is known by its shape. What comes and goes is worked out for a decoder layer as
Llama and Qwen have it, in the way of Korthikanti et al. 2022 (arXiv 2205.05198, equation 1, which is for GPT): add up
what autograd keeps for each operation. Bytes a token, with h hidden, i intermediate, a = heads × head_dim, b = the
same of keys and values, n heads, m of keys, and d bytes an element of weights and activations:

    two RMS norms       2 (4h + 4)            the fp32 input, and 1 / rms
                        2 d h if trained      what the norm's weight is multiplied with
    norms of heads      4 (a + b + n + m)     where there are any (Qwen3); d (a + b) more if trained
    attention           d (2a + 2b) + 4n      query, key, value, output, log-sum-exp: the flash kernel keeps no square
    gated MLP           3 d i                 gate, silu(gate), up
    inputs of linears   d (2h + i) if trained the output projection's is attention's output, counted there; of those
                                              with adapters alone where these are merged

Compiled layers keep what enters these operations, in the type of the activations, and compute the rest again:

    two RMS norms       2 (d h + 4)           and their outputs where those enter linears that are trained (below)
    norms of heads      d (a + b) + 4 (n + m)
    attention           as above, and the angles of positions, 2 d head_dim
    gated MLP           2 d i                 gate, up
    inputs of linears   as above

and with gradient checkpointing only d h, the layer's input; the layer at work is then computed again. Assumes a kernel
that needs no mask, and no dropout but that of adapters. The tests count what autograd keeps, and the peak, against
these formulas.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from enum import StrEnum

from grpo_engine.algo.head import TILES
from grpo_engine.installed import is_on_cpu
from grpo_engine.models.config import BLOCK_8BIT, parse_layer_indices
from grpo_engine.models.layers import layer_of
from grpo_engine.train.config import TrainConfig

FP32, BF16 = 4, 2
CUDA_CONTEXT_BYTES = 600_000_000
"""Driver, kernels and cuBLAS' workspace, which torch's own count leaves out: 0.5 GB on an H200."""
SLEEPING_ENGINE = "engine, asleep"
SLEEPING_ENGINE_BYTES = 1_400_000_000
"""What vLLM keeps of the card while it sleeps, with CUDA graphs: an 8B model, vLLM 0.26, on an H100."""
SLACK = 0.10
"""Of what comes and goes in a step: torch's allocator cannot use every gap that is left."""
ALMOST_ALL = 0.9
LEAST_8BIT = 4096
"""bitsandbytes: a parameter's size below which its state stays fp32."""

OF_PARAMETERS = frozenset({"weights", "master weights", "gradients", "optimizer state"})
"""Parts of which each of several ranks has its shard."""

VOCABULARY_MULTIPLE = 64
"""vLLM pads a vocabulary to a multiple of it before it is divided among tensor parallel ranks."""

SAME_INPUT = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
"""Modules → the one that reads the same input, in the layers of Llama and Qwen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterShape:
    """One parameter; a tied one is there once."""

    name: str
    shape: tuple[int, ...]
    bytes_each: int

    @property
    def numel(self) -> int:
        """How many numbers."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Of its values."""
        return self.numel * self.bytes_each


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What a plan must know of a decoder."""

    parameters: tuple[ParameterShape, ...]
    """Of the model itself, without adapters."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    """Of a mixture of experts: of the experts that one token goes through, together."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    has_head_norms: bool
    """Whether queries and keys are normalised by head, as in Qwen3."""
    is_tied: bool
    """Whether the output layer is the embedding."""
    bytes_each: int
    """Of an element of weights and activations: 2 for bfloat16."""

    @property
    def num_parameters(self) -> int:
        """A tied one counts once."""
        return sum(parameter.numel for parameter in self.parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """The GPU that the trainer runs on."""

    name: str
    total_bytes: int
    free_bytes: int
    """What this process may have, that which it holds already included; inference's share is not in it."""
    inference_share: float | None = None
    """Share of the card that inference takes; None where it is on another card, or not known to be on this one."""


class Moment(StrEnum):
    """Points of a step at which its memory may peak."""

    HEAD = "in the output layer's backward pass"
    LAYER = "in the backward pass of a layer"
    UPDATE = "in the optimizer's update"


STEP = frozenset({Moment.HEAD, Moment.LAYER})
ALWAYS = frozenset(Moment)


@dataclass(frozen=True, slots=True)
class Part:
    """Memory for one purpose."""

    name: str
    num_bytes: int
    when: Set[Moment] = ALWAYS
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What a step takes."""

    parts: tuple[Part, ...]
    num_trained: int
    rows: int
    """Rows of the longest micro-batch …"""
    row_tokens: int
    """… and inputs of each."""

    @property
    def peak(self) -> Moment:
        """When it takes most."""
        return max(Moment, key=self._at)

    @property
    def allocated_bytes(self) -> int:
        """At the peak, as torch counts it (`torch.cuda.max_memory_allocated`)."""
        return self._at(self.peak)

    @property
    def lasting_bytes(self) -> int:
        """What is there at all times, between two steps too."""
        return sum(part.num_bytes for part in self.parts if part.when == ALWAYS)

    @property
    def slack_bytes(self) -> int:
        """What the allocator cannot use."""
        return int(SLACK * (self.allocated_bytes - self.lasting_bytes))

    @property
    def needed_bytes(self) -> int:
        """At the peak, as the card counts it."""
        return self.allocated_bytes + CUDA_CONTEXT_BYTES + self.slack_bytes

    def _at(self, moment: Moment) -> int:
        return sum(part.num_bytes for part in self.parts if moment in part.when)


def memory_plan(model: ModelShape, config: TrainConfig) -> MemoryPlan:
    """The parts of a step with these settings, for its longest micro-batch; of several ranks, those of one."""
    num_trained = sum(parameter.numel for parameter in trained_parameters(model, config))
    reference = sum(parameter.num_bytes for parameter in model.parameters) if _has_reference_copy(config) else 0
    if config.splits_model:
        model = part_of_model(model, config.num_ranks)
    trained = list(trained_parameters(model, config))
    rows, row_tokens = longest_micro_batch(config)
    activations, layer = _activations(model, config, trained, rows * row_tokens)
    weights = sum(parameter.num_bytes for parameter in model.parameters)
    learning = sum(parameter.num_bytes for parameter in trained)
    has_adapters, is_shared = config.bridge.trains_adapter, config.bridge.shares_memory
    shards = 1 if config.splits_model else config.num_ranks // config.num_replicas
    if shards > 1:
        own = Part("weights", weights, note=f"a shard of {shards}; masters are the shards where there are any")
    elif is_shared:
        own = Part("weights", 0, note="the inference server's")
    elif has_adapters:
        own = Part("weights", weights + learning, note="with adapters")
    else:
        own = Part("weights", weights)
    kept = sum(parameter.num_bytes for parameter in _adapted(model, config)) if has_adapters and is_shared else 0
    parts = [
        own,
        Part("weights under adapters", kept, note="to fold the adapter into" if kept else ""),
        Part("master weights", _masters(trained, config, is_shared)),
        Part("gradients", sum(_gradient(parameter, config) for parameter in trained)),
        Part("optimizer state", sum(state_bytes(parameter.shape, config) for parameter in trained)),
        Part("reference model", reference),
        Part("saved activations", activations, STEP),
        Part("gradient in flight", max((parameter.num_bytes for parameter in trained), default=0), {Moment.LAYER}),
        Part("one layer's backward", layer, {Moment.LAYER}, "computed again" if config.gradient_checkpointing else ""),
        Part("output layer", _head(model, trained, rows * row_tokens), {Moment.HEAD}),
        Part("optimizer update", _update(trained, config), {Moment.UPDATE}),
    ]
    if is_shared and config.num_iterations > 1:
        unseen = kept or learning  # merged weights are recomputed in each forward pass, and kept for the backward pass
        parts.insert(6, Part("weights unseen", unseen, note="between two hand-overs"))
    if config.bridge.takes_turns and config.device != "cpu":
        parts.append(Part(SLEEPING_ENGINE, SLEEPING_ENGINE_BYTES, note="CUDA graphs and workspace"))
        parts.append(Part("staging memory", config.bridge.device_bytes))
    if shards > 1:
        whole = Part("adapters", learning if has_adapters else 0)
        parts = [*_sharded(parts, config, shards), whole, *_gathered(model, config)]
    return MemoryPlan(
        parts=tuple(part for part in parts if part.num_bytes or part.note),
        num_trained=num_trained,
        rows=rows,
        row_tokens=row_tokens,
    )


def part_of_model(model: ModelShape, num_ranks: int) -> ModelShape:
    """What one tensor parallel rank has of a model, the largest: its heads, units of the MLP and words."""
    words = math.ceil(model.vocab_size / VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE // num_ranks
    key_heads = max(model.num_kv_heads // num_ranks, 1)

    def part(parameter: ParameterShape) -> ParameterShape:
        module = parameter.name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
        rows, *columns = parameter.shape
        match module:
            case "embed_tokens" | "lm_head":
                rows = min(words, rows)
            case "k_proj" | "v_proj":
                rows = key_heads * model.head_dim
            case "q_proj" | "gate_proj" | "up_proj":
                rows //= num_ranks
            case "o_proj" | "down_proj":
                columns = [each // num_ranks for each in columns]
        return replace(parameter, shape=(rows, *columns))

    return replace(
        model,
        parameters=tuple(part(parameter) for parameter in model.parameters),
        intermediate_size=model.intermediate_size // num_ranks,
        num_heads=model.num_heads // num_ranks,
        num_kv_heads=key_heads,
        vocab_size=min(words, model.vocab_size),
    )


def _sharded(parts: Sequence[Part], config: TrainConfig, shards: int) -> Iterator[Part]:
    """The parts of one rank: it stores its shard of what belongs to parameters; fp32 masters are the shards. What
    belongs to adapters is whole on each rank."""
    has_masters = any(part.name == "master weights" and part.num_bytes for part in parts)
    of_shards = {"weights"} if config.bridge.trains_adapter else OF_PARAMETERS
    for part in parts:
        if part.name not in of_shards:
            yield part
        elif config.cpu_offload:
            yield replace(part, num_bytes=0, note="in main memory" if part.num_bytes else "")
        else:
            are_masters = part.name == "weights" and has_masters
            yield replace(part, num_bytes=0 if are_masters else part.num_bytes // shards)


def _gathered(model: ModelShape, config: TrainConfig) -> Iterator[Part]:
    """Whole parameters: of what is outside of layers in the whole pass; of all layers with `shard_grad_op`, else of
    two, since one is fetched while the other computes; and the gradients of one on the way to the ranks."""
    of_layers = Counter[int | None]()
    for parameter in model.parameters:
        of_layers[layer_of(parameter.name)] += parameter.numel
    outside = of_layers.pop(None, 0)
    largest = max(of_layers.values(), default=0)
    yield Part("gathered embeddings", model.bytes_each * outside, STEP)
    if config.keeps_gathered:
        yield Part("gathered layers", model.bytes_each * sum(of_layers.values()), STEP)
    else:
        yield Part("gathered layers", 2 * model.bytes_each * largest, {Moment.LAYER})
    if not config.bridge.trains_adapter:
        yield Part("gradients of a layer", (model.bytes_each + FP32) * largest, {Moment.LAYER}, "summed over ranks")


def longest_micro_batch(config: TrainConfig) -> tuple[int, int]:
    """Rows and inputs of each; a sequence's last token is a label only."""
    row_tokens = config.seq_len - 1
    if config.micro_batch_tokens is None:
        return config.batch_size, row_tokens
    rows = max(config.micro_batch_tokens // row_tokens, 1)
    if rows * row_tokens < ALMOST_ALL * config.micro_batch_tokens:  # somewhat shorter ones are more tokens in all
        rows += 1
        row_tokens = config.micro_batch_tokens // rows
    return min(rows, config.sequences_per_batch), row_tokens


def trained_parameters(model: ModelShape, config: TrainConfig) -> Iterator[ParameterShape]:
    """What learns: all parameters, those of some layers, or the two factors of every adapter (fp32)."""
    if not config.bridge.trains_adapter:
        layers = _layers(config.train_layer_indices)
        yield from (p for p in model.parameters if layers is None or layer_of(p.name) in layers)
        return
    for parameter in _adapted(model, config):
        num_out, num_in = parameter.shape
        yield ParameterShape(name=f"{parameter.name}.A", shape=(config.lora_r, num_in), bytes_each=FP32)
        yield ParameterShape(name=f"{parameter.name}.B", shape=(num_out, config.lora_r), bytes_each=FP32)


def available_bytes(card: Card, config: TrainConfig) -> int:
    """What the trainer may have of the card, if inference takes the share that `config` says."""
    if card.inference_share is None:
        return card.free_bytes
    return card.free_bytes + int((card.inference_share - config.gpu_memory_utilization) * card.total_bytes)


def saved_by_layer(
    model: ModelShape,
    *,
    trains_weights: bool,
    adapters: Sequence[ParameterShape] = (),
    are_merged: bool = False,
    mask_bytes: int = 0,
    is_compiled: bool = False,
) -> int:
    """Bytes a token that autograd keeps of one layer: the tables above.

    Args:
        adapters: of this layer, as `trained_parameters` gives them.
        are_merged: they are folded into the weights.
        mask_bytes: for each of their inputs, of the mask of a dropout.
    """
    h, i, d = model.hidden_size, model.intermediate_size, model.bytes_each
    a, b = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    norm_bytes = d if is_compiled else FP32
    saved = 2 * (norm_bytes * h + 4) + d * (2 * a + 2 * b) + 4 * model.num_heads
    saved += 2 * d * (i + model.head_dim) if is_compiled else 3 * d * i
    if model.has_head_norms:
        saved += norm_bytes * (a + b) + FP32 * (model.num_heads + model.num_kv_heads)
    if trains_weights:
        saved += d * (2 * h + i)
    if trains_weights and not is_compiled:
        saved += 2 * d * h + (d * (a + b) if model.has_head_norms else 0)
    factors = [parameter for parameter in adapters if parameter.name.endswith(".A")]
    inputs = _inputs(factors)
    if are_merged:
        # That of the output projection is attention's output, which is there; compiled layers compute the MLP's again.
        others = {"o_proj", "gate_proj", "down_proj"} if is_compiled else {"o_proj"}
        return saved + d * sum(width for module, width in inputs.items() if module not in others)
    # An adapter keeps its input as fp32, and what its first factor makes of it. In compiled layers those of one input
    # share it, unless each has a dropout of its own.
    are_shared = is_compiled and not mask_bytes
    widths = inputs.values() if are_shared else [factor.shape[1] for factor in factors]
    return saved + (FP32 + mask_bytes) * sum(widths) + FP32 * sum(factor.shape[0] for factor in factors)


def _inputs(factors: Sequence[ParameterShape]) -> dict[str, int]:
    """Numbers a token of each input of adapters, by the first module that reads it."""
    modules = [factor.name.removesuffix(".weight.A").rpartition(".")[2] for factor in factors]
    return {SAME_INPUT.get(module, module): factor.shape[1] for module, factor in zip(modules, factors, strict=True)}


def state_bytes(shape: tuple[int, ...], config: TrainConfig) -> int:
    """What the optimizer remembers of a parameter, which it sees as fp32."""
    numel = math.prod(shape)
    match config.optimizer:
        case "adafactor":  # a row and a column of every matrix
            return FP32 * (math.prod(shape[:-1]) + math.prod(shape[:-2]) * shape[-1] if len(shape) > 1 else numel)
        case "adamw_8bit" if numel >= LEAST_8BIT:
            return 2 * (numel + FP32 * math.ceil(numel / BLOCK_8BIT))
        case _:
            return 2 * FP32 * numel


def _adapted(model: ModelShape, config: TrainConfig) -> Iterator[ParameterShape]:
    """The matrices that get an adapter."""
    layers = _layers(config.lora_layer_indices)
    for parameter in model.parameters:
        module = parameter.name.removesuffix(".weight").rpartition(".")[2]
        if module not in config.lora_target_modules or len(parameter.shape) != 2:
            continue
        if layers is None or layer_of(parameter.name) in layers:
            yield parameter


def _mask_bytes(config: TrainConfig) -> int:
    """For each input of an adapter: torch keeps a bool on a GPU and in compiled layers, else a factor."""
    return 0 if not config.lora_dropout else FP32 if is_on_cpu(config.device) and not config.compile_layers else 1


def _activations(
    model: ModelShape, config: TrainConfig, trained: Sequence[ParameterShape], num_tokens: int
) -> tuple[int, int]:
    """What is kept until the backward pass, and what one layer takes during it."""
    h, i, d = model.hidden_size, model.intermediate_size, model.bytes_each
    has_adapters = config.bridge.trains_adapter
    trained_layers = {layer_of(parameter.name) for parameter in trained}
    first = 0 if None in trained_layers else min((n for n in trained_layers if n is not None), default=0)
    of_layers = [
        saved_by_layer(
            model,
            trains_weights=number in trained_layers and not has_adapters,
            adapters=[p for p in trained if layer_of(p.name) == number] if has_adapters else (),
            are_merged=config.bridge.shares_memory,
            mask_bytes=_mask_bytes(config),
            is_compiled=config.compile_layers,
        )
        for number in range(first, model.num_layers)  # nothing below the first that learns has a gradient
    ]
    # Token ids, the final norm, its output where it is trained, and numbers of each token for the loss.
    trains_norm = None in trained_layers and not has_adapters
    around = (FP32 * h + 4) + (2 if trains_norm else 1) * d * h + 128
    # The gradients of both factors of the MLP's product, of its output, and of the residual stream; or those of a norm.
    at_work = max(2 * d * i + 3 * d * h, 5 * FP32 * h)
    if config.gradient_checkpointing:
        kept, layer = d * h * len(of_layers), at_work + max(of_layers, default=0)
    else:
        kept, layer = sum(of_layers), at_work
    return num_tokens * (kept + around), num_tokens * layer


def _head(model: ModelShape, trained: Sequence[ParameterShape], num_tokens: int) -> int:
    """The output layer's backward pass, tile by tile: see `algo.head`."""
    h, vocabulary, d = model.hidden_size, model.vocab_size, model.bytes_each
    most_tokens, fewest_words = TILES["cuda"]
    tokens = min(num_tokens, most_tokens)
    words = min(most_tokens * fewest_words // tokens, vocabulary)
    of_tile = tokens * words * (FP32 + d)  # its logits, and their gradient as it is multiplied
    head_name = "embed_tokens.weight" if model.is_tied else "lm_head.weight"
    trains_head = any(parameter.name.endswith(head_name) for parameter in trained)
    of_weight = d * vocabulary * h + FP32 * words * h if trains_head else 0
    return of_tile + of_weight + FP32 * h * num_tokens


def _masters(trained: Sequence[ParameterShape], config: TrainConfig, is_shared: bool) -> int:
    """fp32 copies; where rounding is stochastic, a private copy in bf16 of what inference reads meanwhile."""
    num_bytes = 0
    for parameter in trained:
        if parameter.bytes_each == FP32:
            num_bytes += FP32 * parameter.numel if is_shared else 0
        elif config.master_weights == "float32":
            num_bytes += FP32 * parameter.numel
        elif is_shared:
            num_bytes += parameter.num_bytes
    return num_bytes


def _gradient(parameter: ParameterShape, config: TrainConfig) -> int:
    """fp32, unless bf16 is asked for and the parameter is bf16."""
    is_bf16 = parameter.bytes_each == BF16 and config.gradient_dtype == "bfloat16"
    return (BF16 if is_bf16 else FP32) * parameter.numel


def _update(trained: Sequence[ParameterShape], config: TrainConfig) -> int:
    """What the optimizer's step takes for one parameter, the largest."""
    largest = max((parameter.numel for parameter in trained), default=0)
    squares = 2 * FP32 * largest if config.optimizer == "adafactor" else 0
    are_bf16 = any(parameter.bytes_each == BF16 for parameter in trained)
    value = FP32 * largest if are_bf16 and config.master_weights == "stochastic_rounding" else 0
    gradient = (FP32 - BF16) * largest if are_bf16 and config.gradient_dtype == "bfloat16" else 0
    return squares + value + gradient


def _has_reference_copy(config: TrainConfig) -> bool:
    """With adapters the reference is the model under them, unless it is another model; services hold their own."""
    is_another = config.reference_model not in (None, config.model_name)
    return config.has_reference and not config.reference_urls and (is_another or not config.bridge.trains_adapter)


def _layers(indices: str | None) -> frozenset[int | None] | None:
    return None if indices is None else frozenset(parse_layer_indices(indices))
