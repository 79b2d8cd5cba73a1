"""The same budget through several methods and seeds, beside the baselines that cost nothing."""

from dpspan.app.comparison.compare import compare as compare
from dpspan.app.comparison.results import Comparison as Comparison
from dpspan.app.comparison.results import Result as Result
from dpspan.app.comparison.results import Row as Row
from dpspan.app.comparison.results import verdicts as verdicts
from dpspan.app.run.training import Contender as Contender
from dpspan.app.run.training import Task as Task
from dpspan.app.run.training import with_baselines as with_baselines
