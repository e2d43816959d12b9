"""The code around vLLM, tested without vLLM: layouts, checkpoints, requests, the gate, the environment."""

from __future__ import annotations

import asyncio
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import GPT2Config, LlamaConfig
from vllm_fakes import Letters, Served, flat

from grpo_engine.errors import BridgeError, ConfigError, DataError, ModelError
from grpo_engine.server.config import ServerConfig
from grpo_engine.server.engine import EngineUnavailable, NotANumber
from grpo_engine.server.gate import Gate
from grpo_engine.server.prompts import max_new_tokens
from grpo_engine.server.receiving import Part
from grpo_engine.server.vllm.arguments import prepare_environment
from grpo_engine.server.vllm.checkpoint import Parameters, check_fits, parameters_of
from grpo_engine.server.vllm.flags import frontend_of
from grpo_engine.server.vllm.layout import (
    compare_with_checkpoint,
    has_stored_buffers,
    parts_under_hf_names,
    views_under_hf_names,
)
from grpo_engine.server.vllm.requests import generation
from grpo_engine.server.vllm.running import RunningVersions, TokenVersions, lengths_so_far
from grpo_engine.wire.inference import GenerateRequest

EXPECTED = {
    "embed.weight": (5, 4),
    "attn.q_proj.weight": (4, 4),
    "attn.k_proj.weight": (2, 4),
    "attn.v_proj.weight": (2, 4),
    "attn.q_proj.bias": (4,),
    "attn.k_proj.bias": (2,),
    "attn.v_proj.bias": (2,),
    "norm.weight": (4,),
}
TIED = {"head.weight": "embed.weight"}


@pytest.mark.parametrize("has_adapters", [False, True])
def test_fused_rows_are_views_under_the_names_of_transformers(has_adapters: bool) -> None:
    model = Served(has_adapters=has_adapters)
    views = views_under_hf_names(model, EXPECTED, TIED)
    assert {name: tuple(view.shape) for name, view in views.items()} == EXPECTED
    assert views["attn.k_proj.weight"].tolist() == [[16, 17, 18, 19], [20, 21, 22, 23]]
    assert views["attn.v_proj.bias"].tolist() == [6, 7]
    views["attn.q_proj.weight"].fill_(-1)
    views["embed.weight"].zero_()
    fused = dict(model.named_parameters())
    name = next(name for name in fused if name.endswith("qkv_proj.weight") or name.endswith("base_layer.weight"))
    assert fused[name][:4].eq(-1).all()
    assert fused[name][4:].eq(torch.arange(16.0, 32.0).reshape(4, 4)).all()
    assert model.embed.weight[:5].eq(0).all()
    assert not model.embed.weight[5:].eq(0).any()


def test_buffers_that_a_checkpoint_may_have_are_found_and_those_that_vllm_computes_are_not() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].register_buffer("_k_scale", torch.ones(()))
    model[0].register_buffer("cos_sin_cache", torch.ones(4), persistent=False)
    model[1].register_buffer("counts", torch.ones(4, dtype=torch.int64))
    assert not has_stored_buffers(model)
    model[1].register_buffer("layer_scalar", torch.ones(1))
    assert has_stored_buffers(model)


def test_matrices_of_gpt2_are_views_the_other_way_round() -> None:
    served = type("GPT2LMHeadModel", (nn.Module,), {})()
    served.c_proj, served.wpe = nn.Linear(2, 2), nn.Embedding(3, 2)
    expected = {"c_proj.weight": (2, 2), "c_proj.bias": (2,), "wpe.weight": (3, 2)}
    views = views_under_hf_names(served, expected, {})
    assert views["c_proj.weight"].equal(served.c_proj.weight.t())
    assert views["wpe.weight"].equal(served.wpe.weight)
    views["c_proj.weight"][0, 1] = 7
    assert served.c_proj.weight[1, 0] == 7


