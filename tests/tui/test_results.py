"""What a run comes to, for people and programs: `metrics`, `compare`, and the model card and refusals of `export`."""

from __future__ import annotations

import copy
import csv
import dataclasses
import io
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pyarrow.parquet
import pytest
import typer

from grpo_engine.errors import ConfigError, GrpoError
from grpo_engine.wire.metrics import MetricsLine
from grpo_tui.cli.compare import compare_command
from grpo_tui.cli.export import export_command
from grpo_tui.cli.metrics import StepTable, metrics_command
from grpo_tui.profile.loaded import resolved
from grpo_tui.profile.loading import load
from grpo_tui.profile.plan import make_plan
from grpo_tui.run_files.metrics import all_steps, append_step, latest_metrics
from grpo_tui.sweeps.results import PointResult, to_csv
from grpo_tui.view.comparison import ComparedRun, compare
from grpo_tui.view.comparison_page import to_html, to_svg
from grpo_tui.view.csv_text import csv_text
from grpo_tui.view.metrics.summary import Score
from grpo_tui.view.model_card import CardFacts, model_card
from grpo_tui.view.settings import changed_settings, differing_settings

SECRET = "sk-very-secret-0123"


def line(step: int, **metrics: float) -> MetricsLine:
    """A step; `reward_mean` is `reward/mean`, `eval_avg@4_se` is `eval/avg@4_se`."""
    named = {name.replace("_", "/", 1): value for name, value in metrics.items()}
    return MetricsLine(time=100.0 + step, step=step, policy_version=step, metrics=named)


def evaluated(step: int, score: float, error: float) -> MetricsLine:
    return line(step, **{"eval_avg@4": score, "eval_avg@4_se": error, "eval_num_prompts": 64.0})


def write_run(logs: Path, name: str, lines: Sequence[MetricsLine], document: dict[str, Any] | None = None) -> Path:
    folder = logs / name
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text("{}")
    (folder / "metrics.jsonl").write_text("".join(f"{each.model_dump_json()}\n" for each in lines))
    if document is not None:
        (folder / "resolved.json").write_text(json.dumps(document))
    return folder


@pytest.fixture(scope="module")
def profile() -> dict[str, Any]:
    """A profile as a run writes it out, with secrets in several places."""
    overrides = ["lr=1e-3", "env.HF_TOKEN=" + SECRET, "save_path=/home/someone/checkpoints"]
    sets = [f"services.trainer.{each}" for each in overrides]
    sets += [f"services.env.api_token={SECRET}", f"services.env.system_prompt=ask http://user:{SECRET}@host/ | now"]
    return json.loads(json.dumps(resolved(load("tiny-cpu", [*sets, "services.api.port=18999"]))))  # type: ignore[no-any-return]


# --- metrics ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of three steps: the third was repeated by a trainer that resumed, and evaluated on a line of its own."""
    lines = [line(1, reward_mean=0.25), line(2, reward_mean=0.5), line(3, reward_mean=0.1), line(4, reward_mean=0.2)]
    lines += [line(3, reward_mean=0.75, train_loss=0.5), evaluated(3, 0.5, 0.125)]
    monkeypatch.chdir(tmp_path)
    return write_run(tmp_path / "logs", "r", lines)


