"""What holds for every property test: how long it takes decides nothing."""

from hypothesis import HealthCheck, settings

settings.register_profile("edgekit", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("edgekit")
