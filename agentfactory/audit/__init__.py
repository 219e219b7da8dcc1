"""`agentfactory audit`: what a finished or running run did, checked against its own files."""
