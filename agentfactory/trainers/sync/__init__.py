"""Weight sync: loads each version of the policy into the inference servers, with proof that it arrived."""
