"""`up` where runs are live: which one it joins, what it refuses, and what a second run of a profile is given."""

from __future__ import annotations

import json
import signal
from contextlib import closing

import pytest
from stage import is_open
from terminal import Terminal
from workplace import IDLE, SERVER, UP, Workplace, service, until

from grpo_tui.client.local import runs
from grpo_tui.client.second_run import live_runs_anywhere

GPU = 4
"""Of no other test of this folder: runs see each other on the whole machine, and share no GPU."""


def run_ids(place: Workplace) -> list[str]:
    return [run.id for run in runs(place.folder / "logs") if run.is_live]


def test_a_start_with_other_settings_names_them_and_asks_for_a_second_run_or_to_join(place: Workplace) -> None:
    first = place.up(place.server(stop_grace_s=3.0, env='{ API_KEY = "s3cret-there", MODE = "x" }'))
    (port,) = place.ports
    seen = {live.run.id: live.plan.launches[0].ports for live in live_runs_anywhere(place.folder / "another")}
    assert seen[first] == (port,), "a start in another folder does not know the run"
    other = ("--set", "services.a.stop_grace_s=1", "--set", "services.a.env.API_KEY=s3cret-here")

    refused = place.grpo("up", "--profile", "p", "--detach", *other)
    assert refused.returncode == 4
    assert f"run {first} of this profile is live with other settings:\n" in refused.stderr
    assert "  services.a.stop_grace_s: 3.0 there, 1.0 here\n" in refused.stderr
    assert "  services.a.env.API_KEY: another value there\n" in refused.stderr
    assert "MODE" not in refused.stderr
    assert "--join joins it as it is; --new starts a second run beside it" in refused.stderr
    assert place.grpo("up", "--profile", "p", "--new", "--join").returncode == 2

    joined = place.grpo("up", "--profile", "p", "--detach", "--join", *other)
    assert (joined.returncode, joined.stdout.strip()) == (0, first)
    assert f"{first} keeps its settings: services.a.stop_grace_s: 3.0 there, 1.0 here" in joined.stderr

    started = place.grpo("up", "--profile", "p", "--detach", "--wait", "ready", "--new", *other)
    assert started.returncode == 0, started.stderr
    second = started.stdout.strip()
    place.ports.append(place.service().ports[0])
    assert run_ids(place) == [second, first]
    assert place.ports[1] != port
    assert f"ports in use were replaced: {port} → {place.ports[1]}" in started.stderr

    # The ports that were chosen for it are no other settings.
    assert place.succeed("up", "--profile", "p", "--detach", *other).strip() == second
    assert place.succeed("up", "--profile", "p", "--detach").strip() == first
    place.succeed("down", "--all")


def test_profiles_of_one_name_in_two_folders_have_a_run_each(place: Workplace) -> None:
    place.profile(service("a", IDLE, ready=UP))
    elsewhere = place.folder / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "p.toml").write_text((place.folder / "profiles" / "p.toml").read_text())
    first = place.succeed("up", "--profile", "p", "--detach").strip()
    refused = place.grpo("up", "--profile", elsewhere / "p.toml", "--join")
    assert refused.returncode == 5
    assert f"no run of {elsewhere / 'p.toml'} is live here" in refused.stderr
    second = place.succeed("up", "--profile", elsewhere / "p.toml", "--detach").strip()
    assert first != second
    assert place.succeed("up", "--profile", "elsewhere/../elsewhere/p.toml", "--detach").strip() == second
    place.succeed("down", "--all")


def test_a_start_in_the_queue_says_whom_it_waits_for_and_has_a_free_port_where_the_profile_has_zero(
    place: Workplace,
) -> None:
    ready = "{ http = 'http://127.0.0.1:0/', interval_s = 0.05 }"
    place.profile(service("a", SERVER, 0, ports=[0], gpus=[GPU], ready=ready))
    first = place.succeed(
        "up", "--profile", "p", "--detach", "--wait", "ready", "--name", "one", "--tag", "night"
    ).strip()
    place.ports.append(place.service().ports[0])
    assert is_open(place.ports[0])
    queued = place.start("up", "--profile", "p", "--queue", "--detach", "--wait", "ready", "--name", "two")
    until(lambda: "the start of two (pid " in place.grpo("ps").stderr)
    (row,) = json.loads(place.succeed("ps", "--json", "--tag", "night"))
    assert (row["run"], row["name"], row["ports"], row["gpus"]) == (first, "one", place.ports, [GPU])
    late = place.start("up", "--profile", "p", "--queue", "--json")
    line = json.loads(late.stdout.readline())  # type: ignore[union-attr]
    assert line["event"] == "queued"
    assert line["text"].startswith(f"waits, behind 1 in the queue: the start of two (pid {queued.pid}) came first")
    late.send_signal(signal.SIGINT)
    late.communicate(timeout=60)
    assert late.returncode == 130
    assert "start of p" not in place.grpo("ps").stderr

    place.succeed("down", "one")
    out, err = queued.communicate(timeout=60)
    assert queued.returncode == 0, err
    assert f"waits, first in the queue: GPU {GPU} is used by run {first} (a)" in err
    assert out.startswith("two-")
    place.ports.append(place.service().ports[0])
    assert is_open(place.ports[1])
    place.succeed("down", "two")


@pytest.mark.extended("two plain starts at once, in test_runs, and a second run alone, above")
def test_two_second_runs_at_once_get_different_ports(place: Workplace) -> None:
    place.profile(place.server())
    command = ("up", "--profile", "p", "--detach", "--wait", "ready", "--new")
    both = [place.start(*command) for _ in range(2)]
    answers = [each.communicate(timeout=60) for each in both]
    assert [each.returncode for each in both] == [0, 0], answers
    until(lambda: len(run_ids(place)) == 2)
    ids = {out.strip() for out, _ in answers}
    assert len(ids) == 2
    place.ports += [port for _, err in answers if "replaced" in err for port in [int(err.split("→ ")[1].split()[0])]]
    assert len(set(place.ports)) == 2
    place.succeed("down", "--all")


@pytest.mark.extended("the refusal of `up`, above, and the screen on a new run, in test_screen_terminal")
def test_the_start_of_the_screen_asks_and_opens_what_was_chosen(place: Workplace) -> None:
    first = place.up(place.server(stop_grace_s=3.0))
    words = ("--profile", "p", "--set", "services.a.stop_grace_s=1")
    environment = {key: value for key, value in place.environment.items() if key != "NO_COLOR"}

    def asked(answer: str) -> Terminal:
        opened = Terminal(place.argv(*words), cwd=place.folder, environment=environment)
        opened.until(lambda: "join or new or quit [quit]:" in opened.text)
        assert "services.a.stop_grace_s: 3.0 there, 1.0 here" in opened.text
        opened.press(f"{answer}\r")
        return opened

    with closing(asked("")) as left:
        assert left.ends() == 4
    assert run_ids(place) == [first]
    with closing(asked("new")) as opened:
        opened.until(lambda: "q detach" in opened.text)
        (second,) = set(run_ids(place)) - {first}
        assert second in opened.text
        opened.press("q")
        assert opened.ends() == 0
    place.ports.append(place.service().ports[0])
    place.succeed("down", "--all")