def test_csv_and_json_have_a_row_for_each_step_and_a_column_for_each_metric(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics_command("r", format_="csv")
    assert capsys.readouterr().out.splitlines() == [
        "step,time,policy_version,reward/mean,eval/avg@4,eval/avg@4_se,eval/num_prompts,train/loss",
        "1,101.0,1,0.25,,,,",
        "2,102.0,2,0.5,,,,",
        "3,103.0,3,0.75,0.5,0.125,64.0,0.5",
    ]
    metrics_command("r", format_="json", only=["reward"])
    assert json.loads(capsys.readouterr().out) == [
        {"step": step, "time": 100.0 + step, "policy_version": step, "reward/mean": reward}
        for step, reward in ((1, 0.25), (2, 0.5), (3, 0.75))
    ]


def test_no_cell_of_csv_is_a_formula_of_a_spreadsheet_and_numbers_stay(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    formula = '=HYPERLINK("http://evil.example")'
    write_run(run_folder.parent, "from-outside", [line(1, **{formula: -0.5, "@x": 1e-05})])
    metrics_command("from-outside", format_="csv")
    head, row = csv.reader(capsys.readouterr().out.splitlines())
    values = dict(zip(head, row, strict=True))
    assert (values[f"'{formula}"], values["'@x"]) == ("-0.5", "1e-05")
    metrics_command("from-outside", format_="json")
    assert formula in json.loads(capsys.readouterr().out)[0]
    texts = ["+1+1", "-2+3", "\t=1", "\r=1", "a\r=1", "＝1", "-0.5", "+1e-05", "-inf", "a=1", ""]
    shown = csv_text(["a", "b"], [{"a": each} for each in texts])
    assert [cell[0] for cell in csv.reader(io.StringIO(shown, newline=""))][1:] == [
        *("'+1+1", "'-2+3", "'\t=1", "'\n=1", "a\n=1", "'＝1", "-0.5", "+1e-05", "-inf", "a=1", ""),
    ]
    reason = PointResult(point=1, settings={"=lr": "-1e-4"}, seed=None, state="failed", reason="=1+1")
    assert to_csv([reason]).splitlines()[1].startswith("1,-1e-4,")
    assert {"'=lr", "'=1+1"} <= set(to_csv([reason]).replace("\n", ",").split(","))


def test_parquet_is_typed_and_never_written_to_a_terminal(
    run_folder: Path, capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics_command("r", format_="parquet")
    table = pyarrow.parquet.read_table(io.BytesIO(capsysbinary.readouterr().out))
    assert [str(table.schema.field(name).type) for name in ("step", "time", "reward/mean")] == [
        *("int64", "double", "double"),
    ]
    assert table.column("eval/avg@4").to_pylist() == [None, None, 0.5]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with pytest.raises(ConfigError, match="not text: write it to a file"):
        metrics_command("r", format_="parquet")
    monkeypatch.undo()
    monkeypatch.chdir(run_folder.parents[1])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"pip install 'grpo-tui\[data\]'"):
        metrics_command("r", format_="parquet")


def test_a_terminal_gets_a_line_a_step_and_everything_with_all(
    run_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "34")
    metrics_command("r")
    shown = capsys.readouterr()
    assert shown.out.splitlines()[:2] == ["   step  reward/mean  eval/avg@4", "      1       0.2500"]
    assert shown.err.splitlines()[-1] == "2 more metrics: --all, or --only NAME"
    metrics_command("r", all_=True)
    assert capsys.readouterr().out.splitlines()[0] == "step 1  reward/mean 0.25"


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_a_table_of_steps_is_never_wider_than_its_terminal_and_grows_with_its_metrics(width: int) -> None:
    table = StepTable(width)
    first = table.lines_of(evaluated(0, 0.5, 0.1))
    assert [each.split() for each in first] == [["step", "eval/avg@4"], ["0", "0.5000"]]
    second = table.lines_of(line(1, reward_mean=0.25, grpo_entropy=0.5, train_loss=-1e-9))
    assert second[0].split()[:2] == ["step", "reward/mean"]  # a new head
    assert len(table.lines_of(line(2, reward_mean=0.25))) == 1
    assert max(map(len, [*first, *second])) <= width


def test_a_run_of_another_trainer_has_columns_too() -> None:
    head, row = StepTable(60).lines_of(line(1, critic_score=0.5, foo=2.0))
    assert (head.split(), row.split()) == (["step", "foo", "critic/score"], ["1", "2.000", "0.5000"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"format_": "xml"}, "csv, json or parquet"),
        ({"format_": "csv", "follow": True}, "remove --follow"),
        ({"format_": "csv", "as_json": True}, "remove --json"),
        ({"only": ["a"], "as_json": True}, "remove --only"),
    ],
)
def test_flags_that_exclude_each_other_are_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(typer.BadParameter, match=message):
        metrics_command("r", **flags)


# --- compare ---------------------------------------------------------------------------------------------------------


def compared(name: str, *lines: MetricsLine, document: dict[str, Any] | None = None) -> ComparedRun:
    return ComparedRun(run=name, profile="p", state="finished", lines=lines, resolved=document or {})


def test_runs_of_different_length_are_compared_at_the_last_step_that_both_have() -> None:
    first = compared("a", evaluated(0, 0.2, 0.01), evaluated(10, 0.5, 0.03), evaluated(20, 0.9, 0.01))
    second = compared("b", evaluated(0, 0.2, 0.01), evaluated(10, 0.6, 0.04))
    (same,) = compare([first, second]).same_step
    assert (same.name, same.step) == ("eval/avg@4", 10)
    (difference,) = same.differences
    assert difference.value == pytest.approx(0.1)
    assert difference.error == pytest.approx(0.05)  # sqrt(0.03² + 0.04²)


