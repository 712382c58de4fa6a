"""Set before any test module is imported."""
from tests import xla

xla.compile_quickly()