def test_every_difference_of_the_two_models_is_named() -> None:
    def problem(expected: dict[str, tuple[int, ...]], aliases: dict[str, str]) -> str:
        with pytest.raises(BridgeError) as caught:
            views_under_hf_names(Served(), expected, aliases)
        return str(caught.value)

    assert "not found in vLLM: extra.weight" in problem({**EXPECTED, "extra.weight": (1,)}, TIED)
    assert "of another shape: norm.weight (4,) instead of (3,)" in problem({**EXPECTED, "norm.weight": (3,)}, TIED)
    without_norm = {name: shape for name, shape in EXPECTED.items() if name != "norm.weight"}
    assert "only in vLLM: norm.weight" in problem(without_norm, TIED)
    assert "tied embeddings" in problem({**EXPECTED, "head.weight": (5, 4)}, {})


WHOLE = {
    "embed.weight": torch.arange(20.0).reshape(5, 4),
    "q_proj.weight": torch.arange(16.0).reshape(4, 4),
    "k_proj.weight": torch.arange(16.0, 24.0).reshape(2, 4),
    "v_proj.weight": torch.arange(24.0, 32.0).reshape(2, 4),
    "o_proj.weight": torch.arange(32.0, 48.0).reshape(4, 4),
    "norm.weight": torch.ones(4),
}


def one_of_two(rank: int) -> nn.Module:
    """The process of this rank among two of vLLM: two heads for queries, one for k and v, padded vocabulary."""
    rows = slice(2 * rank, 2 * rank + 2)
    model = nn.Module()
    model.packed_modules_mapping = Served.packed_modules_mapping  # type: ignore[assignment]
    model.qkv_proj = nn.Module()
    model.qkv_proj.output_sizes = [4, 4, 4]  # type: ignore[assignment] # k and v once for each rank
    fused = [WHOLE["q_proj.weight"][rows], WHOLE["k_proj.weight"], WHOLE["v_proj.weight"]]
    model.qkv_proj.weight = nn.Parameter(torch.cat(fused))
    model.o_proj = nn.Linear(2, 4, bias=False)
    model.o_proj.weight.data = WHOLE["o_proj.weight"][:, rows].contiguous()
    model.embed = nn.Module()
    model.embed.weight = nn.Parameter(torch.full((4, 4), -1.0))
    first, end = (0, 4) if rank == 0 else (4, 5)
    model.embed.weight.data[: end - first] = WHOLE["embed.weight"][first:end]
    model.embed.shard_indices = SimpleNamespace(  # type: ignore[assignment]
        org_vocab_start_index=first, num_org_elements=end - first
    )
    model.norm = nn.Module()
    model.norm.weight = nn.Parameter(WHOLE["norm.weight"].clone())
    return model


@pytest.mark.parametrize("rank", [0, 1])
def test_each_process_of_a_tensor_parallel_server_knows_which_part_of_a_weight_it_has(
    rank: int, tmp_path: Path
) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in WHOLE.items()}
    parts = parts_under_hf_names(one_of_two(rank), shapes, {}, rank=rank, num_ranks=2)
    for name, part in parts.items():
        assert part.memory.equal(WHOLE[name] if part.place is None else WHOLE[name][part.place]), name
    assert {name for name, part in parts.items() if part.place is None} == {
        "k_proj.weight", "v_proj.weight", "norm.weight"
    }  # fmt: skip
    save_file(WHOLE, tmp_path / "model.safetensors")
    assert compare_with_checkpoint(parts, tmp_path) == len(WHOLE)
    of_the_other = parts_under_hf_names(one_of_two(1 - rank), shapes, {}, rank=rank, num_ranks=2)
    with pytest.raises(BridgeError, match="row"):
        compare_with_checkpoint(of_the_other, tmp_path)
    with pytest.raises(BridgeError, match=r"o_proj\.weight"):
        parts_under_hf_names(one_of_two(rank), {**shapes, "o_proj.weight": (4, 3)}, {}, rank=rank, num_ranks=2)


def test_a_fused_layer_of_unknown_sizes_is_refused() -> None:
    model = Served()
    model.attn.qkv_proj.output_sizes = [4, 4]
    with pytest.raises(BridgeError, match=r"attn\.qkv_proj: 8 rows of 3 fused projections"):
        views_under_hf_names(model, EXPECTED, TIED)


