"""The note in a checkpoint that inference is to read. Written by the trainer, last; read by the server as it starts."""

from __future__ import annotations

from grpo_engine.wire.codec import Message


class HandoverNote(Message):
    """`handover.json`: a checkpoint that has one is whole."""

    policy_version: int
    model: str
    """What the model was loaded from: an absolute folder, or a hub id."""
    num_tensors: int
    """In all safetensors files together."""
