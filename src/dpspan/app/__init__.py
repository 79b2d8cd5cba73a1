"""The command line and what it runs: configurations, data, runs, comparisons, advice, reports."""
