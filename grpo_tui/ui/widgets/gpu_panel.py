"""GPU memory by service: a bar a GPU, what strangers hold named as theirs, and how busy it is.

On a machine without a driver: the host's memory by service, and why there is no GPU to show.
"""

from __future__ import annotations

from dataclasses import dataclass

from textual.content import Content

from grpo_engine.wire.supervisor import GpuStatus
from grpo_tui.ui.glyphs import FREE_FILL, OTHERS_FILL, REST_FILL, SHARE_FILLS
from grpo_tui.ui.widgets.lines import NUM_SHARES, Lines, Styled, fit, line
from grpo_tui.view.bars import split_cells
from grpo_tui.view.format import bytes_text, percent_text
from grpo_tui.view.state import ViewState

LABEL_WIDTH = 7
MAX_BAR = 72
NO_GPU_WORDS = "no GPU reported yet"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A stretch of a bar."""

    name: str
    num_bytes: int
    fill: str
    style: str


class GpuPanel(Lines):
    """One line a GPU, and a legend."""

    DEFAULT_CSS = """
    GpuPanel { padding: 0 1; }
    """

    def inputs(self, state: ViewState) -> tuple[object, ...]:
        """Made anew with each sample of memory."""
        return (state.status, state.host_memory)

    def lines(self, state: ViewState, width: int, height: int) -> list[Content]:
        """Bars, then the legend with what each service holds on all of them together."""
        if state.status is None or not height:
            return []
        if not state.status.gpus:
            return _host_lines(state, width)
        shown = state.status.gpus[: max(1, height - 1)]
        bars = [_gpu_line(gpu, state, width) for gpu in shown]
        if len(shown) < len(state.status.gpus):
            bars[-1] = line((f"  … and {len(state.status.gpus) - len(shown) + 1} more GPUs", ".muted"))
        return [*bars, _legend([part for gpu in state.status.gpus for part in _gpu_parts(gpu, state)], width)]


def rows_wanted(state: ViewState) -> int:
    """Rows that show everything: the bars and the legend."""
    return 1 + max(1, len(state.status.gpus) if state.status else 0)


def _gpu_line(gpu: GpuStatus, state: ViewState, width: int) -> Content:
    label = (fit(f"GPU {gpu.index}", LABEL_WIDTH), ".strong")
    if gpu.memory_used_bytes is None or not gpu.memory_total_bytes:
        return line(label, (f"memory unknown   {percent_text(gpu.utilization_percent)} busy", ".muted"))
    amounts = f"  {bytes_text(gpu.memory_used_bytes)} of {bytes_text(gpu.memory_total_bytes)}"
    busy = f"  {fit(percent_text(gpu.utilization_percent), 4, right=True)} busy"
    name = f"  {gpu.name}" if width >= 110 else ""
    bar_width = min(MAX_BAR, width - LABEL_WIDTH - len(amounts) - len(busy) - len(name))
    bar = _bar(_gpu_parts(gpu, state), gpu.memory_total_bytes, bar_width)
    return line(label, *bar, amounts, (busy, ".muted"), (name, ".faint"))


def _gpu_parts(gpu: GpuStatus, state: ViewState) -> list[Part]:
    """Our services in the order of the plan, then strangers, then what no process is named for."""
    parts = _service_parts({name: gpu.by_service.get(name) for name in _names(state)})
    parts += [
        Part(name=name, num_bytes=num_bytes, fill=OTHERS_FILL, style=".others")
        for name, num_bytes in _strangers(gpu).items()
    ]
    if gpu.memory_used_bytes is not None:
        rest = gpu.memory_used_bytes - sum(part.num_bytes for part in parts)
        parts.append(Part(name="driver", num_bytes=max(0, rest), fill=REST_FILL, style=".muted"))
    return parts


def _strangers(gpu: GpuStatus) -> dict[str, int]:
    """Bytes of each user whose processes can be seen, and of all others together."""
    named = {f"user {user}": num_bytes for user, num_bytes in gpu.other_by_user.items()}
    return {**named, "others": max(0, (gpu.other_bytes or 0) - sum(named.values()))}


def _host_lines(state: ViewState, width: int) -> list[Content]:
    """Memory of the machine by service, in the place of GPUs."""
    assert state.status is not None
    why = (state.status.gpu_note or NO_GPU_WORDS, ".muted")
    parts = _service_parts({service.name: service.rss_bytes for service in state.services})
    label = (fit("memory", LABEL_WIDTH), ".strong")
    if state.host_memory is None:
        return [line(label, why), _legend(parts, width)]
    total = state.host_memory.total_bytes
    used = total - state.host_memory.available_bytes
    others = max(0, used - sum(part.num_bytes for part in parts))
    parts.append(Part(name="others", num_bytes=others, fill=REST_FILL, style=".muted"))
    amounts = f"  {bytes_text(used)} of {bytes_text(total)}"
    note = f"  {why[0]}"
    bar = _bar(parts, total, min(MAX_BAR, width - LABEL_WIDTH - len(amounts) - len(note)))
    return [line(label, *bar, amounts, (note, ".muted")), _legend(parts, width)]


def _service_parts(bytes_by_service: dict[str, int | None]) -> list[Part]:
    return [
        Part(
            name=name,
            num_bytes=num_bytes,
            fill=SHARE_FILLS[place % len(SHARE_FILLS)],
            style=f".share-{place % NUM_SHARES}",
        )
        for place, (name, num_bytes) in enumerate(bytes_by_service.items())
        if num_bytes
    ]


def _bar(parts: list[Part], total: int, width: int) -> list[Styled]:
    cells = split_cells([part.num_bytes for part in parts], total, max(0, width))
    bar = [(part.fill * num_cells, part.style) for part, num_cells in zip(parts, cells, strict=True)]
    return [*bar, (FREE_FILL * max(0, width - sum(cells)), ".faint")]


def _legend(parts: list[Part], width: int) -> Content:
    """`█ vllm 36.0G  ▓ trainer 22.1G`: the sum of each over the bars above it."""
    sums: dict[str, int] = {}
    looks: dict[str, Part] = {}
    for part in parts:
        sums[part.name] = sums.get(part.name, 0) + part.num_bytes
        looks.setdefault(part.name, part)
    pieces: list[str | Styled] = []
    for name, num_bytes in sums.items():
        if num_bytes:
            pieces += [(looks[name].fill, looks[name].style), f" {name} ", (f"{bytes_text(num_bytes)}  ", ".muted")]
    legend = line(*pieces)
    indent = LABEL_WIDTH if LABEL_WIDTH + legend.cell_length - 2 <= width else 0
    return legend.pad_left(indent).truncate(width, ellipsis=True)


def _names(state: ViewState) -> list[str]:
    return [service.name for service in state.services]
