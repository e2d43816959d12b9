"""What a person reads who gives the trainer a setting that cannot be."""

from __future__ import annotations

import pytest

from grpo_engine.cli import main
from grpo_engine.flags import parse_flags
from grpo_engine.train.config import TrainConfig


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--device", "foo"], "device: 'foo' is not a device: use auto, cpu, cuda, or cuda:0"),
        (["--atropos-url", "localhost:8000"], "atropos_url: 'localhost:8000' is not a URL: use http://"),
        (["--lr", "inf"], "lr: input should be a finite number, but this is 'inf'"),
        (["--weight-decay", "inf"], "weight_decay: input should be a finite number, but this is 'inf'"),
        (["--batch-size", str(10**12)], "batch_size 1000000000000 × gradient_accumulation_steps 32 are"),
        (["--lora-target-modules"], "lora_target_modules: tuple should have at least 1 item"),
        (["--device", "cuda:99"], "device 'cuda:99': torch "),
        (["--threads", "100000"], "threads: input should be less than or equal to 1024"),
        (["--seed", str(2**63)], "seed: input should be less than 9223372036854775808"),
    ],
)
def test_an_invalid_setting_is_refused_before_anything_starts(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--model", "local/tiny", *words]) == 2
    assert capsys.readouterr().err.startswith(f"grpo-engine train: {said}")


def test_help_shows_the_default_bridge(capsys: pytest.CaptureFixture[str]) -> None:
    mode = parse_flags(TrainConfig, ["--model", "m"], prog="train", description="").bridge.mode
    with pytest.raises(SystemExit):
        parse_flags(TrainConfig, ["--help"], prog="train", description="")
    assert f"How new weights reach inference. (default: {mode})" in " ".join(capsys.readouterr().out.split())
