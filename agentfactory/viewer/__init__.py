"""`agentfactory view`: runs in a browser: curves, every trajectory and every token, while they train and afterwards."""