def test_weights_that_differ_from_the_checkpoint_in_value_are_refused(tmp_path: Path) -> None:
    square = torch.arange(16.0).reshape(4, 4)
    save_file({"a": square, "b": torch.ones(3), "unknown": torch.ones(2)}, tmp_path / "model.safetensors")
    whole = {"a": Part(square), "b": Part(torch.ones(3)), "c": Part(torch.ones(1))}
    assert compare_with_checkpoint(whole, tmp_path) == 2
    with pytest.raises(BridgeError, match="has only 2 of the model's 3 tensors"):
        compare_with_checkpoint(whole, tmp_path, has_all=True)
    assert compare_with_checkpoint({"a": Part(square.bfloat16())}, tmp_path, has_all=True) == 1
    with pytest.raises(BridgeError, match="a: row"):
        compare_with_checkpoint({"a": Part(square.T.contiguous())}, tmp_path)


def test_a_checkpoint_fits_by_names_and_shapes(tmp_path: Path) -> None:
    served = Parameters(shapes={"embed": (4, 2), "norm": (2,)}, aliases={"head": "embed"})

    def check(**tensors: torch.Tensor) -> None:
        save_file(tensors, tmp_path / "model.safetensors")
        check_fits(tmp_path, served)

    embed, norm = torch.zeros(4, 2), torch.zeros(2)
    check(embed=embed, norm=norm)
    check(head=embed.clone(), norm=norm)
    check(embed=embed, norm=norm, **{"rotary_emb.inv_freq": torch.zeros(1)})
    with pytest.raises(ModelError, match="norm is only in the served model"):
        check(embed=embed)
    with pytest.raises(ModelError, match="layer is only in the checkpoint"):
        check(embed=embed, norm=norm, layer=norm.clone())
    with pytest.raises(ModelError, match=r"norm is \(3,\), but \(2,\) is served"):
        check(embed=embed, norm=torch.zeros(3))
    (tmp_path / "model.safetensors").write_bytes(b"\x10")
    with pytest.raises(ModelError, match="cannot be read"):
        check_fits(tmp_path, served)
    with pytest.raises(ModelError, match=r"no \*\.safetensors there"):
        check_fits(tmp_path / "nowhere", served)


@pytest.mark.slow
@pytest.mark.parametrize("is_tied", [False, True])
def test_a_models_parameters_are_known_without_its_weights(tmp_path: Path, is_tied: bool) -> None:
    LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=is_tied,
    ).save_pretrained(tmp_path)
    parameters = parameters_of(str(tmp_path))
    assert parameters.shapes["model.embed_tokens.weight"] == (16, 8)
    assert parameters.shapes["model.layers.0.self_attn.k_proj.weight"] == (4, 8)
    assert ("lm_head.weight" in parameters.shapes) is not is_tied
    assert parameters.aliases == ({"lm_head.weight": "model.embed_tokens.weight"} if is_tied else {})


def test_answers_have_finite_values_for_every_token_and_the_most_probable_first() -> None:
    output = SimpleNamespace(
        outputs=[
            SimpleNamespace(index=1, token_ids=[7], logprobs=flat({7: -1.0}), finish_reason="length"),
            SimpleNamespace(
                index=0,
                token_ids=[5, 2],
                logprobs=flat({5: -3.0, 8: -0.5, 9: -1.5}, {2: -math.inf, 8: -0.1, 9: -2.0}),
                finish_reason="stop",
            ),
        ],
        prompt_logprobs=flat({}, {4: -2.0, 6: -0.25}),
    )
    params = GenerateRequest(prompt="x", n=2, logprobs=2, prompt_logprobs=1)
    answer = generation(output, [3, 4], params, TokenVersions(11, [(12, {0: 1})]), Letters())
    first, second = answer.completions
    assert (first.text, second.text) == ("e", "g")
    assert first.logprobs == [-3.0, -9999.0]
    assert first.top_logprobs == [[(8, -0.5), (9, -1.5)], [(8, -0.1), (9, -2.0)]]
    assert (first.policy_versions, second.policy_versions) == ([11, 12], [11])
    assert (first.finish_reason, second.finish_reason) == ("stop", "length")
    assert answer.prompt_logprobs == [None, [(4, -2.0), (6, -0.25)]]
    output.outputs[0].finish_reason = "error"
    with pytest.raises(EngineUnavailable, match="'error'"):
        generation(output, [3, 4], params, TokenVersions(12), Letters())


