"""Text that a terminal shows and does not obey.

Names, commands of other processes and text of models and services reach the screen and the commands from outside. A
control character among them would be executed by the terminal: set its title, write the clipboard (OSC 52), clear it.
"""

from __future__ import annotations

import logging
import unicodedata

from grpo_engine.wire.secrets import masked_text


def printable(text: str, *, keep: str = "") -> str:
    """`text` without control characters (C0, C1), bidirectional controls and invisible characters.

    Args:
        keep: characters that stay, such as a line feed.
    """
    if text.isprintable():
        return text
    return "".join(each for each in text if each.isprintable() or each in keep or unicodedata.category(each) == "Zs")


class PrintableFormatter(logging.Formatter):
    """Formats log lines, and tracebacks over several, in which text of other processes may be quoted.

    Passwords of URLs are masked: W&B is sent what a trainer prints.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line without what a terminal would obey."""
        return printable(masked_text(super().format(record)), keep="\n\t")


def log_to_stderr() -> None:
    """Log lines of this process go to stderr, with their time and logger."""
    handler = logging.StreamHandler()
    handler.setFormatter(PrintableFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
