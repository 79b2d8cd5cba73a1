"""The same budget through several methods and seeds, beside the baselines that cost nothing."""

from dpspan.comparison.compare import compare as compare
from dpspan.comparison.results import Comparison as Comparison
from dpspan.comparison.results import Result as Result
from dpspan.comparison.results import Row as Row
from dpspan.comparison.task import Contender as Contender
from dpspan.comparison.task import Task as Task
from dpspan.comparison.task import with_baselines as with_baselines
from dpspan.comparison.verdicts import verdicts as verdicts
