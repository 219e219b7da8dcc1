"""`python -m agentfactory.viewer RUN [RUN ...]`: the same as `agentfactory view`."""

from agentfactory.base.user_code import import_path

if __name__ == "__main__":
    import_path.start_folder_last()

import argparse
import sys
from collections.abc import Sequence

from agentfactory.viewer.view_command import add_options, run
from agentfactory.viewer.runs.run_data import ViewError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="agentfactory view", description="Look at runs in a browser.")
    add_options(parser)
    options = parser.parse_args(arguments)
    try:
        run(options, lambda text: print(text, flush=True))
    except ViewError as error:
        print(f"agentfactory: {error}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
