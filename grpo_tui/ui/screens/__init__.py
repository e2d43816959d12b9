"""The screens of a run, one file each: `SCREENS` is where they are registered, by their place among the keys 1 to 6."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from grpo_tui.ui.screens.alignment import AlignmentScreen
from grpo_tui.ui.screens.base import RunScreen
from grpo_tui.ui.screens.gpus import GpusScreen
from grpo_tui.ui.screens.logs import LogsScreen
from grpo_tui.ui.screens.main import MainScreen
from grpo_tui.ui.screens.metrics import MetricsScreen
from grpo_tui.ui.screens.rollouts import RolloutsScreen

SCREENS: Mapping[str, type[RunScreen]] = MappingProxyType(
    {
        screen.PLACE: screen
        for screen in (MainScreen, GpusScreen, AlignmentScreen, RolloutsScreen, MetricsScreen, LogsScreen)
    }
)
