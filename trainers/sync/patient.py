"""Waiting for servers that are being started again: by a supervisor, or by hand."""

import logging
import time

from torch import Tensor

from trainers.policy import Policy
from trainers.server_control import ServerGoneError
from trainers.sync.canary import Canary
from trainers.sync.protocol import SyncReport, WeightSync

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5


class PatientSync:
    """A WeightSync that goes on asking where no server answers."""

    def __init__(self, sync: WeightSync, canary: Canary, patience_seconds: float) -> None:
        """`canary` proves what comes back."""
        self._sync = sync
        self._canary = canary
        self._patience = patience_seconds

    def push(self, version: int, policy: Policy, state: dict[str, Tensor]) -> SyncReport:
        """See WeightSync. Raises ServerGoneError when no server has answered for `patience_seconds`."""
        deadline = time.monotonic() + self._patience
        while True:
            try:
                return self._sync.push(version, policy, state)
            except ServerGoneError as error:
                if time.monotonic() > deadline:
                    raise ServerGoneError(f"{error} (no server answered for {self._patience:g} s)") from error
                logger.warning("version %d waits for a server: %s", version, error)
                time.sleep(POLL_SECONDS)

    def restore(self, url: str) -> SyncReport:
        """See WeightSync."""
        return self._sync.restore(url)

    def bring_back(self, url: str) -> bool:
        """Restore the server at `url`, which answered a moment ago; false where it is gone again."""
        try:
            report = self.restore(url)
            self._canary.prove_again(report, url)
        except ServerGoneError as error:
            logger.warning("server %s is gone again: %s", url, error)
            return False
        logger.warning("server %s is back and has proven to hold version %d", url, report.version)
        return True

    def close(self) -> None:
        """See WeightSync."""
        self._sync.close()
