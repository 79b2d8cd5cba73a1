"""Single numbers about private records, each released with its price: a choice, quantiles, a mean.

No torch is needed for any of them.
"""
