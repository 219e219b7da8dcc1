"""The subprocess that converts documents to text: hostile ones can keep a library busy for minutes, or crash it.

A request on stdin is a line of JSON with `url`, `type`, `charset`, `bytes` (the document's length) and `seconds` (the
time limit), followed by the document. The answer is a line of JSON with `title`, `text` and `links`, or with `error`.
The kernel's alarm kills the process if a request exceeds its time limit, and the process exits when its parent is gone.
"""

import json
import logging
import os
import resource
import signal
import sys

from agentfactory.base.processes import parent_watch
from agentfactory.worlds.browse.documents import Document, PageError
from agentfactory.worlds.browse.markdown import read_document

MEMORY_BYTES = 2 << 30


def main() -> None:
    parent_watch.follow_parent()
    logging.disable()  # pypdf's warnings about malformed files
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # other output must not mix with replies
    print(json.dumps({"ready": True}), file=replies)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        content = sys.stdin.buffer.read(request["bytes"])
        signal.setitimer(signal.ITIMER_REAL, request["seconds"])
        try:
            found = read_document(Document(request["url"], request["type"], request["charset"], content))
            answer = {"title": found.title, "text": found.text, "links": found.links}
        except PageError as error:
            answer = {"error": str(error)}
        except MemoryError:
            answer = {"error": f"{request['url']} needs too much memory to be read."}
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(answer), file=replies)


if __name__ == "__main__":
    main()
