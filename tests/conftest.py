"""For all tests."""

from hypothesis import HealthCheck, settings

# Machines are busy: an example may take as long as it takes.
settings.register_profile("project", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("project")
