"""The tools of a recipe, and a chain's session with them."""
