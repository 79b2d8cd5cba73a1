"""Data from files: npz, IDX, image folders, CSV, Parquet and Hugging Face datasets on disk.

Nothing is learnt from the data on the way in: pixels are divided by 255, and whatever else
inputs are shifted and scaled by is a constant that the user gives. A mean of private data is not
public.
"""

from dpspan.app.data.formats import Csv as Csv
from dpspan.app.data.formats import HuggingFace as HuggingFace
from dpspan.app.data.formats import Idx as Idx
from dpspan.app.data.formats import ImageFolder as ImageFolder
from dpspan.app.data.formats import Npz as Npz
from dpspan.app.data.formats import Parquet as Parquet
from dpspan.app.data.source import Loaded as Loaded
from dpspan.app.data.source import load as load
