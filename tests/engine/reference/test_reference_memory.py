"""The memory of a reference service, and what it takes away from the trainer's."""

from __future__ import annotations

import pytest

from grpo_engine.errors import ConfigError
from grpo_engine.flags import parse_flags
from grpo_engine.models.random_models import published_shape
from grpo_engine.reference.config import ReferenceConfig
from grpo_engine.reference.memory import reference_plan, report
from grpo_engine.train.config import TrainConfig
from grpo_engine.train.memory.dry_run import model_shape
from grpo_engine.train.memory.plan import memory_plan

MODEL = "local/llama-8b-random"


def config(**changes: object) -> ReferenceConfig:
    return ReferenceConfig.model_validate({"model_name": MODEL, "dry_run": True, **changes})


def test_a_dry_run_says_whether_the_reference_fits_on_a_card() -> None:
    text, fits = report(config(card_gb=80))
    assert fits
    assert "weights                  16.1 GB" in text
    assert "fits " in text
    text, fits = report(config(card_gb=16))
    assert not fits
    assert "too large    by " in text
    assert "use a larger card, or leave the reference to the trainer" in text
    text, fits = report(config(card_gb=24, micro_batch_tokens=131072))
    assert not fits
    assert "lower --micro-batch-tokens" in text


def test_weights_and_a_layer_are_counted_by_hand() -> None:
    model = model_shape(published_shape(MODEL), TrainConfig(model_name=MODEL))
    plan = reference_plan(model, config(micro_batch_tokens=4096))
    assert plan.weight_bytes == 2 * 8_030_261_248
    assert plan.layer_bytes == 4096 * (2 * 2 * 4096 + 3 * 2 * 14336)
    assert plan.output_bytes == 2 * 4096 * 2 * 4096 + 4096 * 32768 * (4 + 2)


def test_a_trainer_whose_reference_is_a_service_has_no_copy_of_it() -> None:
    model = model_shape(published_shape(MODEL), TrainConfig(model_name=MODEL))
    own, remote = (
        memory_plan(model, TrainConfig(model_name=MODEL, kl_coef=0.1, reference_urls=urls))
        for urls in ((), ("http://127.0.0.1:9101",))
    )
    assert own.needed_bytes - remote.needed_bytes == 2 * 8_030_261_248


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="micro_batch_tokens 64 is less than max_model_len 4096"):
        parse_flags(ReferenceConfig, ["--model", "m", "--micro-batch-tokens", "64"], prog="p", description="")
    with pytest.raises(ConfigError, match="card_gb is the size of a GPU to plan for: add dry_run"):
        parse_flags(ReferenceConfig, ["--model", "m", "--card-gb", "80"], prog="p", description="")
