"""WebShop's base colours: an option that contains one of them counts as that colour."""

_NAMES = """
alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown burgundy camel camo
caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac copper coral cranberry cream crystal
dark denim eggplant elephant espresso fuchsia gold granite grape graphite grass gray green grey heather indigo ivory
ivy khaki lavender lemon leopard light lilac lime magenta maroon mauve merlot midnight mint mocha multicolor
mushroom mustard natural navy nude olive orange peach pewter pink plum purple rainbow red rose royal rust sand
sapphire seashell silver skull slate steel stone stonewash sunflower tan taupe teal tiger turquoise violet walnut
wheat white wine yellow
"""
_BASE_COLOURS = tuple(_NAMES.split())
"""The base colours in the published order; the first match counts."""


def base_colour(option: str | tuple[str, str]) -> str | None:
    """Return the first base colour that is a substring of the value, or an element of a (name, value) pair; None if
    there is none."""
    return next((colour for colour in _BASE_COLOURS if colour in option), None)
