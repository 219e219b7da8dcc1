"""`agentfactory view`: show runs in a browser, during and after training: curves, every trajectory and every token."""
