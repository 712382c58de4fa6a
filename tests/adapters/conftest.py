"""All is float64."""

from tests.precision import float64_models as float64_models
