"""The scores of reasoning-gym's own verifiers, unmodified: they evaluate the answers, which must be our own.

Reads lines of JSON on stdin, [row's `reasoning_gym`, answers], and prints a line with the scores."""

import json
import os
import sys
from copy import deepcopy

from agentfactory.worlds.reasoning_gym.gym_process import data_set


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    for line in sys.stdin:
        task, answers = json.loads(line)
        dataset = data_set(task)
        entry = dataset[task["index"]]
        scores = []
        for answer in answers:
            try:
                scores.append(float(dataset.score_answer(answer, deepcopy(entry))))
            except Exception:  # the world scores 0, too
                scores.append(0.0)
        print(json.dumps(scores), file=replies)


if __name__ == "__main__":
    main()