@pytest.mark.parametrize(
    ("token_ids", "changes", "text"),
    [
        ([5, 0, 6], {}, "ef"),
        ([5, 0, 6], {"skip_special_tokens": False}, "e<0>f"),
        ([5, 1, 6, 1], {}, "e\ufffdf"),
    ],
    ids=["special tokens", "special tokens shown", "half a character at the end"],
)
def test_the_text_is_decoded_once_the_answer_is_complete(
    token_ids: list[int], changes: dict[str, object], text: str
) -> None:
    logprobs = flat(*({token: -1.0} for token in token_ids))
    completion = SimpleNamespace(index=0, token_ids=token_ids, logprobs=logprobs, finish_reason="length")
    params = GenerateRequest.model_validate({"prompt": "x", **changes})
    answer = generation(SimpleNamespace(outputs=[completion]), [3, 4], params, TokenVersions(1), Letters())
    assert answer.completions[0].text == text


def test_a_nan_logprob_is_refused_and_not_replaced_by_a_number() -> None:
    completion = SimpleNamespace(index=0, token_ids=[7], finish_reason="length", logprobs=flat({7: math.nan}))
    with pytest.raises(NotANumber, match="version 11 compute NaN"):
        generation(
            SimpleNamespace(outputs=[completion]), [3], GenerateRequest(prompt="x"), TokenVersions(11), Letters()
        )


def test_tokens_after_a_change_of_weights_are_of_the_new_version() -> None:
    running = RunningVersions()
    with running.request("r", 3) as versions, running.request("other", 3) as other:
        running.change(4, {("r", 0): 2, ("r", 1): 0, ("unknown", 0): 7})
        running.change(5, {("r", 0): 2, ("other", 0): 1})
    running.change(6, {("r", 0): 3})  # a finished request
    assert versions.of(0, 4) == [3, 3, 5, 5]
    assert versions.of(1, 2) == [4, 4]  # finished before version 5
    assert versions.of(2, 2) == [3, 3]  # finished before version 4
    assert other.of(0, 3) == [3, 5, 5]


def test_unfinished_completions_are_found_under_the_id_of_their_request() -> None:
    def state(request: str, index: int, length: int | None) -> SimpleNamespace:
        detokenizer = None if length is None else SimpleNamespace(num_output_tokens=lambda: length)
        return SimpleNamespace(external_req_id=request, request_index=index, detokenizer=detokenizer)

    states = {"0_a": state("a", 0, 5), "1_a": state("a", 1, 0), "pooling": state("p", 0, None)}
    assert lengths_so_far(SimpleNamespace(request_states=states)) == {("a", 0): 5, ("a", 1): 0}


def test_a_request_is_limited_to_the_models_length_and_vocabulary() -> None:
    def length(prompt: list[int], **params: object) -> int:
        return max_new_tokens(prompt, GenerateRequest(prompt="x", **params), max_model_len=8, vocabulary=10)

    assert length([1, 2], max_tokens=3) == 3
    assert length([1, 2], max_tokens=30) == 6
    with pytest.raises(DataError, match="no tokens"):
        length([])
    with pytest.raises(DataError, match="8 tokens leave no room"):
        length([1] * 8)
    with pytest.raises(DataError, match="token 10 is not in the vocabulary of 10"):
        length([1, 10])
    with pytest.raises(DataError, match="logprobs: 11, but this server has at most 10 at each token"):
        length([1], logprobs=11)


async def test_a_gate_drains_the_generations_inside_and_keeps_the_others_waiting() -> None:
    gate, may_leave, events = Gate(), asyncio.Event(), []

    async def first() -> None:
        async with gate.passing():
            events.append("first in")
            await may_leave.wait()
            events.append("first out")

    async def second() -> None:
        async with gate.passing():
            events.append("second in")

    running = asyncio.create_task(first())
    await asyncio.sleep(0)
    closing = asyncio.create_task(gate.drain())
    await asyncio.sleep(0)
    waiting = asyncio.create_task(second())
    await asyncio.sleep(0)
    assert not closing.done()
    may_leave.set()
    await closing
    assert events == ["first in", "first out"]
    await gate.open()
    await asyncio.gather(running, waiting)
    assert events[-1] == "second in"


