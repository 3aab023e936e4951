"""No pictures: they have tests of their own, and take most of a small run's time."""

import pytest


@pytest.fixture(autouse=True, scope="session")
def no_pictures():
    with pytest.MonkeyPatch.context() as patch:
        for module in ("curves", "tiles_picture"):
            patch.setattr(f"neondist.session.{module}.can_draw", lambda: False)
        yield
