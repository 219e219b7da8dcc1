"""Faults of one replica among several, for vLLM's `--worker-extension-cls`: POST /collective_rpc calls `break_replica`.

Imported only by vLLM's workers."""

from typing import Any


class BreakableReplica:
    """Joins vLLM's worker."""

    parallel_config: Any
    compute_weight_checksums: Any
    start_weight_update: Any
    update_weights: Any
    finish_weight_update: Any

    def break_replica(self, index: str, fault: str, old_weights: str) -> None:
        """Break the replica `index`. `deaf`: it takes no more updates. `relapses`: it takes each update and proves it,
        and then loads the file `old_weights`."""
        if self.parallel_config.data_parallel_index != int(index):
            return
        update, checksums = self.update_weights, self.compute_weight_checksums

        def relapse() -> dict[str, str]:
            proof: dict[str, str] = checksums()
            self.start_weight_update()
            update({"path": old_weights})
            self.finish_weight_update()
            return proof

        if fault == "deaf":
            self.update_weights = lambda update_info: None
        else:
            self.compute_weight_checksums = relapse
        self.mend = lambda: vars(self).update(update_weights=update, compute_weight_checksums=checksums)

    def mend_replica(self) -> None:
        """Undo it."""
        if (mend := vars(self).pop("mend", None)) is not None:
            mend()
