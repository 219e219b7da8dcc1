"""`agentfactory tools`: a recipe's tools without a model."""
