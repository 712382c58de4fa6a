"""The same random examples in every run."""

import hypothesis

hypothesis.settings.register_profile(
    'gate', derandomize=True, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
)
hypothesis.settings.load_profile('gate')