async def test_opening_a_gate_ends_a_drain_and_a_cancelled_request_counts_as_out() -> None:
    gate = Gate()

    async def inside() -> None:
        async with gate.passing():
            await asyncio.Event().wait()

    running = asyncio.create_task(inside())
    await asyncio.sleep(0)
    closing = asyncio.create_task(gate.drain())
    await asyncio.sleep(0)
    await gate.open()
    await closing
    assert gate.is_open
    closing = asyncio.create_task(gate.drain())
    await asyncio.sleep(0)
    running.cancel()
    await closing
    assert not gate.is_open


def config(**settings: object) -> ServerConfig:
    return ServerConfig(**{"model_name": "m", **settings})


def test_sharing_over_processes_is_refused_where_a_trainer_could_not_have_their_parts(tmp_path: Path) -> None:
    llama = {"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 64, "hidden_size": 48}
    LlamaConfig(**llama).save_pretrained(tmp_path / "llama")
    GPT2Config().save_pretrained(tmp_path / "gpt2")
    sharing = {"shared_weights": True, "model_name": str(tmp_path / "llama")}
    for size in (3, 6):
        with pytest.raises(ConfigError, match=rf"--tensor-parallel-size {size} with --shared-weights: 64 units"):
            prepare_environment(config(**sharing, tensor_parallel_size=size), {})
    with pytest.raises(ConfigError, match=r"3 heads of keys and values cannot be divided among 2 .* to 1$"):
        prepare_environment(config(**sharing, tensor_parallel_size=2), {})
    with pytest.raises(ConfigError, match=r"a model of type gpt2 cannot be trained .* only llama, qwen2, qwen3"):
        prepare_environment(config(**{**sharing, "model_name": str(tmp_path / "gpt2")}, tensor_parallel_size=2), {})


def test_sharing_is_refused_where_vllm_cannot_export() -> None:
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    with pytest.raises(ConfigError, match="expandable segments cannot be exported"):
        prepare_environment(config(shared_weights=True), dict(settings))
    prepare_environment(config(), dict(settings))


def test_a_numbered_gpu_becomes_the_only_one() -> None:
    environment: dict[str, str] = {}
    prepare_environment(config(device="cuda:1"), environment)
    assert environment["CUDA_VISIBLE_DEVICES"] == "1"
    environment = {"CUDA_VISIBLE_DEVICES": "4,6"}
    prepare_environment(config(device="cuda:1"), environment)
    assert environment["CUDA_VISIBLE_DEVICES"] == "6"
    with pytest.raises(ConfigError, match="no such GPU"):
        prepare_environment(config(device="cuda:2"), {"CUDA_VISIBLE_DEVICES": "4,6"})


@pytest.mark.parametrize("package", ["openai", "launchers", "common"], ids=["0.26", "0.29", "0.33"])
def test_vllms_flags_are_found_in_every_supported_version(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """vLLM 0.33 was refused after its engine had started, because its module of flags had moved."""
    for name in ("vllm", "vllm.entrypoints", f"vllm.entrypoints.{package}"):
        empty = ModuleType(name)
        empty.__path__ = []
        monkeypatch.setitem(sys.modules, name, empty)
    for elsewhere in {"openai", "launchers", "common"} - {package}:
        monkeypatch.delitem(sys.modules, f"vllm.entrypoints.{elsewhere}", raising=False)
        monkeypatch.delitem(sys.modules, f"vllm.entrypoints.{elsewhere}.cli_args", raising=False)
    flags = ModuleType(f"vllm.entrypoints.{package}.cli_args")
    flags.FrontendArgs = dict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, flags.__name__, flags)
    config = ServerConfig(model_name="m", engine="vllm")
    assert frontend_of(config) == {"allowed_origins": [], "root_path": config.root_path}