def test_final_and_best_rewards_are_means_over_ten_steps() -> None:
    rising = [line(step, reward_mean=float(step)) for step in range(1, 21)]
    short = compared("b", line(1, reward_mean=3.0), line(2, reward_mean=1.0))
    comparison = compare(
        [compared("a", *rising, line(21, reward_mean=5.0)), short, compared("c", line(1, train_loss=0.0))]
    )
    long, brief, none = comparison.rewards
    assert long is not None
    assert brief is not None
    assert none is None
    assert long.best == Score(step=20, value=15.5)
    assert long.final == Score(step=21, value=14.9)
    assert brief.final == brief.best == Score(step=2, value=2.0)


def test_a_metric_is_averaged_over_the_same_steps_of_all_runs() -> None:
    first = compared("a", *(line(step, reward_mean=float(step)) for step in range(1, 41)))
    second = compared("b", *(line(step, reward_mean=1.0) for step in range(2, 21, 2)))
    (aligned,) = compare([first, second]).aligned
    assert aligned.spans[0] == (1, 2)
    assert aligned.spans[-1] == (19, 20)
    assert aligned.means[0] == (1.5, 1.0)
    assert aligned.means[-1] == (19.5, 1.0)


def test_only_settings_that_differ_are_shown_each_once_and_no_secret(profile: dict[str, Any]) -> None:
    other = json.loads(json.dumps(profile).replace(SECRET, "another-secret-456"))
    other["model"]["name"] = "other/model"
    for service in other["services"].values():
        if "model_name" in service:
            service["model_name"] = "other/model"
    other["services"]["trainer"]["lr"] = 0.5
    del other["services"]["api"]["fresh"]
    assert differing_settings([profile, other]) == {
        "model.name": ["local/tiny", "other/model"],
        "services.api.fresh": [False, None],
        "services.trainer.lr": [0.001, 0.5],
    }


