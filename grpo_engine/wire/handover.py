"""Notes of a trainer for an inference server that starts."""

from __future__ import annotations

from grpo_engine.wire.codec import Message, Whole


class HandoverNote(Message):
    """`handover.json` in a checkpoint, written last: a checkpoint that has one is complete."""

    policy_version: int
    model: str
    """What the model was loaded from: an absolute folder, or a hub id."""
    num_tensors: int
    """In all safetensors files of the checkpoint."""


class HandoverSender(Message):
    """`sender.json` in the folder: a trainer that sends its weights to servers that start."""

    pid: int
    start_ticks: int
    """Field 22 of /proc/<pid>/stat: the pid may be another process's by now."""
    address: str = "127.0.0.1"
    """Of its machine. On another than of loopback the trainer changes the time of the file every second, by which other
    machines know that it lives."""


class PlacedPorts(Message):
    """`ports.json` in the folder of a machine of a cluster: the ports of the services that the broker has placed there,
    for the parameter service of that machine."""

    ports: list[Whole]
