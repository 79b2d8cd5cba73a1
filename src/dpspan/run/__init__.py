"""Training from a configuration: `train("config.yaml")`; see `folder` for what a crash may cost."""

from dpspan.run.folder import RunFolder as RunFolder
from dpspan.run.training import Progress as Progress
from dpspan.run.training import Result as Result
from dpspan.run.training import train as train
