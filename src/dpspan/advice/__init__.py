"""What to do with a private dataset, asked of public data before any private step: costs no ε."""

from dpspan.advice.advise import RATES as RATES
from dpspan.advice.advise import advise as advise
from dpspan.advice.results import Advice as Advice
from dpspan.advice.results import Trial as Trial
from dpspan.advice.usual import usual_contenders as usual_contenders