def test_the_command_shows_runs_beside_each_other_and_gives_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], profile: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    other = {**profile, "bridge": {**profile["bridge"], "mode": "none"}}
    for name, document, score in (("one", profile, 0.5), ("two", other, 0.75)):
        lines = [line(1, reward_mean=score), evaluated(1, score, 0.03)]
        write_run(tmp_path / "logs", name, lines, document)
    write_run(tmp_path / "logs", "empty", [])
    compare_command(["one", "two"])
    text = capsys.readouterr().out
    rows = [each.split() for each in text.splitlines()]
    assert ["eval/avg@4", "(1)", "0.500", "±", "0.030", "0.750", "±", "0.030", "+0.250", "±", "0.042"] in rows
    assert ["bridge.mode", '"shared_vllm"', '"none"'] in rows
    compare_command(["one", "two"], as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert document["runs"][1]["evaluations"]["eval/avg@4"]["final"] == {"step": 1, "value": 0.75, "error": 0.03}
    assert document["settings"]["bridge.mode"] == ["shared_vllm", "none"]
    compare_command(["one", "empty"], ["grpo/kl"])
    shown = capsys.readouterr()
    assert "resolved.json cannot be read" in shown.err
    assert "--metric grpo/kl: not every run has measured it" in shown.err
    assert ["reward/mean", "final", "0.500", "(1)", "–"] in [each.split() for each in shown.out.splitlines()]
    with pytest.raises(typer.BadParameter, match="2 to 26 different runs"):
        compare_command(["one", "one"])


def test_a_damaged_line_of_a_step_that_no_run_reaches_hides_no_other(tmp_path: Path) -> None:
    damaged = line(1, reward_mean=0.0).model_copy(update={"step": 10**18})
    run = write_run(tmp_path, "r", [line(1, reward_mean=0.5), damaged])
    assert [each.step for each in all_steps(run)] == [1]
    assert latest_metrics(run)["step"] == 1


# --- export ----------------------------------------------------------------------------------------------------------


def test_a_model_card_says_what_was_trained_and_how_well_and_nothing_of_the_machine(profile: dict[str, Any]) -> None:
    hostile = {**profile, "model": {**profile["model"], "name": "owner/model"}}
    task = {"name": "jsonl", "file": "/home/someone/data.jsonl", "reward": "/home/someone/own.py:reward"}
    task |= {"functions": ["/home/someone/my files/own.py", "right"], "module": "/home/someone/my files/own.py"}
    hostile["services"] = {**profile["services"], "odd": {"kind": "command", "argv": ["run", f"--token={SECRET}"]}}
    hostile["services"]["env"] = {**profile["services"]["env"], "name": "a\x1b]0;b\x07 | <b>`c`\n# d", "task": task}
    lines = [evaluated(0, 0.2, 0.01), *(line(step, reward_mean=step / 10, grpo_entropy=1.0) for step in range(1, 31))]
    last = evaluated(30, 0.8, 0.02)
    facts = CardFacts(
        name="x",
        run="r",
        resolved=hostile,
        lines=[*lines[:-1], lines[-1].model_copy(update={"metrics": {**lines[-1].metrics, **last.metrics}})],
        step=30,
        is_adapter=True,
        versions={"torch": "2"},
    )
    card = model_card(facts)
    assert SECRET not in card
    assert not [each for each in card if not (each.isprintable() or each == "\n")]
    for absent in ("18999", "127.0.0.1", "/home/someone", "HF_TOKEN", "odd", "<b>"):
        assert absent not in card
    head = card.split("---\n")[1]
    assert 'base_model: "owner/model"' in head
    assert "library_name: peft" in head
    rows = card.splitlines()
    assert "| eval/avg@4 | 0.200 ± 0.010 (step 0) | 0.800 ± 0.020 (step 30) | 0.800 ± 0.020 (step 30) |" in rows
    assert "| services.trainer.lr | 0.001 |" in rows
    assert '| services.env.task.reward | "…/own.py:reward" |' in rows
    assert '| services.env.task.module | "…/own.py" |' in rows
    assert any("task.functions" in row and "…/own.py" in row and "right" in row for row in rows)
    assert "| 1–2 | 0.15 | 1 |" in rows
    assert "`▁▁▁▂▂▂▂▃▃▃▃▄▄▄▄▅▅▅▅▆▆▆▆▇▇▇▇███`" in card
    assert not [row for row in rows if row.startswith("# d")]


def test_settings_of_a_run_without_changes_are_those_of_its_profile(profile: dict[str, Any]) -> None:
    changed = changed_settings(profile)
    assert {"model.name", "bridge.mode", "services.trainer.lr", "services.env.group_size"} <= changed.keys()
    assert "services.trainer.training_steps" in changed
    assert not [key for key in changed if "port" in key or "url" in key or ".needs" in key]
    assert "services.trainer.weight_decay" not in changed  # as by default


def test_a_card_of_a_run_without_settings_and_of_one_step_is_a_card() -> None:
    facts = CardFacts(name="x", run="r", resolved={}, lines=[], step=0, is_adapter=False)
    assert model_card(facts).endswith("| run | r |\n")
    assert "| 1 | 0.5 |" in model_card(dataclasses.replace(facts, lines=[line(1, reward_mean=0.5)]))


def test_an_export_names_the_checkpoints_that_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    loaded = load("tiny-cpu")
    folder = write_run(tmp_path / "logs", "r", [], resolved(loaded) | {"file": ""})
    plan = make_plan(loaded, run_folder=folder, python=sys.executable)
    (folder / "plan.json").write_text(plan.to_json())
    with pytest.raises(GrpoError, match=r"r: no checkpoint in .*checkpoints yet"):
        export_command("r", Path("model"))
    (folder / "checkpoints" / "step_3").mkdir(parents=True)
    (folder / "checkpoints" / "step_5").mkdir()
    (folder / "checkpoints" / "step_3" / "checkpoint.json").write_text("{}")
    with pytest.raises(ConfigError, match="--step 5: r has no checkpoint of that step; there are 3"):
        export_command("r", Path("model"), step=5)
    (folder / "plan.json").write_text(plan.to_json().replace('"trainer"', '"command"'))
    with pytest.raises(ConfigError, match="no service of kind trainer"):
        export_command("r", Path("model"))


# --- one file to send around -----------------------------------------------------------------------------------------

HOSTILE = '<img src=x onerror="alert(1)">&\x1b]0;x\x07 \ud800'


def seeded(profile: dict[str, Any], lr: float, seed: int) -> dict[str, Any]:
    document = copy.deepcopy(profile)
    document["services"]["trainer"] |= {"lr": lr, "seed": seed, "save_path": "/home/ann/secret"}
    return document


def trained(profile: dict[str, Any], name: str, lr: float, seed: int, rewards: list[float]) -> ComparedRun:
    lines = [line(step, reward_mean=reward) for step, reward in enumerate(rewards, 1)]
    lines.append(evaluated(len(rewards), rewards[-1] / 2, 0.03))
    resolved = seeded(profile, lr, seed)
    return ComparedRun(run=name, profile="p", state="finished", lines=joined(lines), resolved=resolved)


def joined(lines: list[MetricsLine]) -> list[MetricsLine]:
    steps: list[MetricsLine] = []
    for each in lines:
        append_step(steps, each)
    return steps


def test_a_page_has_a_line_for_each_settings_with_its_error_over_seeds_the_best_first(profile: dict[str, Any]) -> None:
    runs = [
        trained(profile, "a0", 1e-4, 0, [0.2, 0.4]),
        trained(profile, "a1", 1e-4, 1, [0.4, 0.6]),
        trained(profile, "b0", 1e-3, 0, [0.8, 0.9]),
    ]
    for page in (to_html(runs), to_svg(runs)):
        cells = re.findall(r">([^<>\n]+)</t", page)
        best = cells.index("lr=0.001")
        assert cells[best : best + 7] == ["lr=0.001", "1", "2", "0.850", "0.850", "0.450 ± 0.030", "0.450 ± 0.030"]
        # means over steps of 0.3 and 0.5; last evaluations of 0.2 and 0.3
        assert cells[best + 7 : best + 14] == ["lr=0.0001", "2", "2", "0.400 ± 0.100", "0.400 ± 0.100",
                                               "0.250 ± 0.050", "0.250 ± 0.050"]  # fmt: skip
        assert "services.trainer.lr" in cells
        assert page.count("<polygon") == 1, "one line has a band"
        assert "/home/ann" not in page
    assert ElementTree.fromstring(to_svg(runs)).tag.endswith("svg")


def test_a_page_of_hostile_names_has_no_tag_of_theirs_and_fetches_nothing(profile: dict[str, Any]) -> None:
    runs = [
        ComparedRun(run=f"{HOSTILE}{number}", profile=HOSTILE, state="x", lines=[line(1, **{HOSTILE: 1.0})],
                    resolved={"services": {HOSTILE: {"k": HOSTILE * number}}})
        for number in (1, 2)
    ]  # fmt: skip
    for page in (to_html(runs, [HOSTILE]), to_svg(runs, [HOSTILE])):
        page.encode()
        assert "<img" not in page
        assert "&lt;img src=x onerror=" in page
        assert not re.search(r"[\x00-\x08\x0b-\x1f]", page)
        assert set(re.findall(r"https?://[^\"']+", page)) <= {"http://www.w3.org/2000/svg"}
        assert not re.search(r"<(script|link|image|use|foreignObject|a)\b|url\(|@import", page)
    ElementTree.fromstring(to_svg(runs, [HOSTILE]))
    assert "default-src 'none'" in to_html(runs)
    nothing = [dataclasses.replace(run, lines=[], resolved={}) for run in runs]
    ElementTree.fromstring(to_svg(nothing))
    assert "–" in to_html(nothing)


def test_the_command_writes_the_page_to_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes], profile: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, seed in (("one", 0), ("two", 1)):
        write_run(tmp_path / "logs", name, [line(1, reward_mean=0.5)], seeded(profile, 1e-4, seed))
    compare_command(["one", "two"], format_="html", output=tmp_path / "c.html")
    written = (tmp_path / "c.html").read_text()
    assert "2 runs" in written
    assert capsysbinary.readouterr().err.decode() == f"2 runs are compared in {tmp_path / 'c.html'}\n"
    compare_command(["one", "two"], format_="svg")
    assert capsysbinary.readouterr().out.startswith(b"<?xml")
    with pytest.raises(GrpoError, match="cannot be written: No such file"):
        compare_command(["one", "two"], format_="svg", output=tmp_path / "gone" / "c.svg")
    for wrong in ({"format_": "pdf"}, {"output": tmp_path / "c"}, {"format_": "svg", "as_json": True}):
        with pytest.raises(typer.BadParameter):
            compare_command(["one", "two"], **wrong)  # type: ignore[arg-type]
