"""The tools of a recipe, and each chain's session with them."""
