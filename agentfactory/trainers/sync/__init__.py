"""Weight sync: the transfer of each policy version to the inference servers, with proof of its arrival."""
