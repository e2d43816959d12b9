"""Environment variables by which the processes of a run find each other; each name stands here only.

Set by the supervisor, a server or a person, as said below; read by services and hooks.
"""

from __future__ import annotations

RUN_VARIABLE = "GRPO_TUI_RUN"
"""Id of the run. The supervisor sets it and the next three for every service: together they are the marker by which
processes of a run are recognised."""
RUN_FOLDER_VARIABLE = "GRPO_TUI_RUN_FOLDER"
SERVICE_VARIABLE = "GRPO_TUI_SERVICE"
ATTEMPT_VARIABLE = "GRPO_TUI_ATTEMPT"
GATE_VARIABLE = "GRPO_TUI_GATE"
"""For a service that is started held: the number of a descriptor, from which it reads one byte before it begins; at the
end of the file it exits. Set by its keeper."""
INFERENCE_VARIABLE = "GRPO_TUI_INFERENCE"
"""For a trainer: the name of the inference service that its bridge restarts; of several, separated by commas."""
HOOK_PREFIX = "GRPO_TUI_HOOK_"
"""Begins what a hook is given: `…EVENT`, `…SERVICE`, `…ATTEMPT`, `…STATE`, `…WHY`, `…EXIT_CODE`."""
MACHINE_ADDRESS_VARIABLE = "GRPO_MACHINE_ADDRESS"
"""For a service that was placed on a machine of a cluster: the address at which the other machines reach this one, of
loopback where all are one; set by the broker."""
REPORTS_VARIABLE = "GRPO_REPORTS_SOCKET"
"""For such a service: path of the socket that takes what it reports of itself, in place of the supervisor's; set by the
agent of its machine."""
TOKEN_VARIABLE = "GRPO_API_TOKEN"
"""The token of the rollout API and the inference server, for both and for their clients; set by a person."""
TOKEN_FILE_VARIABLE = "GRPO_API_TOKEN_FILE"
"""Path of the file with that token, read where the variable above is not set; set by the supervisor for every service,
or by a person."""
INFERENCE_KEY_VARIABLE = "GRPO_INFERENCE_KEY"
"""API key that environments send to inference servers behind a proxy that asks for one; set by a person, or by the
supervisor for an environment with `api_key`."""
SECRET_ARGUMENT_PREFIX = "GRPO_SECRET_ARGUMENT_"
"""Begins the names of the words that are masked on the command line of one of our services, numbered from 0; set by who
starts it."""
BRIDGE_FILE_VARIABLE = "VLLM_BRIDGE_CONFIG_PATH"
"""Path of the bridge file, as users of Atropos know it; set by a person."""
LOG_FOLDER_VARIABLE = "LOGDIR"
"""Folder of the bridge file where its path is not set, as users of Atropos know it; set by a person."""
FORK_SERVER_VARIABLE = "GRPO_FORK_SERVER_PID"
"""Pid of the fork server; set for a server that it starts as a program, which exits when the fork server does."""
LISTENER_VARIABLE = "GRPO_LISTENER"
"""Descriptor of the socket that has the server's port; set by a fork server for a server that it starts as a
program."""
RESTARTS_VARIABLE = "GRPO_FORK_SERVER_RESTARTS"
"""Path of the file in which a fork server, or the launcher of ranks, counts its restarts (`Restarts`); set by the
supervisor."""
SPEEDS_VARIABLE = "GRPO_SERVER_SPEEDS"
"""Path of the file to which an inference server writes how fast it is (`ServerSpeeds`); set by the supervisor."""
VLLM_SERVER_VARIABLE = "GRPO_VLLM_SERVER"
"""`<pid>:<start ticks>` of the process that serves HTTP; set for the workers of a vLLM engine."""
VLLM_SHARE_VARIABLE = "GRPO_VLLM_SHARE_WEIGHTS"
"""`1` where the workers share their weights; set for the workers of a vLLM engine."""
