"""The note in a checkpoint for inference. Written by the trainer, last; read by the server at start-up."""

from __future__ import annotations

from grpo_engine.wire.codec import Message


class HandoverNote(Message):
    """`handover.json`: a checkpoint that has one is complete."""

    policy_version: int
    model: str
    """What the model was loaded from: an absolute folder, or a hub id."""
    num_tensors: int
    """In all safetensors files of the checkpoint."""
