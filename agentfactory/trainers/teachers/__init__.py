"""Teachers: models that grade each token of the policy's chains."""
