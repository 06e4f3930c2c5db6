from fixtures import pool  # noqa: F401
