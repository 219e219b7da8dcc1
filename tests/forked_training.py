"""`train.py` without the seconds of its imports: this process has done them, and forks one for each line of stdin.

A line is JSON: `arguments` of the command line, `environment` in addition to this process's, and `log`, a file for what
it prints; answered with its process id. Or `wait`, a process id; answered with the exit status when it has ended (as of
subprocess: less than 0 for a signal).
"""

import json
import os
import sys
import traceback

import accelerate.utils
import peft
import torch
import transformers
import trl.chat_template_utils

import rollout.delivery
import rollout.renderer
import train
import trainers.checkpoints
import trainers.rl
import trainers.sft
import trainers.sync.patient

IMPORTED = (accelerate, peft, rollout, trainers, transformers, trl)


def run(arguments: list[str], environment: dict[str, str], log: str) -> int:
    """What `python train.py ARGUMENTS` does."""
    os.setsid()
    os.environ.update(environment)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDONLY)
    for number, target in enumerate((null, descriptor, descriptor)):
        os.dup2(target, number)
    sys.argv = ["train.py", *arguments]
    return train.main()


def main() -> None:
    """Fork until stdin ends."""
    torch.set_num_threads(1)
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if "wait" in asked:
            print(os.waitstatus_to_exitcode(os.waitpid(asked["wait"], 0)[1]), flush=True)
            continue
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = run(**asked)
            except SystemExit as error:
                status = int(error.code or 0)
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        print(child, flush=True)


if __name__ == "__main__":
    main()
