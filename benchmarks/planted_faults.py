"""Plant one fault at a time in a copy of the repository, and run CI's tests of the faulty package.

Each fault replaces a piece of code that occurs exactly once in its file. The tests of its package run with `-x`; the
fault is found if one of them fails. Each fault has its own copy; the copies share this environment's packages. A fault
whose code is gone is an error: plant it again where the code has moved.

    python benchmarks/planted_faults.py                 # all faults
    python benchmarks/planted_faults.py --quick         # the first fault of each package
    python benchmarks/planted_faults.py mask turn-limit # these

The last line is JSON: the number of faults, and how many were found.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
IN_CI = "not long"
"""Tests of `make test` and `make test-extended`."""


@dataclass(frozen=True)
class Fault:
    """A fault: `old` becomes `new` in `file`. The file `tests` runs first, then the rest of its folder."""

    name: str
    file: str
    old: str
    new: str
    tests: str

    @property
    def package(self) -> str:
        """The top-level package under agentfactory/."""
        return self.file.split("/")[0]


FAULTS = (
    # trainers
    Fault(
        "mask",
        "rollout/token_row.py",
        "sampled = np.flatnonzero(self.mask)",
        "sampled = np.flatnonzero(self.mask) - 1",
        "trainers/test_batch.py",
    ),
    Fault(
        "normaliser",
        "trainers/update/learner.py",
        "scale = self.accelerator.num_processes / batch.normaliser",
        "scale = self.accelerator.num_processes",
        "trainers/test_trl.py",
    ),
    Fault(
        "clip-bounds",
        "trainers/update/losses.py",
        "low, high = 1 - clip_low, 1 + clip_high",
        "low, high = 1 - clip_high, 1 + clip_low",
        "trainers/test_losses.py",
    ),
    Fault(
        "leave-one-out",
        "trainers/loop/advantages.py",
        "(len(known) - 1) / len(known)",
        "1.0",
        "trainers/test_advantages.py",
    ),
    Fault(
        "mismatch-ignored",
        "trainers/update/policy_update.py",
        "terms = terms * correction",
        "pass",
        "trainers/test_trl.py",
    ),
    Fault(
        "turn-credit",
        "trainers/loop/token_advantages.py",
        "cost[end - 1] += reward",
        "cost[-1] += reward",
        "trainers/test_credit.py",
    ),
    Fault(
        "tree-positions",
        "trainers/batches/packing.py",
        "positions.append(np.arange(shared, len(row)))",
        "positions.append(np.arange(len(row) - shared))",
        "trainers/test_tree.py",
    ),
    Fault(
        "optimizer-state",
        "trainers/update/learner_state.py",
        "optimizer.state[trained[name]] = slots",
        "pass",
        "trainers/test_checkpoints.py",
    ),
    Fault(
        "stale-adapter",
        "trainers/sync/adapter_sync.py",
        "if self._unfinished != version:",
        "if self._unfinished != version and version != 2:",
        "trainers/test_sync.py",
    ),
    Fault(
        "proof-accepts-stale",
        "trainers/sync/canary_verdict.py",
        "SLOPES = (0.5, 1.5)",
        "SLOPES = (-0.5, 1.5)",
        "trainers/test_drift.py",
    ),
    Fault(
        "sequence-mean",
        "trainers/update/losses.py",
        "over_sequence(detached, sequence, mean=True)",
        "over_sequence(detached, sequence, mean=False)",
        "trainers/test_losses.py",
    ),
    Fault(
        "low-entropy",
        "trainers/loop/token_advantages.py",
        "least[index][~keeps] = most[index][~keeps] = 0.0",
        "least[index][keeps] = most[index][keeps] = 0.0",
        "trainers/test_credit.py",
    ),
    Fault(
        "best-checkpoint",
        "trainers/checkpoints/checkpoint_folder.py",
        "(best.value, best.step)",
        "(best.step, best.value)",
        "trainers/test_checkpoint_folder.py",
    ),
    # rollout
    Fault(
        "turn-limit",
        "rollout/chains/tool_loop.py",
        "if trajectory.turns == episode.max_turns:",
        "if trajectory.turns > episode.max_turns:",
        "rollout/test_limits.py",
    ),
    Fault(
        "staleness",
        "rollout/groups/staleness.py",
        "max(0, self.admission.max_staleness - self._age(self._begun(group)))",
        "max(0, self.admission.max_staleness + 1 - self._age(self._begun(group)))",
        "rollout/test_staleness.py",
    ),
    Fault(
        "equal-rewards",
        "rollout/groups/group_filter.py",
        "{(chain.reward, *(chain.turn_rewards or ())) for chain in counting}",
        "{chain.reward for chain in counting}",
        "rollout/test_filter.py",
    ),
    Fault(
        "cut-turns",
        "rollout/inference/inference_client.py",
        'versions, choice["finish_reason"] == "length", [1]',
        "versions, False, [1]",
        "rollout/test_chain_runner.py",
    ),
    Fault(
        "closing-token",
        "rollout/text/renderer.py",
        "ids[-1:] == [end]",
        "bool(ids)",
        "rollout/test_renderer.py",
    ),
    Fault(
        "trained-twice",
        "rollout/gateway/turn_tree.py",
        "if parent is not None and plan.shared and len(self.rows[parent.row].token_ids) == plan.shared:",
        "if parent is not None and plan.shared:",
        "rollout/test_gateway_tree.py",
    ),
    Fault(
        "temperature",
        "rollout/inference/embedded/sampling.py",
        "scaled = scaled / torch",
        "scaled = scaled * torch",
        "rollout/test_server_contract.py",
    ),
    Fault(
        "stale-cache",
        "rollout/inference/embedded/engine.py",
        "        self._computed[:] = 0\n        self._used[~self._held] = 0\n        return True",
        "        return True",
        "rollout/test_server_contract.py",
    ),
    Fault(
        "image-places",
        "rollout/images/image_tokens.py",
        "spans.append(ImageSpan(len(expanded), len(shown), digest, grid))",
        "spans.append(ImageSpan(len(expanded) + 1, len(shown), digest, grid))",
        "rollout/images/test_vision.py",
    ),
    Fault(
        "pass-at-k",
        "rollout/evaluation/pass_at_k.py",
        "1.0 - math.comb(samples - passed, k) / math.comb(samples, k)",
        "1.0 - (1.0 - passed / samples) ** k",
        "rollout/test_pass_at_k.py",
    ),
    Fault(
        "late-groups",
        "rollout/groups/staleness.py",
        "cut.sort(key=lambda group: group.chains, reverse=True)",
        "cut.sort(key=lambda group: group.chains)",
        "rollout/test_staleness.py",
    ),
    Fault(
        "success-rate",
        "rollout/groups/curriculum.py",
        "before + self.share * (rate - before)",
        "before + self.share * rate",
        "rollout/test_curriculum.py",
    ),
    Fault(
        "half-a-stop",
        "rollout/text/stop_strings.py",
        "max(len(stop.encode()) for stop in stops) + 4",
        "max(len(stop) for stop in stops)",
        "rollout/test_stop_strings.py",
    ),
    Fault(
        "another-row",
        "rollout/data/order_and_mix.py",
        "self._starts[source] + row",
        "row",
        "rollout/test_mix.py",
    ),
    # tools
    Fault(
        "swallowed-error",
        "tools/sessions/tool_session.py",
        "if result.is_error else None",
        "if False else None",
        "tools/test_toolset.py",
    ),
    Fault(
        "one-call-more",
        "tools/calls/limits.py",
        "config.calls is not None and made >= config.calls",
        "config.calls is not None and made > config.calls",
        "tools/test_limits.py",
    ),
    Fault(
        "worn-instance",
        "tools/environments/pool.py",
        "if sound or kind",
        "if True or kind",
        "tools/test_pool.py",
    ),
    Fault(
        "cut-bytes",
        "tools/calls/truncation.py",
        "half, total = most // 2,",
        "half, total = most // 4,",
        "tools/test_truncation.py",
    ),
    Fault(
        "unused-instance",
        "tools/environments/pool.py",
        "self._held.discard(instance)\n            instance.uses -= 1\n",
        "self._held.discard(instance)\n",
        "tools/test_pool.py",
    ),
    Fault(
        "long-tail",
        "tools/calls/truncation.py",
        "        del self._tail[: -self._tail_most]\n",
        "",
        "tools/test_truncation.py",
    ),
    Fault(
        "warm-instances",
        "tools/environments/pool.py",
        "(self._config.warm or 0)",
        "0",
        "tools/test_pool.py",
    ),
    Fault("sandbox-network", "tools/sandbox/bubblewrap.py", ' "--unshare-net",', "", "tools/test_shell.py"),
    Fault(
        "purchase",
        "worlds/webshop/reward.py",
        "wanted = len(goal.attributes) + len(goal.options) + 1",
        "wanted = len(goal.attributes) + len(goal.options)",
        "worlds/webshop/test_reward.py",
    ),
    # the recipe, and around it
    Fault(
        "lost-siblings",
        "recipe/composition.py",
        "if isinstance(value, dict) and isinstance(below.get(key), dict):",
        "if False:",
        "recipe/test_load.py",
    ),
    Fault(
        "half-a-cache",
        "placement/server_memory.py",
        "least = server.max_num_seqs * -(-server.max_model_len // 16) * 16 * per_token",
        "least = server.max_num_seqs * -(-server.max_model_len // 16) * 8 * per_token",
        "placement/test_server_memory.py",
    ),
    Fault(
        "orphans",
        "launching/child_processes.py",
        "    psutil.wait_procs(descendants, timeout=1.0)\n    _kill(descendants)",
        "    pass",
        "launching/test_processes.py",
    ),
    Fault(
        "resume-changes",
        "launching/resumption.py",
        "if old.get(name) != new.get(name) and",
        "if False and",
        "launching/test_resume.py",
    ),
    Fault(
        "unknown-model",
        "commands/eval_command.py",
        "if model is not None and model not in names:",
        "if False:",
        "commands/test_eval.py",
    ),
    Fault(
        "foreign-origin",
        "viewer/access.py",
        'if any(origin != f"http://{hosts[0]}" for origin in given.get("origin", [])):',
        "if False:",
        "viewer/test_viewer.py",
    ),
    Fault(
        "wrong-version",
        "doctor/machine_checks.py",
        "if requirement.specifier.contains(version, prereleases=True):",
        "if True:",
        "doctor/test_doctor.py",
    ),
)


def plant(fault: Fault, copy: Path) -> None:
    """Write the fault into a copy of the repository. Raises ValueError if its code does not occur exactly once."""
    file = copy / "agentfactory" / fault.file
    text = file.read_text(encoding="utf-8")
    if text.count(fault.old) != 1:
        raise ValueError(f"{fault.name}: {fault.old!r} occurs {text.count(fault.old)} times in {fault.file}, not once")
    file.write_text(text.replace(fault.old, fault.new), encoding="utf-8")


def test_files(fault: Fault, copy: Path) -> list[list[str]]:
    """Return the first test file, and the others of its folder."""
    first = copy / "tests" / fault.tests
    others = [file for file in sorted(first.parent.rglob("test_*.py")) if file != first]
    return [[str(file.relative_to(copy)) for file in part] for part in ([first], others)]


def copied(folder: Path) -> Path:
    """Copy the tracked files, links as links, into a new git repository, because some tests list its files."""
    copy = folder / "repository"
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    for name in filter(None, tracked.stdout.split("\0")):
        source, target = REPOSITORY / name, copy / name
        if source.exists() or source.is_symlink():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    for command in (["git", "init", "--quiet"], ["git", "add", "--all"]):
        subprocess.run(command, cwd=copy, check=True)
    return copy


def find(fault: Fault) -> tuple[str | None, float]:
    """Return the test that fails with a fault (None: all pass), and the seconds until the failure."""
    started = time.monotonic()
    # readable by the sandbox's user
    with tempfile.TemporaryDirectory(prefix="planted-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        copy = copied(folder)
        plant(fault, copy)
        failed = None
        for files in test_files(fault, copy):
            failed = failed or first_failure(files, copy)
    return failed, time.monotonic() - started


def first_failure(files: list[str], copy: Path) -> str | None:
    """Run test files until a test fails; return its name."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-m", IN_CI, "-p", "no:cacheprovider", "--tb=no"]
    env = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    command += [f"--basetemp={copy.parent / 'pytest'}", *files]
    done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True)
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    # 5: no test was selected
    if done.returncode not in (0, 1, 5) or (done.returncode == 1 and not failed):
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return failed[1] if failed else None


def main() -> None:
    """Plant the requested faults, and print the test that found each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the first fault of each package")
    parser.add_argument("names", nargs="*", help="faults (default: all)")
    args = parser.parse_args()
    known = {fault.name: fault for fault in FAULTS}
    if unknown := [name for name in args.names if name not in known]:
        parser.error(f"no fault is called {unknown[0]}; they are {', '.join(known)}")
    faults = [known[name] for name in args.names] or list(FAULTS)
    if args.quick:
        faults = list({fault.package: fault for fault in reversed(faults)}.values())[::-1]
    found = 0
    for fault in faults:
        test, seconds = find(fault)
        found += test is not None
        print(f"{fault.name:20} {fault.file:32} {seconds:5.0f} s  {test or 'NOT FOUND'}", flush=True)
    print(json.dumps({"found": found, "faults": len(faults)}))


if __name__ == "__main__":
    main()
