"""A training service with the Tinker API: `agentfactory serve RECIPE --as tinker`. The core does not import it."""
