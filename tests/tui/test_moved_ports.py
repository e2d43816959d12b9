"""Other ports for a second run of a profile: which are chosen, and where they replace the first ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_engine.errors import ConfigError
from grpo_tui.profile.loaded import LoadedProfile, resolved
from grpo_tui.profile.loading import load
from grpo_tui.profile.model import profile_type
from grpo_tui.profile.moved_ports import choose, choose_open
from grpo_tui.profile.plan import make_plan

STACK = """
[model]
name = "local/tiny"
[services.api]
kind = "rollout_api"
[services.vllm]
kind = "inference"
engine = "torch"
port = 9001
[services.env]
kind = "environment"
task = "sort6"
[services.trainer]
kind = "trainer"
training_steps = 9001
[services.stock]
kind = "command"
argv = ["sh", "-c", "exec trainer --atropos-url http://localhost:8000 --vllm-port 9001 --steps 8000 --report 9001"]
ready = { http = "http://127.0.0.1:9001/health" }
env = { VLLM_PORT = "9001", SEED = "9001", API = "http://other-host:8000" }
"""


def written(folder: Path, text: str) -> Path:
    (folder / "p.toml").write_text(text)
    return folder / "p.toml"


def planned(loaded: LoadedProfile) -> dict[str, tuple[str, ...]]:
    plan = make_plan(loaded, run_folder=Path("/runs/r"), python="python")
    return {launch.name: launch.argv for launch in plan.launches}


def test_used_ports_are_replaced_by_free_ones_and_the_others_stay() -> None:
    assert choose([8000, 9001, 9002], {8000, 8010, 9001}) == {8000: 8020, 9001: 9011}
    assert choose([8000, 8010], {8000}) == {8000: 8020}, "8010 is another port of the profile"
    assert choose([65530], {65530}) == {65530: 1024}
    assert choose([8000], set()) == {}
    with pytest.raises(ConfigError, match="no port is free to move 8000 to"):
        choose([8000], range(1, 65536))


def test_a_moved_port_reaches_every_service_and_no_other_number(tmp_path: Path) -> None:
    loaded = load(str(written(tmp_path, STACK)), moved_ports={8000: 8010, 9001: 9011})
    argv = planned(loaded)
    assert " ".join(argv["api"]).count("8010") == 1
    assert argv["vllm"][argv["vllm"].index("--port") :][:2] == ("--port", "9011")
    addresses = {word.rpartition("//")[2] for name in ("env", "trainer") for word in argv[name] if "//" in word}
    assert {address.rpartition(":")[2] for address in addresses} == {"8010", "9011"}
    assert argv["trainer"][argv["trainer"].index("--vllm-port") :][:2] == ("--vllm-port", "9011")
    assert argv["trainer"][argv["trainer"].index("--training-steps") :][:2] == ("--training-steps", "9001")
    assert argv["stock"][-1] == (
        "exec trainer --atropos-url http://localhost:8010 --vllm-port 9011 --steps 8000 --report 9001"
    )
    stock = resolved(loaded)["services"]["stock"]
    assert stock["ready"]["http"] == "http://127.0.0.1:9011/health"
    assert stock["env"] == {"VLLM_PORT": "9011", "SEED": "9001", "API": "http://other-host:8000"}


@pytest.mark.parametrize(
    ("argv", "moved"),
    [
        ('["python", "-m", "http.server", "9000"]', ("python", "-m", "http.server", "9010")),
        ('["serve", "-p", "9000", "--steps", "9000"]', ("serve", "-p", "9010", "--steps", "9000")),
        ('["serve", "--port=9000"]', ("serve", "--port=9010")),
        ('["sh", "-c", "PORT=9000 exec serve"]', ("sh", "-c", "PORT=9010 exec serve")),
        ('["serve", "--listen", "127.0.0.1:9000"]', ("serve", "--listen", "127.0.0.1:9010")),
    ],
)
def test_the_command_of_a_service_is_given_its_moved_port(tmp_path: Path, argv: str, moved: tuple[str, ...]) -> None:
    text = f'[services.a]\nkind = "command"\nargv = {argv}\nports = [9000]\n'
    assert planned(load(str(written(tmp_path, text)), moved_ports={9000: 9010}))["a"] == moved


def test_a_port_that_the_command_does_not_state_cannot_be_moved(tmp_path: Path) -> None:
    text = '[services.a]\nkind = "command"\nargv = ["serve", "--steps", "9000"]\nports = [9000]\n'
    path = written(tmp_path, f'{text}ready = {{ http = "http://127.0.0.1:9000" }}\n')
    with pytest.raises(ConfigError, match=r"p\.toml: services\.a\.ports: 9000 is in use, and the command does not"):
        load(str(path), moved_ports={9000: 9010})


@pytest.mark.parametrize("path", sorted(Path("profiles").glob("*.toml")), ids=lambda path: path.stem)
def test_every_profile_can_be_run_twice_and_its_resolved_form_is_a_profile_again(path: Path) -> None:
    loaded = load(str(path))
    moves = choose(loaded.ports, loaded.ports)
    second = load(str(path), moved_ports=moves)
    assert second.ports == [moves[port] for port in loaded.ports]
    words = [word for argv in planned(second).values() for word in argv]
    assert not [word for word in words for port in moves if f":{port}" in word or f"port {port}" in word]
    table = second.profile.model_dump(mode="json")
    assert profile_type(table).model_validate(table) == second.profile


def test_a_port_that_a_trainer_leaves_at_its_default_moves_unless_a_server_gives_it_another(tmp_path: Path) -> None:
    second = '[services.second]\nkind = "inference"\nengine = "torch"\nport = 9002\n'
    two = load(str(written(tmp_path, STACK + second)), moved_ports={8000: 8010, 9001: 9011, 9002: 9012})
    trainer = planned(two)["trainer"]
    assert trainer[trainer.index("--vllm-port") + 1] == "9011"
    other = STACK.replace("port = 9001\n", "port = 9100\n")
    trainer = planned(load(str(written(tmp_path, other)), moved_ports={9001: 9011}))["trainer"]
    assert trainer[trainer.index("--vllm-port") + 1] == "9100"


OPEN_STACK = STACK.replace('kind = "rollout_api"', 'kind = "rollout_api"\nport = 0').replace("port = 9001", "port = 0")


def test_a_port_of_zero_is_one_number_for_the_server_and_for_all_that_reach_it(tmp_path: Path) -> None:
    stated = OPEN_STACK.replace("http://localhost:8000", "http://localhost:{services.api.port}")
    path = written(tmp_path, stated.replace("training_steps = 9001", "training_steps = 9001\nvllm_port = 0"))
    loaded = load(str(path), chosen_ports={"api": 8020, "vllm": 9031})
    assert loaded.ports == [8020, 9031]
    assert loaded.stated_ports == []
    argv = planned(loaded)
    assert argv["api"][argv["api"].index("--port") + 1] == "8020"
    assert argv["vllm"][argv["vllm"].index("--port") + 1] == "9031"
    assert argv["trainer"][argv["trainer"].index("--vllm-port") + 1] == "9031"
    addresses = {word.rpartition("//")[2] for name in ("env", "trainer") for word in argv[name] if "//" in word}
    assert {address.rpartition(":")[2] for address in addresses} == {"8020", "9031"}
    assert "http://localhost:8020 " in argv["stock"][-1]
    plan = make_plan(loaded, run_folder=Path("/runs/r"), python="python")
    assert plan.chosen_ports == {"api": 8020, "vllm": 9031}
    assert {launch.name: launch.ports for launch in plan.launches if launch.ports} == {"api": (8020,), "vllm": (9031,)}
    assert loaded.written["services"]["api"]["port"] == 0, "a resumed run would keep a port that was chosen for it"


def test_ports_of_zero_are_chosen_one_by_one_and_beside_those_that_are_stated(tmp_path: Path) -> None:
    assert choose_open({"api": 8000, "vllm": 8000, "web": 9000}, {8000}) == {"api": 8010, "vllm": 8020, "web": 9000}
    with pytest.raises(ConfigError, match=r"no port is free for services\.api"):
        choose_open({"api": 8000}, range(1, 65536))
    other = '[services.web]\nkind = "command"\nports = [9001]\nargv = ["serve", "9001"]\n[bridge]\nmode = "none"\n'
    two = OPEN_STACK.replace('engine = "torch"\nport = 0', 'engine = "torch"\nport = 0\nreplicas = 2')
    loaded = load(str(written(tmp_path, two + other)))
    assert loaded.chosen_ports == {"api": 8000, "vllm": 9011, "vllm-2": 9021}
    assert loaded.stated_ports == [9001]


@pytest.mark.parametrize(
    ("argv", "given"),
    [
        ('["python", "-m", "http.server", "0"]', ("python", "-m", "http.server", "9010")),
        ('["serve", "--port", "0", "--steps", "0"]', ("serve", "--port", "9010", "--steps", "0")),
        ('["sh", "-c", "PORT=0 exec serve"]', ("sh", "-c", "PORT=9010 exec serve")),
        ('["serve", "--at={services.a.port}"]', ("serve", "--at=9010")),
    ],
)
def test_the_command_of_a_service_is_given_the_port_that_was_chosen(
    tmp_path: Path, argv: str, given: tuple[str, ...]
) -> None:
    text = f'[services.a]\nkind = "command"\nargv = {argv}\nports = [0]\nready = {{ tcp = "127.0.0.1:0" }}\n'
    loaded = load(str(written(tmp_path, text)), chosen_ports={"a": 9010})
    assert planned(loaded)["a"] == given
    assert resolved(loaded)["services"]["a"]["ready"]["tcp"] == "127.0.0.1:9010"


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        (
            'argv = ["serve", "--steps", "0"]\nports = [0]',
            r"services\.a\.ports: 0, and the command does not show where",
        ),
        ('argv = ["serve", "0"]\nports = [0, 0]', r"services\.a\.ports: 0 is there twice"),
        ('argv = ["serve", "{services.b.port}"]', r"services\.a: \{services\.b\.port\}: that service has no port"),
    ],
)
def test_a_port_of_zero_that_could_not_be_passed_on_is_refused(tmp_path: Path, settings: str, fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        load(str(written(tmp_path, f'[services.a]\nkind = "command"\n{settings}\n')))
