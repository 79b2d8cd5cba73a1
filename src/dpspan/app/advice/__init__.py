"""What to do with a private dataset, asked of public data before any private step: costs no ε."""

from dpspan.app.advice.advise import RATES as RATES
from dpspan.app.advice.advise import advise as advise
from dpspan.app.advice.advise import default_contenders as default_contenders
from dpspan.app.advice.results import Advice as Advice
from dpspan.app.advice.results import Trial as Trial
