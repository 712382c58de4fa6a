"""A compiled graph for people: the report, the explanation of one parameter, diagrams."""

from .report import Report, make_report, report, summary
from .rows import Share, message, placed
