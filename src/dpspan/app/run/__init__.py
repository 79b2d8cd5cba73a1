"""One run: a contender, trained on a task with a seed, in a folder. See `folder` for its files."""

from dpspan.app.run.folder import RunFolder as RunFolder
from dpspan.app.run.from_config import train as train
from dpspan.app.run.resumable import Progress as Progress
from dpspan.app.run.resumable import Result as Result
