from tests.precision import float64 as float64
from tests.registries import registries_are_restored as registries_are_restored
