from tests.worlds.browse.site import public_address  # noqa: F401
