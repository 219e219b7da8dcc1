"""A file that another process appends lines to, read from where the last reading ended."""

import os
from dataclasses import dataclass
from pathlib import Path

_MARK = 256


@dataclass(frozen=True)
class Taken:
    """What a reading found: whole new lines with the bytes at which they begin."""

    lines: list[tuple[int, bytes]]
    restarted: bool
    """The file is not the one that was read before (a resumed run cuts its files): these lines are its first."""


class GrowingFile:
    """Reads every whole line once. A last line without its end is waited for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        """Bytes read so far."""
        self.size = 0
        """Bytes that were there to read at the last reading: whole lines."""
        self._inode = -1
        self._mark = b""

    def take(self, most: int) -> Taken:
        """The lines that are new, up to about `most` bytes of them."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            restarted = self.offset > 0
            self.offset = self.size = 0
            return Taken([], restarted)
        with file:
            status = os.fstat(file.fileno())
            self.size = status.st_size
            restarted = False
            if self.offset:
                # a file that was cut and has grown again since can have any size: its last bytes tell
                file.seek(self.offset - len(self._mark))
                restarted = status.st_ino != self._inode or file.read(len(self._mark)) != self._mark
            if restarted:
                self.offset = 0
            self._inode = status.st_ino
            file.seek(self.offset)
            lines: list[tuple[int, bytes]] = []
            start = self.offset
            while self.offset - start < most:
                line = file.readline()
                if not line.endswith(b"\n"):
                    # a run that was killed while it wrote leaves such a line for good
                    self.size = self.offset
                    break
                lines.append((self.offset, line))
                self.offset += len(line)
            if lines or restarted:
                length = min(_MARK, self.offset)
                file.seek(self.offset - length)
                self._mark = file.read(length)
        return Taken(lines, restarted)
