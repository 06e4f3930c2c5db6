import pytest

from harness import Pool


@pytest.fixture(scope="session")
def pool():
    pool = Pool()
    yield pool
    pool.stop()
