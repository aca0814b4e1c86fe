import pytest
import ranks


@pytest.fixture(scope="session", autouse=True)
def processes_end_with_the_session():
    yield
    ranks.close_all()
