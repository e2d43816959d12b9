"""The kinds of service and the union that registers them.

Apart from `__init__`, because it loads every engine setting: the daemon and the command line work with launches, which
need none of them.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from grpo_tui.services.command import Command
from grpo_tui.services.environment import Environment
from grpo_tui.services.inference import Inference
from grpo_tui.services.rollout_api import RolloutApi
from grpo_tui.services.trainer import Trainer

AnyService = Annotated[Command | RolloutApi | Inference | Environment | Trainer, Field(discriminator="kind")]
"""A new kind is one new file and one name here."""
