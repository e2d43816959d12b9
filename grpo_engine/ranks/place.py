"""Which rank this process is, as torchrun, Slurm's srun or `grpo-engine train --gpus` say in the environment.

Torch-free to import.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from grpo_engine.errors import ConfigError

RANK, WORLD_SIZE, LOCAL_RANK = "RANK", "WORLD_SIZE", "LOCAL_RANK"
"""Set by torchrun, and by our launcher."""
MASTER_ADDR, MASTER_PORT = "MASTER_ADDR", "MASTER_PORT"
"""Where rank 0 has the store by which ranks find each other."""
SLURM_RANK, SLURM_WORLD_SIZE, SLURM_LOCAL_RANK = "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"
SLURM_STEP_NODES, SLURM_JOB_ID = "SLURM_STEP_NODELIST", "SLURM_JOB_ID"
STORE_FILE = "GRPO_RANKS_STORE_FILE"
"""Set by our launcher on one machine: the file by which ranks find each other, in a folder of the user's own. To a port
every user of the machine could connect."""
LISTENING_FD = "GRPO_RANKS_LISTENING_FD"
"""Set by our launcher for rank 0 of several machines: the descriptor of a socket that listens on the port already."""
FIRST_PORT, NUM_PORTS = 29500, 1000
"""Where Slurm gives none: a port that follows from the job's number, equal on every rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """One process among the ranks of a trainer."""

    rank: int
    world_size: int
    local_rank: int
    """Number on its machine: which of the visible GPUs it takes."""
    store_file: Path | None = None
    """By which the ranks find each other; None: by the port."""
    master_addr: str = ""
    master_port: int = 0
    listening_fd: int | None = None
    """Of rank 0: a socket that listens on the port; None: it opens one."""


def rank_place(environment: Mapping[str, str]) -> RankPlace | None:
    """The place that the environment gives; None where it names no ranks, or only one.

    Raises:
        ConfigError: variables are missing, no numbers, or contradict each other.
    """
    if RANK in environment and WORLD_SIZE in environment:
        names = (RANK, WORLD_SIZE, LOCAL_RANK)
        defaults = {LOCAL_RANK: environment[RANK]}
    elif (
        SLURM_RANK in environment and environment.get(SLURM_WORLD_SIZE, "1") != "1" and SLURM_STEP_NODES in environment
    ):
        names = (SLURM_RANK, SLURM_WORLD_SIZE, SLURM_LOCAL_RANK)
        defaults = {
            MASTER_ADDR: first_host(environment[SLURM_STEP_NODES]),
            MASTER_PORT: str(FIRST_PORT + _number(environment, SLURM_JOB_ID) % NUM_PORTS),
        }
    else:
        return None
    values = {**defaults, **environment}
    rank, world_size, local_rank = (_number(values, name) for name in names)
    if world_size == 1:
        return None
    if rank >= world_size:
        raise ConfigError(f"{names[0]}={rank}, {names[1]}={world_size}: ranks count from 0 to {world_size - 1}")
    if STORE_FILE in environment:
        return RankPlace(
            rank=rank, world_size=world_size, local_rank=local_rank, store_file=Path(environment[STORE_FILE])
        )
    if missing := [name for name in (MASTER_ADDR, MASTER_PORT) if not values.get(name)]:
        raise ConfigError(f"{names[1]}={world_size} without {' and '.join(missing)}: set the address of rank 0")
    return RankPlace(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        master_addr=values[MASTER_ADDR],
        master_port=_number(values, MASTER_PORT),
        listening_fd=_number(environment, LISTENING_FD) if LISTENING_FD in environment else None,
    )


def first_host(nodes: str) -> str:
    """The first host of a Slurm list, as `gpu07` of `gpu[07-09,12],cpu1`."""
    prefix, bracket, rest = nodes.partition("[")
    if not bracket or "," in prefix:
        return nodes.partition(",")[0]
    ranges, _, _ = rest.partition("]")
    return prefix + ranges.replace("-", ",").partition(",")[0]


def _number(values: Mapping[str, str], name: str) -> int:
    text = values.get(name, "")
    if not text.isdecimal():
        raise ConfigError(f"{name}={text!r}: a whole number is needed")
    return int(text)
