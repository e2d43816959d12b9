"""What a profile needs of this machine: packages, a GPU, the files of its tasks, its models on the hub.

`plan` and every start refuse a profile that lacks one of these, instead of failing minutes later; `doctor` lists them
all. Together they take well under a second: no package is imported, no code of the user is run, no driver is asked, and
the hub only for a model that is not in its cache. Settings that contradict each other are in `stack_checks`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from shutil import which

from grpo_engine.config import Fault
from grpo_engine.errors import ConfigError
from grpo_engine.installed import has_gpu_driver, installed_version, is_installed, is_on_cpu
from grpo_engine.models.config import is_from_hub, lacking_for_optimizer
from grpo_tui.profile.cluster import has_ray
from grpo_tui.profile.doctor_gpu import INSTALL, is_torch_for_gpus, wants_gpu
from grpo_tui.profile.hub import cache_state, has_own_hub, hub_problems
from grpo_tui.profile.loaded import LoadedProfile
from grpo_tui.services.atropos_environment import AtroposEnvironment
from grpo_tui.services.environment import Environment, sampled_by
from grpo_tui.services.inference import Inference
from grpo_tui.services.trainer import Trainer

TRACKERS = {
    "use_wandb": ("wandb", "trackers"),
    "use_tensorboard": ("tensorboard", "trackers"),
    "use_trackio": ("trackio", "trackio"),
}
"""Package and extra by setting."""
"""Settings of a trainer, and the package that each needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Something that a profile needs of this machine."""

    id: str
    """Of the check, as `doctor` shows it."""
    key: str
    """The setting that asks for it."""
    text: str
    """What is there, or what is lacking."""
    is_met: bool = False
    hint: str = ""
    """What to do where it is lacking, unless the text says so. Of one that is met: it could not be looked up."""


def needs_of(loaded: LoadedProfile) -> list[Need]:
    """Everything that a profile needs here, met or not; what several services need by one setting once."""
    return list(dict.fromkeys(need for check in CHECKS for need in check(loaded)))


def lacking_needs(loaded: LoadedProfile) -> list[Fault]:
    """What a profile lacks here, each with what to do."""
    lacking = [need for need in needs_of(loaded) if not need.is_met]
    return [Fault(need.key, f"{need.text}: {need.hint}" if need.hint else need.text) for need in lacking]


def _packages(loaded: LoadedProfile) -> Iterator[Need]:
    wanted: dict[str, tuple[str, str]] = {}
    for name, service in loaded.first_replicas.items():
        at = f"services.{name}"
        if isinstance(service, Inference | Trainer):
            wanted.setdefault("torch", (f"{at}.kind", "pip install torch"))
            wanted.setdefault("transformers", (f"{at}.kind", "pip install transformers"))
        if isinstance(service, Inference) and service.engine == "vllm":
            wanted["vllm"] = (f"{at}.engine", f"pip install 'grpo-tui[vllm]', or set {at}.engine=torch")
        if isinstance(service, Trainer) and service.own_engine == "vllm":
            remedy = f"pip install 'grpo-tui[vllm]', or set {at}.inference.engine=torch"
            wanted["vllm"] = (f"{at}.inference.engine", remedy)
        if sampled := sampled_by(name, service):
            key, sampling = sampled
            wanted |= {each: (f"{key}.task", remedy) for each, remedy in sampling.task.packages().items()}
        if isinstance(service, Trainer):
            for setting, (package, extra) in TRACKERS.items():
                if getattr(service, setting):
                    wanted[package] = (f"{at}.{setting}", f"pip install 'grpo-tui[{extra}]', or leave it out")
    for package, (key, remedy) in wanted.items():
        if is_installed(package):
            yield Need(id="package", key=key, text=package, is_met=True)
        else:
            yield Need(id="package", key=key, text=f"{package} is not installed", hint=remedy)


def _cluster(loaded: LoadedProfile) -> Iterator[Need]:
    if loaded.profile.cluster.kind != "ray":
        return
    if has_ray():
        yield Need(id="package", key="cluster.kind", text="ray", is_met=True)
    else:
        hint = "pip install 'grpo-tui[ray]'"
        yield Need(id="package", key="cluster.kind", text="needs Ray, which is not installed", hint=hint)


def _optimizers(loaded: LoadedProfile) -> Iterator[Need]:
    for name, service in loaded.first_replicas.items():
        if isinstance(service, Trainer):
            key = f"services.{name}.optimizer"
            lack = lacking_for_optimizer(service.optimizer, on_cpu=is_on_cpu(service.device))
            if lack is not None:
                yield Need(id="package", key=key, text=lack[0], hint=lack[1])
            elif service.optimizer == "adamw_8bit":
                yield Need(id="package", key=key, text="bitsandbytes", is_met=True)


def _gpus(loaded: LoadedProfile) -> Iterator[Need]:
    """Whether there may be a GPU where the device is one: a driver, and a torch that can use it."""
    for name, service in loaded.first_replicas.items():
        if not isinstance(service, Inference | Trainer) or not wants_gpu(service):
            continue
        if service.num_devices and loaded.profile.cluster.address is not None:
            continue  # it runs on a machine of that cluster
        shared = loaded.profile.model
        key = device = "model.device" if shared and shared.device == service.device else f"services.{name}.device"
        what = repr(service.device)
        if service.device == "auto":
            key, what = f"services.{name}.gpus", str(list(service.gpus or ()))
        if not has_gpu_driver():
            text = f"{what} needs a GPU, and no GPU driver is loaded here"
            hint = f"use a machine with one, a profile for the CPU (tiny-cpu, smollm-cpu), or --set {device}=cpu"
            yield Need(id="gpu", key=key, text=text, hint=hint)
        elif (torch := installed_version("torch")) is not None and not is_torch_for_gpus():
            text = f"{what} needs a GPU, and torch {torch} is a build without CUDA"
            yield Need(id="torch", key=key, text=text, hint=INSTALL)


def _files(loaded: LoadedProfile) -> Iterator[Need]:
    """Files and modules of tasks and curricula, found from where the environment will run.

    Environments with `env_files` are left out: these may set PYTHONPATH.
    """
    for name, service in loaded.first_replicas.items():
        sampled = sampled_by(name, service)
        if sampled is None or service.env_files:
            continue
        at, sampling = sampled
        folder = Path(os.path.realpath(loaded.path.parent / service.cwd))
        search_path = [folder / part for part in service.env.get("PYTHONPATH", "").split(os.pathsep) if part]
        try:
            sampling.check_files(folder, search_path)
        except ConfigError as error:
            key, text = f"{at}.{error}".split(": ", 1)
            yield Need(id="task", key=key, text=text)


def _atropos(loaded: LoadedProfile) -> Iterator[Need]:
    """The files of stock environments, and the Python that runs each; a name without a folder is one of the path."""
    for name, service in loaded.first_replicas.items():
        if not isinstance(service, AtroposEnvironment) or service.env_files:
            continue
        for setting, path in {"file": service.file, "python": service.python}.items():
            if (loaded.path.parent / service.cwd / path).is_file() or (setting == "python" and which(path)):
                continue
            key = f"services.{name}.{setting}"
            unset = re.search(r"\$\{?(\w+)", str(path))
            hint = f"--set {key}=…" if unset is None else f"export {unset[1]}=…, or --set {key}=…"
            yield Need(id="atropos", key=key, text=f"{path} is not a file", hint=hint)


def _hub(loaded: LoadedProfile) -> Iterator[Need]:
    """Models and data sets that come from the hub and are not in its cache: it must have them and be reachable."""
    if any(service.env_files or has_own_hub(service.env) for service in loaded.profile.services.values()):
        return
    ids = _hub_ids(loaded)
    states = {name: cache_state(name) for name in ids}
    problems = hub_problems([name for name, state in states.items() if state != "complete"])
    for name, key in ids.items():
        shown = name.removeprefix("datasets/")
        if name in problems:
            text, hint, is_certain = problems[name]
            yield Need(id="model", key=key, text=text, hint=hint, is_met=not is_certain)
        elif states[name] == "complete":
            yield Need(id="model", key=key, text=f"{shown} is in the hub's cache", is_met=True)
        else:
            how = "partly" if states[name] == "partial" else "not"
            text = f"{shown} is {how} in the hub's cache; the hub is reached, and it is downloaded at the first start"
            yield Need(id="model", key=key, text=text, is_met=True)


def _hub_ids(loaded: LoadedProfile) -> Mapping[str, str]:
    """What a profile loads from the hub, each with the setting that asks for it; data sets as `datasets/…`."""
    keys: dict[str, str] = {}
    shared = loaded.profile.model
    for name, service in loaded.first_replicas.items():
        at = f"services.{name}"
        if isinstance(service, Inference | Environment | Trainer):
            key = "model.name" if shared and shared.name == service.model_name else f"{at}.model_name"
            keys.setdefault(service.model_name, key)
        if isinstance(service, Trainer) and service.has_reference and service.reference_model is not None:
            keys.setdefault(service.reference_model, f"{at}.reference_model")
        if sampled := sampled_by(name, service):
            key, sampling = sampled
            keys |= {f"datasets/{each}": f"{key}.task.path" for each in sampling.task.hub_datasets()}
    return {name: key for name, key in keys.items() if name.startswith("datasets/") or is_from_hub(name)}


CHECKS: tuple[Callable[[LoadedProfile], Iterator[Need]], ...] = (
    _packages, _cluster, _optimizers, _gpus, _files, _atropos, _hub,
)  # fmt: skip
