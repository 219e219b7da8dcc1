from tests.tools.web.site import public_address  # noqa: F401
