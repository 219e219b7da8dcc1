"""`agentfactory worlds`: installed worlds, tried in the terminal and served to other trainers."""
