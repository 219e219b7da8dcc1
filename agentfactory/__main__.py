"""`python -m agentfactory` is the `agentfactory` command."""

from agentfactory.cli import main

raise SystemExit(main())
