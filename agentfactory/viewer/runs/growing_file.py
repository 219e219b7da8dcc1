"""A reader of a file to which another process appends lines; each read continues where the last one ended."""

import os
from dataclasses import dataclass
from pathlib import Path

from agentfactory.base.files.untrusted_files import LINE_BYTES, RefusedFileError, open_file

_MARK = 256


@dataclass(frozen=True)
class Taken:
    """The result of a read: new whole lines, with their byte offsets."""

    lines: list[tuple[int, bytes]]
    restarted: bool
    """The file is not the one that was read before (a resumed run cuts its files): these lines are its first ones."""


class GrowingFile:
    """A reader of whole lines, each once. Links below the folder `within` are not followed."""

    def __init__(self, path: Path, within: Path) -> None:
        self.path = path
        self._within = within
        self.offset = 0
        self.size = 0
        """Bytes of whole lines that the file had at the last read."""
        self._inode = -1
        self._mark = b""
        self._too_long: tuple[int, int] | None = None
        """Inode and offset of a line that is too long to be read."""

    def take(self, most: int) -> Taken:
        """Return the new lines, about `most` bytes. Raises OSError if the file, or its next line, cannot be read."""
        try:
            file = open_file(self.path, self._within)
        except FileNotFoundError:
            restarted = self.offset > 0
            self.offset = self.size = 0
            return Taken([], restarted)
        with file:
            status = os.fstat(file.fileno())
            self.size = status.st_size
            restarted = False
            if self.offset:
                # a file that was cut and has grown again can have any size, so compare the last bytes that were read
                file.seek(self.offset - len(self._mark))
                restarted = status.st_ino != self._inode or file.read(len(self._mark)) != self._mark
            if restarted:
                self.offset = 0
            self._inode = status.st_ino
            file.seek(self.offset)
            lines: list[tuple[int, bytes]] = []
            start = self.offset
            while self.offset - start < most:
                # without reading it again
                is_refused = self._too_long == (status.st_ino, self.offset)
                line = b"" if is_refused else file.readline(LINE_BYTES + 1)
                if is_refused or len(line) > LINE_BYTES:
                    self._too_long = (status.st_ino, self.offset)
                    self.size = self.offset
                    if lines or restarted:
                        break
                    problem = f"has a line of more than {LINE_BYTES:,} bytes, at byte {self.offset}"
                    raise RefusedFileError(self.path, problem, "remove the line: the rest of the file is not read")
                if not line.endswith(b"\n"):
                    # a run that was killed while it wrote leaves such a line permanently
                    self.size = self.offset
                    break
                lines.append((self.offset, line))
                self.offset += len(line)
            if lines or restarted:
                length = min(_MARK, self.offset)
                file.seek(self.offset - length)
                self._mark = file.read(length)
        return Taken(lines, restarted)
