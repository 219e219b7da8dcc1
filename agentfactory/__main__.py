"""`python -m agentfactory` is the `agentfactory` command."""

from agentfactory.base.user_code import import_path

import_path.start_folder_last()

from agentfactory.commands.process import run

run()
