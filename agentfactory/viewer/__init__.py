"""`agentfactory view`: shows runs in a browser, during and after training: curves, every trajectory and every token."""
