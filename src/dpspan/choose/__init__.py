"""Choosing public data: how close candidates are, without privacy and with it."""

from dpspan.choose.gsd import UnprivateRanking as UnprivateRanking
from dpspan.choose.gsd import UnprivateRow as UnprivateRow
from dpspan.choose.gsd import gsd as gsd
from dpspan.choose.gsd import rank_public as rank_public
from dpspan.choose.probe import ProbeNetwork as ProbeNetwork
from dpspan.choose.selection import Choice as Choice
from dpspan.choose.selection import choose_public as choose_public
from dpspan.choose.selection import resolution as resolution
