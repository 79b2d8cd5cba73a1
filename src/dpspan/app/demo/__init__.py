"""`make demo`: what public data is worth, on real digits, in about two minutes.

Nothing is downloaded. The private records are scikit-learn's handwritten digits. Four public
candidates: scans of the same kind that some people agreed to publish (nobody has labelled them),
digits in matplotlib's fonts (labelled, but printed), patches of two photographs, and noise. All
methods get the same ε; the table is what came out.
"""

from dpspan.app.demo.command import network as network
from dpspan.app.demo.command import run as run
