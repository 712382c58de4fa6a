"""A compiled graph for people: the report, the explanation of one parameter, diagrams."""

from .report import Report, make_report, report
from .rows import Share, message, placed
from .texts import summary
