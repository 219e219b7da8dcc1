"""The process in which documents become text: hostile ones can keep a library busy for minutes, or crash it.

It reads requests on stdin: a line of JSON (`url`, `type`, `charset`, `bytes`: how many follow, `seconds`) and the
document. It answers each with a line of JSON: `title`, `text`, `links`, or `error`. The kernel's alarm ends a process
that takes too long; one whose parent is gone ends by itself.
"""

import json
import logging
import os
import resource
import signal
import sys

from agentfactory.tools.processes import parent_watch
from agentfactory.worlds.browse.documents import Document, PageError
from agentfactory.worlds.browse.markdown import read_document

MEMORY_BYTES = 2 << 30


def main() -> None:
    """Answer requests until stdin ends."""
    parent_watch.follow_parent()
    logging.disable()  # what pypdf says of malformed files
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # other output is not a reply
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
