"""Training from a configuration: `train("config.yaml")`; see `folder` for what a crash may cost."""

from dpspan.app.run.folder import RunFolder as RunFolder
from dpspan.app.run.training import Progress as Progress
from dpspan.app.run.training import Result as Result
from dpspan.app.run.training import train as train
