"""Settings of all tests."""

from hypothesis import settings

# how long an example takes says nothing on a machine that others use too
settings.register_profile("neondist", deadline=None)
settings.load_profile("neondist")
