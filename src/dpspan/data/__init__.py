"""Data from files: npz, IDX, image folders, CSV, Parquet and Hugging Face datasets on disk.

Nothing is learnt from the data on the way in: pixels are divided by 255, and whatever else
inputs are shifted and scaled by is a constant that the user gives. A mean of private data is not
public.
"""

from dpspan.data.arrays import Idx as Idx
from dpspan.data.arrays import Npz as Npz
from dpspan.data.huggingface import HuggingFace as HuggingFace
from dpspan.data.images import ImageFolder as ImageFolder
from dpspan.data.records import Loaded as Loaded
from dpspan.data.source import load as load
from dpspan.data.tables import Csv as Csv
from dpspan.data.tables import Parquet as Parquet
